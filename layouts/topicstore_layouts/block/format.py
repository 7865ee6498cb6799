"""The stored form of a block: the columns of some messages.

Stored form, version 1 (keyspace ``data``; integers in keys unsigned; integers in values
little-endian)::

    (generation, 0, last position)      -> header head payloads     a block, as a batch was written
    (generation, end of segment, number) -> header head payloads     a frame, as earlier versions wrote it; see `frames`

    header    48 bytes: version:u8 = 1, codec of the head:u8, codec of the payloads:u8,
              flags:u8 (1: a frame), rows:u32, stream:u32 (0: of several streams),
              stored bytes of the head:u32, its bytes uncompressed:u32, those of the payloads
              uncompressed:u32, base:u64 (first position of the batch or segment),
              first:u64 (lowest position in it), checksum:u64
    checksum  xxh3 of 64 bits of everything but the checksum; its seed is the last position, or for
              a frame the end of its segment plus 0xC2B2AE3D27D4EB4F times (number + 1), plus
              0x9E3779B97F4A7C15 times (shard << 32 | generation), modulo 2 ** 64
    codec     0 uncompressed, 1 zstd, 2 lz4 (a raw block)
    head      msgpack array [positions, topics, client ids, qos, retain, timestamps,
              properties, lengths]
    payloads  msgpack array of the payloads

    numbers     a number, which all rows have, or bytes: one unsigned integer per row, all of
                the same number of bytes
    positions   nil if they count up from ``first`` by one; else bytes: in a block, numbers to add to
                ``first``; in a frame, the difference of each to the previous one (of the first to
                ``first``) modulo 2 ** 64, the lowest bytes of all first, then the next ones
    names       numbers of names in the slab's dictionary (see `topicstore_layouts.shared.name_table`), or
                [array of texts, numbers: places in that array]
    topics      names of kind 0x10
    client ids  names of kind 0x20
    qos, retain numbers
    timestamps  nil if each is its position's time, else [lowest, numbers to add to it]
    properties  nil if no row has any, else an array: nil or the array of `topicstore.Properties`
    lengths     numbers: bytes of the payloads

A block's key is its highest position, or higher after its last messages were deleted; its rows are
in order of position. Blocks of one batch share ``base``; their positions may interleave.
Blocks of different batches don't overlap. A frame's rows are in order of stream, topic, position;
its topics and client ids are texts.

The codecs and the container are public formats: zstd (RFC 8878), lz4 blocks
(https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md) and MessagePack
(https://github.com/msgpack/msgpack/blob/master/spec.md).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from itertools import islice, takewhile
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from topicstore import MessageBatch, Properties
from topicstore.contract.batch import unread
from topicstore.contract.columns import Coded, Column, Constant, Indices, Texts, fold, only, take, to_list, window
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import Positions, consecutive_positions, time_of

from .compression import Compressor, decompress
from .packing import (
    Array,
    Names,
    Number,
    Numbers,
    own_times,
    pack_array,
    pack_names,
    pack_numbers,
    pack_times,
    unpack_array,
    unpack_numbers,
)
from .payloads import PackedPayloads, Payloads

N = TypeVar("N", bound=Column, covariant=True)
"""The type of the columns of topics and client ids."""

__all__ = [
    "MIXED",
    "Block",
    "Columns",
    "block_seed",
    "encode_block",
    "encode_message",
    "frame_seed",
]

MIXED = 0
"""The stream number of a block that holds messages of several streams."""

_VERSION = 1
_HEADER = struct.Struct("<BBBBIIIIIQQ")
_FRAME = 1
_SPREAD, _FRAME_SPREAD, _U64 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1
_CHECKSUM = struct.Struct("<Q")
_BODY = _HEADER.size + _CHECKSUM.size
_ENCODER = msgspec.msgpack.Encoder()


class _Head(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    positions: bytes | None
    topics: Names
    client_ids: Names
    qos: Numbers
    retain: Numbers
    timestamps: tuple[Number, Numbers] | None
    properties: list[Properties | None] | None
    lengths: Numbers


_HEADS = msgspec.msgpack.Decoder(_Head)


class Columns(msgspec.Struct, Generic[N], frozen=True, gc=False):
    """The columns of a block. Topics and client ids are numbers of the slab's dictionaries, or texts.

    The type parameter is the form of both columns: ``Columns[Coded]`` has texts, ``Columns[Column]`` texts or numbers.
    """

    positions: Positions
    topics: N
    """Topics as numbers of the dictionary (`Constant` or array), or texts (`Constant` or `Coded`), like client ids."""
    client_ids: N
    qos: Column
    retain: Column
    timestamps: Column
    properties: Column
    payloads: list[bytes]
    sizes: list[int]
    """The number of bytes of each payload."""

    def take(self, rows: Indices) -> Columns[N]:
        """Return some of the rows."""
        return Columns(*(take(getattr(self, name), rows) for name in self.__struct_fields__))

    def window(self, start: int, stop: int) -> Columns[N]:
        """Return the rows from ``start`` to before ``stop``."""
        return Columns(*(getattr(self, name)[start:stop] for name in self.__struct_fields__))


def block_seed(last: int, slab: int) -> int:
    """Return the seed of the checksum of a block under its key; ``slab`` is shard << 32 | generation."""
    return (last + _SPREAD * slab) & _U64


def frame_seed(end: int, number: int, slab: int) -> int:
    """Return the seed of the checksum of a frame."""
    return (end + _FRAME_SPREAD * (number + 1) + _SPREAD * slab) & _U64


def encode_block(columns: Columns[Column], stream: int, base: int, seed: int, compress: Compressor) -> bytes:
    """Return the stored value of a block, whose rows are in order of position; ``seed`` is its `block_seed`."""
    positions, rows = columns.positions, len(columns.positions)
    first = int(positions[0])
    consecutive = int(positions[-1]) - first == rows - 1
    packed = None if consecutive else pack_array(positions - np.uint64(first))
    return _encode(columns, packed, (0, stream, base, first), seed, compress)


def encode_message(
    message: MessageBatch, topic: int | str, client_id: int | str, stream: int, seed: int, compress: Compressor
) -> bytes:
    """Return the stored value of a block of one message, as `encode_block` does, but without arrays.

    ``topic`` and ``client_id`` are numbers of the slab's dictionaries, or texts that have no number.
    """
    position, _ = message.span
    payload, timestamp, properties = only(message.payloads), only(message.timestamps), only(message.properties)
    head = _Head(
        None,
        topic if isinstance(topic, int) else ([topic], 0),
        client_id if isinstance(client_id, int) else ([client_id], 0),
        int(only(message.qos)),
        int(only(message.retain)),
        None if timestamp == time_of(position) else (int(timestamp), 0),
        None if properties is None else [properties],
        len(payload),
    )
    return _join(head, [payload], (0, stream, position, position), seed, compress)


def _encode(
    columns: Columns[Column], packed: bytes | None, marks: tuple[int, int, int, int], seed: int, compress: Compressor
) -> bytes:
    properties = columns.properties
    head = _Head(
        packed,
        pack_names(columns.topics),
        pack_names(columns.client_ids),
        pack_numbers(columns.qos),
        pack_numbers(columns.retain),
        pack_times(columns.timestamps, columns.positions),
        None if isinstance(properties, Constant) and properties.value is None else to_list(properties),
        pack_numbers(columns.sizes),
    )
    return _join(head, columns.payloads, marks, seed, compress)


def _join(
    head: _Head, payloads: list[bytes], marks: tuple[int, int, int, int], seed: int, compress: Compressor
) -> bytes:
    flags, stream, base, first = marks
    raw_head, raw_payloads = _ENCODER.encode(head), _ENCODER.encode(payloads)
    head_codec, stored_head = compress(raw_head)
    payload_codec, stored_payloads = compress(raw_payloads)
    header = _HEADER.pack(
        _VERSION,
        head_codec,
        payload_codec,
        flags,
        len(payloads),
        stream,
        len(stored_head),
        len(raw_head),
        len(raw_payloads),
        base,
        first,
    )
    checksum = _CHECKSUM.pack(_digest(header, stored_head, stored_payloads, seed))
    return b"".join((header, checksum, stored_head, stored_payloads))


def _digest(header: bytes | memoryview, head: bytes | memoryview, payloads: bytes | memoryview, seed: int) -> int:
    hasher = xxhash.xxh3_64(header, seed=seed)
    hasher.update(head)
    hasher.update(payloads)
    return hasher.intdigest()


def _texts(names: Names) -> tuple[list[str], int | bytes]:
    """Return the texts of a frame's names, and the place of each row's name among them."""
    if not isinstance(names, tuple):
        raise CorruptionError("a frame has numbers in place of names")
    return names


class Block:
    """A stored block. Opening one checks its checksum and decodes only its header."""

    __slots__ = (
        "_head",
        "_parts",
        "_payloads",
        "_positions",
        "_sizes",
        "_topics",
        "_value",
        "base",
        "first",
        "frame",
        "last",
        "rows",
        "stream",
    )

    def __init__(self, value: bytes, last: int, seed: int) -> None:
        if len(value) < _BODY or value[0] != _VERSION:
            if value and value[0] > _VERSION:
                raise NewerFormatError(f"a block of version {value[0]}; this topicstore reads up to {_VERSION}")
            raise CorruptionError("not a block")
        fields: tuple[int, ...] = _HEADER.unpack_from(value)
        (
            _,
            head_codec,
            payload_codec,
            flags,
            self.rows,
            self.stream,
            head_size,
            raw_head,
            raw_payloads,
            self.base,
            self.first,
        ) = fields
        view = memoryview(value)
        head, payloads = view[_BODY : _BODY + head_size], view[_BODY + head_size :]
        if _digest(view[: _HEADER.size], head, payloads, seed) != _CHECKSUM.unpack_from(value, _HEADER.size)[0]:
            raise CorruptionError("the checksum is wrong")
        if flags & ~_FRAME:
            raise NewerFormatError(f"a block with flags {flags:#x}, which this topicstore doesn't know")
        if not 0 < 2 * self.rows < raw_payloads:  # each payload has a prefix of at least two bytes
            raise CorruptionError(f"{self.rows} rows can't have {raw_payloads} bytes of payloads")
        self.frame = flags == _FRAME
        self.last = last
        """The position in the block's key. No position in the block is higher."""
        self._value = value
        self._parts = head, payloads
        self._sizes = head_codec, raw_head, payload_codec, raw_payloads
        self._head: _Head | None = None
        self._positions: Positions | None = None
        self._topics: Column | None = None
        self._payloads: Payloads | None = None

    def holds(self, value: bytes) -> bool:
        """Return whether this block was decoded from ``value``."""
        return self._value == value

    def keep_payloads(self) -> None:
        """Cache the decompressed payloads, for a reader that will return more of them."""
        self._payloads = self.payloads()

    @property
    def size(self) -> int:
        """The number of bytes of the stored value."""
        return len(self._value)

    @property
    def raw_bytes(self) -> int:
        """The number of bytes of all columns, uncompressed."""
        _, head, _, payloads = self._sizes
        return head + payloads

    @property
    def payload_bytes(self) -> int:
        """The approximate number of bytes of the payloads."""
        size: int = self._sizes[3]
        return size

    def _columns(self) -> _Head:
        if self._head is None:
            codec, size, _, _ = self._sizes
            try:
                self._head = _HEADS.decode(decompress(codec, self._parts[0], size))
            except (msgspec.DecodeError, UnicodeDecodeError) as bad:
                raise CorruptionError(f"the head of a block can't be decoded: {bad}") from bad
        return self._head

    def positions(self) -> Positions:
        """Return the positions, which strictly increase in a block, but not in a frame."""
        if self._positions is None:
            packed = self._columns().positions
            if packed is None:
                self._positions = consecutive_positions(self.first, self.rows)
            elif self.frame:
                self._positions = np.cumsum(self._steps(packed), dtype=np.uint64) + np.uint64(self.first)
            else:
                self._positions = np.uint64(self.first) + unpack_array(packed, self.rows).astype(np.uint64)
        return self._positions

    def _steps(self, packed: bytes) -> Positions:
        if len(packed) != 8 * self.rows:
            raise CorruptionError(f"positions of {len(packed)} bytes in a frame of {self.rows} rows")
        planes = np.frombuffer(packed, np.uint8).reshape(8, self.rows)
        return np.ascontiguousarray(planes.T).view(np.uint64)[:, 0]

    def topics(self) -> Column:
        """Return the topics: numbers (`Constant` or array) or texts (`Constant` or `Coded`)."""
        if self._topics is None:
            self._topics = self._names(self._columns().topics)
        return self._topics

    def client_ids(self) -> Column:
        """Return the client ids, in the forms that `topics` has."""
        return self._names(self._columns().client_ids)

    def _names(self, packed: Names) -> Column:
        if not isinstance(packed, tuple):
            if isinstance(packed, int) and packed < 0:
                raise CorruptionError(f"a name has the number {packed}")
            return unpack_numbers(packed, self.rows)
        texts, places = packed
        if not 0 <= (places if isinstance(places, int) else int(unpack_array(places, self.rows).max())) < len(texts):
            raise CorruptionError(f"a name that is not among the {len(texts)} of its block")
        if isinstance(places, int):
            return Constant(texts[places], self.rows)
        return Coded(unpack_array(places, self.rows), Texts.of(texts))

    def rows_of(self, topic: str) -> slice | None:
        """Return the rows of a topic in a frame; None if it has none. They lie together, in order of position."""
        texts, places = _texts(self._columns().topics)
        try:
            number = texts.index(topic) if self.stream == MIXED else bisect_left(texts, topic)
        except ValueError:
            return None
        if number == len(texts) or texts[number] != topic:
            return None
        if isinstance(places, int):
            return slice(0, self.rows) if places == number else None
        codes = unpack_array(places, self.rows)  # ascending, because the rows are in order of topics
        start, stop = (int(codes.searchsorted(codes.dtype.type(number), side)) for side in ("left", "right"))
        return slice(start, stop) if start < stop else None

    def topics_with(self, prefix: str) -> tuple[int, list[str]]:
        """Return the topics of a frame of one stream that begin with a prefix, and the number of the first of them."""
        texts, _ = _texts(self._columns().topics)
        start = bisect_left(texts, prefix)
        return start, list(takewhile(lambda text: text.startswith(prefix), islice(texts, start, None)))

    def rows_of_topics(self, first: int, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask of a frame's rows with wanted topics, where ``wanted`` begins at topic number ``first``."""
        texts, places = _texts(self._columns().topics)
        chosen = np.zeros(len(texts), np.bool_)
        chosen[first : first + len(wanted)] = wanted
        try:
            return chosen[unpack_array(places, self.rows)]
        except IndexError:
            raise CorruptionError(f"a name that is not among the {len(texts)} of its block") from None

    def cut(self, rows: slice, wanted: frozenset[str]) -> Columns[Column]:
        """Return a few neighbouring rows of a frame; payloads and client ids only if they are ``wanted``.

        The column of sizes is empty if payloads are not wanted.
        """
        start, stop = rows.start, rows.stop
        positions = self.positions_of(rows)
        payloads = self.payloads().pick(rows) if "payloads" in wanted else []
        own = self._columns().timestamps is None
        return Columns(
            positions,
            self._cut_topics(rows),
            self._cut_client_ids(rows) if "client_ids" in wanted else unread("client_ids", stop - start),
            self.qos()[rows],
            window(self.retain(), start, stop),
            own_times(positions) if own else window(self.timestamps(self.positions()), start, stop),
            window(self.properties(), start, stop),
            payloads,
            list(map(len, payloads)),
        )

    def positions_of(self, rows: slice) -> Positions:
        """Return the positions of some rows."""
        return self.positions()[rows]

    def _cut_topics(self, rows: slice) -> Column:
        return self._cut_names(self._columns().topics, rows)

    def _cut_client_ids(self, rows: slice) -> Column:
        return self._cut_names(self._columns().client_ids, rows)

    def _cut_names(self, packed: Names, rows: slice) -> list[str] | Constant[str]:
        texts, places = _texts(packed)
        try:
            if isinstance(places, int) and places >= 0:
                return Constant(texts[places], rows.stop - rows.start)
            return fold([texts[place] for place in unpack_array(places, self.rows)[rows].tolist()])
        except IndexError:
            raise CorruptionError(f"a name that is not among the {len(texts)} of its block") from None

    def qos(self) -> Constant[int] | Array:
        """Return the QoS of each row."""
        return unpack_numbers(self._columns().qos, self.rows)

    def retain(self) -> Column:
        """Return the retain flags, as bool."""
        flags = unpack_numbers(self._columns().retain, self.rows)
        return Constant(bool(flags.value), self.rows) if isinstance(flags, Constant) else flags.astype(bool)

    def timestamps(self, positions: Positions) -> Column:
        """Return the timestamps in microseconds; ``positions`` are those of the block."""
        packed = self._columns().timestamps
        if packed is None:
            return own_times(positions)
        lowest, numbers = packed
        if isinstance(numbers, int):
            return Constant(lowest + numbers, self.rows)
        return unpack_array(numbers, self.rows).astype(np.int64) + lowest

    def properties(self) -> Column:
        """Return the properties."""
        properties = self._columns().properties
        if properties is None:
            return Constant(None, self.rows)
        if len(properties) != self.rows:
            raise CorruptionError(f"a block of {self.rows} rows has {len(properties)} properties")
        return properties

    def payloads(self) -> Payloads:
        """Return the payloads, decompressed at the latest when they are used."""
        return self._open_payloads() if self._payloads is None else self._payloads

    def _open_payloads(self) -> Payloads:
        _, _, codec, size = self._sizes
        return PackedPayloads(decompress(codec, self._parts[1], size), self.sizes())

    def sizes(self) -> Constant[int] | Array:
        """Return the number of bytes of each payload."""
        return unpack_numbers(self._columns().lengths, self.rows)

    def columns(self) -> Columns[Column]:
        """Return all columns as they were encoded."""
        positions, payloads = self.positions(), self.payloads().tolist()
        return Columns(
            positions,
            self.topics(),
            self.client_ids(),
            self.qos(),
            self.retain(),
            self.timestamps(positions),
            self.properties(),
            payloads,
            list(map(len, payloads)),
        )
