"""The stored form of a block: the columns of some messages of one batch.

Stored form, version 1 (keyspace ``data``; integers in keys unsigned; integers in values
little-endian)::

    (generation, 0, last position) -> header head payloads

    header    48 bytes: version:u8 = 1, codec of the head:u8, codec of the payloads:u8, flags:u8 = 0,
              rows:u32, stream:u32 (0: of several streams), stored bytes of the head:u32,
              its bytes uncompressed:u32, those of the payloads uncompressed:u32,
              base:u64 (first position of the batch), first:u64 (of the block), checksum:u64
    checksum  xxh3 of 64 bits of everything but the checksum; its seed is the last position plus
              0x9E3779B97F4A7C15 times (shard << 32 | generation), modulo 2 ** 64
    codec     0 as it is, 1 zstd, 2 lz4 (a raw block)
    head      msgpack array [positions, topics, client ids, qos, retain, timestamps,
              properties, lengths]
    payloads  msgpack array of the payloads

    numbers     a number, which all rows have, or bytes: one unsigned integer a row, each of
                as many bytes as there are bytes a row
    positions   nil if they count up from ``first`` by one, else bytes: numbers to add to ``first``
    topics      numbers: names of kind 0x10 (see `topicstore_layouts.names`)
    client ids  numbers: names of kind 0x20
    qos, retain numbers
    timestamps  nil if each is its position's time, else [lowest, numbers to add to it]
    properties  nil if no row has any, else an array: nil or the array of `topicstore.Properties`
    lengths     numbers: bytes of the payloads

The key's position is the highest in the block, or higher once its last messages were
deleted. Blocks of one batch share ``base``; their positions may interleave. Blocks of
different batches don't overlap.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from topicstore import Properties
from topicstore.columns import Column, Constant, Indices, take, to_list
from topicstore.errors import CorruptionError, NewerFormatError
from topicstore.positions import COUNTER_BITS, Positions, consecutive_positions

from .codec import Compressor, decompress
from .payloads import PackedPayloads

__all__ = ["MIXED", "Block", "Columns", "encode_block"]

MIXED = 0
"""The stream number of a block that holds messages of several streams."""

_VERSION = 1
_HEADER = struct.Struct("<BBBBIIIIIQQ")
_SPREAD, _U64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
_CHECKSUM = struct.Struct("<Q")
_BODY = _HEADER.size + _CHECKSUM.size
_WIDTHS = (
    (1 << 8, np.dtype("<u1")),
    (1 << 16, np.dtype("<u2")),
    (1 << 32, np.dtype("<u4")),
    (1 << 64, np.dtype("<u8")),
)
_DTYPES = {dtype.itemsize: dtype for _, dtype in _WIDTHS}
_ENCODER = msgspec.msgpack.Encoder()

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Numbers = _Number | bytes
Array = npt.NDArray[Any]


class _Head(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    positions: bytes | None
    topics: _Numbers
    client_ids: _Numbers
    qos: _Numbers
    retain: _Numbers
    timestamps: tuple[_Number, _Numbers] | None
    properties: list[Properties | None] | None
    lengths: _Numbers


_HEADS = msgspec.msgpack.Decoder(_Head)


class Columns(msgspec.Struct, frozen=True, gc=False):
    """What goes into a block: the columns of a batch with names as numbers."""

    positions: Positions
    topics: Constant[int] | Array
    client_ids: Constant[int] | Array
    qos: Column
    retain: Column
    timestamps: Column
    properties: Column
    payloads: list[bytes]
    sizes: list[int]
    """Bytes of each payload."""

    def take(self, rows: Indices) -> Columns:
        """Return some of the rows."""
        return Columns(*(take(getattr(self, name), rows) for name in self.__struct_fields__))

    def window(self, start: int, stop: int) -> Columns:
        """Return the rows from ``start`` to before ``stop``."""
        return Columns(*(getattr(self, name)[start:stop] for name in self.__struct_fields__))


def encode_block(columns: Columns, stream: int, base: int, last: int, compress: Compressor, slab: int = 0) -> bytes:
    """Return the value of a block whose key ends in ``last``; ``slab`` is shard << 32 | generation."""
    positions, rows = columns.positions, len(columns.positions)
    first = int(positions[0])
    consecutive = int(positions[-1]) - first == rows - 1
    head = _Head(
        None if consecutive else _pack_array(positions - np.uint64(first)),
        _pack(columns.topics),
        _pack(columns.client_ids),
        _pack(columns.qos),
        _pack(columns.retain),
        _pack_times(columns.timestamps, positions),
        None
        if isinstance(columns.properties, Constant) and columns.properties.value is None
        else to_list(columns.properties),
        _pack(columns.sizes),
    )
    raw_head, raw_payloads = _ENCODER.encode(head), _ENCODER.encode(columns.payloads)
    head_codec, stored_head = compress(raw_head)
    payload_codec, stored_payloads = compress(raw_payloads)
    header = _HEADER.pack(
        _VERSION,
        head_codec,
        payload_codec,
        0,
        rows,
        stream,
        len(stored_head),
        len(raw_head),
        len(raw_payloads),
        base,
        first,
    )
    checksum = _CHECKSUM.pack(_digest(header, stored_head, stored_payloads, last, slab))
    return b"".join((header, checksum, stored_head, stored_payloads))


def _digest(
    header: bytes | memoryview, head: bytes | memoryview, payloads: bytes | memoryview, last: int, slab: int
) -> int:
    hasher = xxhash.xxh3_64(header, seed=(last + _SPREAD * slab) & _U64)
    hasher.update(head)
    hasher.update(payloads)
    return hasher.intdigest()


def _pack(values: Column) -> _Numbers:
    if isinstance(values, Constant):
        return int(values.value)
    if isinstance(values, list):
        if values.count(values[0]) == len(values):
            return int(values[0])
        values = np.array(values, dtype=np.uint64)
    return _pack_array(values)


def _pack_array(values: Array) -> bytes:
    highest = int(values.max())
    dtype = next(dtype for limit, dtype in _WIDTHS if highest < limit)
    return values.astype(dtype).tobytes()


def _pack_times(values: Column, positions: Positions) -> tuple[int, _Numbers] | None:
    if isinstance(values, Constant):
        return values.value, 0
    times = np.asarray(values, dtype=np.int64)
    if np.array_equal(times, (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)):
        return None
    lowest = int(times.min())
    return lowest, _pack(times - lowest)


class Block:
    """A stored block. Opening one checks its checksum and decodes only its header."""

    __slots__ = (
        "_head",
        "_parts",
        "_payloads",
        "_positions",
        "_sizes",
        "_value",
        "base",
        "first",
        "last",
        "rows",
        "stream",
    )

    def __init__(self, value: bytes, last: int, slab: int = 0) -> None:
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
        if _digest(view[: _HEADER.size], head, payloads, last, slab) != _CHECKSUM.unpack_from(value, _HEADER.size)[0]:
            raise CorruptionError("the checksum is wrong")
        if flags:
            raise NewerFormatError(f"a block with flags {flags:#x}, which this topicstore doesn't know")
        if not 0 < 2 * self.rows < raw_payloads:  # a payload has a prefix of two bytes or more
            raise CorruptionError(f"{self.rows} rows can't have {raw_payloads} bytes of payloads")
        self.last = last
        self._value = value
        self._parts = head, payloads
        self._sizes = head_codec, raw_head, payload_codec, raw_payloads
        self._head: _Head | None = None
        self._positions: Positions | None = None
        self._payloads: PackedPayloads | None = None

    def holds(self, value: bytes) -> bool:
        """Say whether this is the block of the value."""
        return self._value == value

    def keep_payloads(self) -> None:
        """Keep the payloads decompressed, for a reader who will come back for more."""
        self._payloads = self.payloads()

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return len(self._value)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads, about."""
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
        """Return the positions, strictly increasing."""
        if self._positions is None:
            packed = self._columns().positions
            if packed is None:
                self._positions = consecutive_positions(self.first, self.rows)
            else:
                self._positions = np.uint64(self.first) + self._array(packed).astype(np.uint64)
        return self._positions

    def topics(self) -> Constant[int] | Array:
        """Return the topics' numbers."""
        return self._numbers(self._columns().topics)

    def client_ids(self) -> Constant[int] | Array:
        """Return the client ids' numbers."""
        return self._numbers(self._columns().client_ids)

    def qos(self) -> Constant[int] | Array:
        """Return the QoS of each row."""
        return self._numbers(self._columns().qos)

    def retain(self) -> Column:
        """Return the retain flags, as bool."""
        flags = self._numbers(self._columns().retain)
        return Constant(bool(flags.value), self.rows) if isinstance(flags, Constant) else flags.astype(bool)

    def timestamps(self, positions: Positions) -> Column:
        """Return the timestamps in microseconds; ``positions`` are those of the block."""
        packed = self._columns().timestamps
        if packed is None:
            return (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
        lowest, numbers = packed
        if isinstance(numbers, int):
            return Constant(lowest + numbers, self.rows)
        return self._array(numbers).astype(np.int64) + lowest

    def properties(self) -> Column:
        """Return the properties."""
        properties = self._columns().properties
        if properties is None:
            return Constant(None, self.rows)
        if len(properties) != self.rows:
            raise CorruptionError(f"a block of {self.rows} rows has {len(properties)} properties")
        return properties

    def payloads(self) -> PackedPayloads:
        """Return the payloads, decompressed but not decoded."""
        if self._payloads is None:
            _, _, codec, size = self._sizes
            raw = decompress(codec, self._parts[1], size)
            return PackedPayloads(raw, self._numbers(self._columns().lengths))
        return self._payloads

    def _numbers(self, packed: _Numbers) -> Constant[int] | Array:
        return Constant(packed, self.rows) if isinstance(packed, int) else self._array(packed)

    def _array(self, packed: _Numbers) -> Array:
        if isinstance(packed, int):
            return np.full(self.rows, packed, dtype=np.uint64)
        dtype = _DTYPES.get(len(packed) // self.rows)
        if dtype is None or len(packed) != self.rows * dtype.itemsize:
            raise CorruptionError(f"a column of {len(packed)} bytes in a block of {self.rows} rows")
        return np.frombuffer(packed, dtype=dtype)

    def columns(self) -> Columns:
        """Return everything, as it went in."""
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
