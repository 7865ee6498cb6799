"""The stored form of a frame, a part of a merged segment, from which a few rows are read without decoding the others.

Stored form, version 2 (keyspace ``data``; integers in values little-endian). Frames of version 1 are those of `format`,
which also describes numbers and codecs::

    (generation, end of segment, number) -> header topics columns section*

    header    56 bytes: version:u8 = 2, codec of the topics:u8, codec of the columns:u8, flags:u8 = 1, rows:u32,
              stream:u32 (0: of several streams), stored bytes of the topics:u32, their bytes uncompressed:u32,
              those two of the columns:u32 u32, bytes of all payloads:u32, base:u64 (first position of the segment),
              first:u64 (lowest position in the frame), checksum:u64
    checksum  xxh3 of 64 bits of everything but the checksum, with the seed of a frame of version 1
    topics    their number:u32, bytes of a count:u8, the number of rows of each topic, NUL, the topics, each followed
              by NUL
    columns   msgpack array [positions, client ids, qos, retain, timestamps, properties, lengths, sections]
    section   the payloads of some rows, one after the other

    positions   nil if they count up from ``first`` by one; else bytes: the difference of each to the previous one of
                its topic, of a topic's first to ``first``, modulo 2 ** 64: the lowest bytes of all rows first, then the
                next ones, as many as the largest difference needs
    client ids  [texts joined by NUL, numbers: places among them]
    qos, retain, timestamps, properties, lengths as in a block
    sections    array of [rows, codec, stored bytes, bytes uncompressed]

Rows are in order of stream, topic, position; each topic has its rows together.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from topicstore import Properties
from topicstore.contract.columns import Coded, Column, Constant, Texts, to_list
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import Positions, consecutive_positions

from .compression import Compressor, decompress
from .format import Block, Columns
from .packing import (
    Array,
    Number,
    Numbers,
    pack_array,
    pack_numbers,
    pack_texts,
    pack_times,
    unpack_array,
)
from .payloads import Section, SectionedPayloads

__all__ = ["Frame", "FrameRows", "encode_frame", "open_frame"]

_VERSION = 2
_HEADER = struct.Struct("<BBBBIIIIIIIQQ")
_FRAME = 1
_CHECKSUM = struct.Struct("<Q")
_BODY = _HEADER.size + _CHECKSUM.size
_TOPICS = struct.Struct("<IB")
_SECTION_BYTES = 64 << 10
"""The least bytes of payloads that are compressed together, and half of the most, unless a single payload is larger: a
reader of one message decompresses all of them."""
_ENCODER = msgspec.msgpack.Encoder()


class _Columns(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    positions: bytes | None
    clients: tuple[str, Numbers]
    qos: Numbers
    retain: Numbers
    timestamps: tuple[Number, Numbers] | None
    properties: list[Properties | None] | None
    lengths: Numbers
    sections: list[tuple[Number, Number, Number, Number]]


_COLUMNS = msgspec.msgpack.Decoder(_Columns)


class FrameRows(msgspec.Struct, frozen=True, gc=False):
    """The rows of a frame: those of each topic together, in order of position."""

    positions: Positions
    topics: Coded | Constant[str]
    client_ids: Coded | Constant[str]
    qos: Column
    retain: Column
    timestamps: Column
    properties: Column
    sizes: Array
    """The number of bytes of each payload."""
    data: bytes
    """All payloads, one after the other."""

    @classmethod
    def of(cls, columns: Columns[Column]) -> FrameRows:
        """Return the rows of columns whose names are texts."""
        return cls(
            columns.positions,
            _texts(columns.topics),
            _texts(columns.client_ids),
            columns.qos,
            columns.retain,
            columns.timestamps,
            columns.properties,
            np.array(columns.sizes),
            b"".join(columns.payloads),
        )


def encode_frame(rows: FrameRows, stream: int, base: int, seed: int, compress: Compressor) -> bytes:
    """Return the stored value of a frame; ``seed`` is its `topicstore_layouts.block.format.frame_seed`."""
    positions, properties, first = rows.positions, rows.properties, rows.positions.min()
    topics, starts = _pack_topics(rows.topics)
    texts, places = pack_texts(rows.client_ids)
    sections = [(stop - start, *_packed(rows, start, stop, compress)) for start, stop in _sections(rows.sizes)]
    columns = _Columns(
        _pack_positions(positions, first, starts),
        ("\0".join(texts), places),
        pack_numbers(rows.qos),
        pack_numbers(rows.retain),
        pack_times(rows.timestamps, positions),
        None if isinstance(properties, Constant) and properties.value is None else to_list(properties),
        pack_numbers(rows.sizes),
        [(count, codec, len(stored), raw) for count, codec, stored, raw in sections],
    )
    raw_columns = _ENCODER.encode(columns)
    topics_codec, stored_topics = compress(topics)
    columns_codec, stored_columns = compress(raw_columns)
    header = _HEADER.pack(
        *(_VERSION, topics_codec, columns_codec, _FRAME, len(positions), stream),
        *(len(stored_topics), len(topics), len(stored_columns), len(raw_columns), len(rows.data)),
        *(base, int(first)),
    )
    body = b"".join((stored_topics, stored_columns, *(stored for _, _, stored, _ in sections)))
    return b"".join((header, _CHECKSUM.pack(_digest(header, body, seed)), body))


def _texts(names: Column) -> Coded | Constant[str]:
    if isinstance(names, Coded) or (isinstance(names, Constant) and isinstance(names.value, str)):
        return names
    raise CorruptionError("a frame has numbers in place of names")


def _digest(header: bytes | memoryview, body: bytes | memoryview, seed: int) -> int:
    hasher = xxhash.xxh3_64(header, seed=seed)
    hasher.update(body)
    return hasher.intdigest()


def _pack_topics(topics: Coded | Constant[str]) -> tuple[bytes, Array]:
    """Return topics in their stored form, and the first row of each."""
    if isinstance(topics, Constant):
        starts, texts = np.zeros(1, np.int64), [topics.value]
    else:
        starts = np.concatenate([[0], np.flatnonzero(topics.codes[1:] != topics.codes[:-1]) + 1])
        texts = topics.texts.values[topics.codes[starts]].tolist()
    counts = pack_array(np.diff(starts, append=len(topics)))
    width = len(counts) // len(texts)
    return b"".join((_TOPICS.pack(len(texts), width), counts, "\0".join(["", *texts, ""]).encode())), starts


def _pack_positions(positions: Positions, first: np.uint64, starts: Array) -> bytes | None:
    steps = np.diff(positions, prepend=first)
    if steps[0] == 0 and (steps[1:] == 1).all():
        return None
    steps[starts] = positions[starts] - first
    width = max(int(steps.max()).bit_length() + 7 >> 3, 1)
    return steps.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes()


def _sections(sizes: Array) -> list[tuple[int, int]]:
    """Return the first row of each section, and the row after its last one."""
    ends = np.cumsum(sizes)
    number = int(ends[-1]) // _SECTION_BYTES
    if number < 2:
        return [(0, len(sizes))]
    marks = np.searchsorted(ends, np.arange(1, number) * (int(ends[-1]) // number)) + 1
    return [(start, stop) for start, stop in pairwise([0, *marks.tolist(), len(sizes)]) if start < stop]


def _packed(rows: FrameRows, start: int, stop: int, compress: Compressor) -> tuple[int, bytes, int]:
    """Return the codec, the stored form and the uncompressed bytes of the section of these rows."""
    if stop - start == len(rows.sizes):
        raw = rows.data
    else:
        begin = int(rows.sizes[:start].sum())
        raw = rows.data[begin : begin + int(rows.sizes[start:stop].sum())]
    return *compress(raw), len(raw)


def open_frame(value: bytes, end: int, seed: int) -> Block:
    """Open a frame of either version; ``end`` is the last position of its segment.

    Raises `CorruptionError`, and `NewerFormatError` for a frame that a later version of topicstore wrote.
    """
    return Frame(value, end, seed) if value[:1] >= b"\2" else Block(value, end, seed)


class Frame(Block):
    """A stored frame of version 2. Opening one checks its checksum and decodes only its header."""

    __slots__ = ("_clients", "_counts", "_packed", "_raw_sizes", "_run", "_sections_at", "_texts")

    # Not the base's constructor: a frame has another header than a block.
    def __init__(self, value: bytes, end: int, seed: int) -> None:
        if len(value) < _BODY or value[0] != _VERSION:
            if value and value[0] > _VERSION:
                raise NewerFormatError(f"a frame of version {value[0]}; this topicstore reads up to {_VERSION}")
            raise CorruptionError("not a frame")
        fields: tuple[int, ...] = _HEADER.unpack_from(value)
        _, topics_codec, columns_codec, flags, self.rows, self.stream, *sizes, payloads, self.base, self.first = fields
        stored_topics, raw_topics, stored_columns, raw_columns = sizes
        view = memoryview(value)
        if _digest(view[: _HEADER.size], view[_BODY:], seed) != _CHECKSUM.unpack_from(value, _HEADER.size)[0]:
            raise CorruptionError("the checksum is wrong")
        if flags != _FRAME:
            raise NewerFormatError(f"a frame with flags {flags:#x}, which this topicstore doesn't know")
        begin = _BODY + stored_topics
        self._sections_at = begin + stored_columns
        if not self.rows or self._sections_at > len(value):
            raise CorruptionError("a frame's header doesn't fit its size")
        self.frame = True
        self.last = end
        self._value = value
        self._parts = view[_BODY:begin], view[begin : self._sections_at]
        self._sizes = topics_codec, raw_topics, columns_codec, raw_columns
        self._raw_sizes = raw_topics + raw_columns, payloads
        self._packed: _Columns | None = None
        self._texts: tuple[bytes, int] | None = None
        self._counts: tuple[Array, Array] | None = None
        self._run: tuple[int, int, str] | None = None
        """The rows and the text of the topic that was looked up last."""
        self._positions = None
        self._topics = None
        self._payloads = None

    @property
    def raw_bytes(self) -> int:
        """The number of bytes of all columns, uncompressed."""
        return sum(self._raw_sizes)

    @property
    def payload_bytes(self) -> int:
        """The number of bytes of the payloads."""
        return self._raw_sizes[1]

    def _columns(self) -> _Columns:  # type: ignore[override]  # it has what the inherited methods read
        if self._packed is None:
            _, _, codec, size = self._sizes
            try:
                self._packed = _COLUMNS.decode(decompress(codec, self._parts[1], size))
            except (msgspec.DecodeError, UnicodeDecodeError) as bad:
                raise CorruptionError(f"the columns of a frame can't be decoded: {bad}") from bad
        return self._packed

    # --- topics ---

    def _topic_texts(self) -> tuple[bytes, int]:
        """Return bytes with the texts of the topics from an offset on, each between two zero bytes."""
        if self._texts is None:
            codec, size, _, _ = self._sizes
            raw = bytes(decompress(codec, self._parts[0], size))  # copies only uncompressed data
            if len(raw) < _TOPICS.size:
                raise CorruptionError("the topics of a frame are cut short")
            count, width = _TOPICS.unpack_from(raw)
            begin = _TOPICS.size + count * width
            if not 0 < count <= self.rows or width not in (1, 2, 4) or begin >= len(raw):
                raise CorruptionError(f"a frame of {self.rows} rows can't have {count} topics")
            self._texts = raw, begin
        return self._texts

    def _topic_rows(self) -> tuple[Array, Array]:
        """Return the number of rows of each topic, and the row after its last."""
        if self._counts is None:
            raw, begin = self._topic_texts()
            counts = unpack_array(raw[_TOPICS.size : begin], _TOPICS.unpack_from(raw)[0])
            ends = counts.cumsum(dtype=np.int64)
            if int(ends[-1]) != self.rows:
                raise CorruptionError("the topics of a frame don't fit its rows")
            self._counts = counts, ends
        return self._counts

    def topics(self) -> Coded | Constant[str]:
        """Return the topics, as texts."""
        if self._topics is None:
            (raw, begin), (counts, _) = self._topic_texts(), self._topic_rows()
            try:
                texts = raw[begin:].decode().split("\0")[1:-1]
            except UnicodeDecodeError as bad:
                raise CorruptionError(f"the topics of a frame can't be decoded: {bad}") from bad
            if len(texts) != len(counts):
                raise CorruptionError(f"a frame has {len(texts)} topics instead of {len(counts)}")
            self._topics = (
                Constant(texts[0], self.rows)
                if len(texts) == 1
                else Coded(np.repeat(np.arange(len(texts)), counts), Texts.of(texts))
            )
        return self._topics  # type: ignore[return-value]  # texts, unlike those of a block

    def rows_of(self, topic: str) -> slice | None:
        """Return the rows of a topic; None if it has none. They lie together, in order of position."""
        raw, begin = self._topic_texts()
        at = raw.find(b"\0%b\0" % topic.encode(), begin)
        if at < 0:
            return None
        number, (_, ends) = raw.count(b"\0", begin, at), self._topic_rows()
        if number >= len(ends):
            raise CorruptionError(f"a frame has more than {len(ends)} topics")
        start, stop = ends.item(number - 1) if number else 0, ends.item(number)
        if start == stop:
            raise CorruptionError(f"a frame has a topic of no rows: {topic}")
        self._run = start, stop, topic
        return slice(start, stop)

    def topics_with(self, prefix: str) -> tuple[int, list[str]]:
        """Return the topics of a frame of one stream that begin with a prefix, and the number of the first of them."""
        raw, begin = self._topic_texts()
        sought = b"\0" + prefix.encode()
        at, last = raw.find(sought, begin, -1), raw.rfind(sought, begin, -1)
        if at < 0:
            return 0, []
        number, end = raw.count(b"\0", begin, at), raw.find(b"\0", last + 1)
        try:
            texts = raw[at + 1 : end].decode().split("\0")
        except UnicodeDecodeError as bad:
            raise CorruptionError(f"the topics of a frame can't be decoded: {bad}") from bad
        if end < 0 or number + len(texts) > len(self._topic_rows()[1]):
            raise CorruptionError("a frame has another number of topics than it says")
        return number, texts

    def rows_of_topics(self, first: int, wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows with wanted topics, where ``wanted`` begins at topic number ``first``."""
        counts, _ = self._topic_rows()
        chosen = np.zeros(len(counts), np.bool_)
        chosen[first : first + len(wanted)] = wanted
        return np.repeat(chosen, counts)

    def _found(self, rows: slice) -> tuple[int, int, str] | None:
        """Return the rows and the text of the topic that was looked up last, if it has all these rows."""
        run = self._run
        return run if run is not None and run[0] <= rows.start and rows.stop <= run[1] else None

    def _cut_topics(self, rows: slice) -> Column:
        run = self._found(rows)
        return self.topics()[rows] if run is None else Constant(run[2], rows.stop - rows.start)

    # --- positions ---

    def positions(self) -> Positions:
        """Return the positions, which increase among the rows of a topic."""
        if self._positions is None:
            packed = self._columns().positions
            if packed is None:
                self._positions = consecutive_positions(self.first, self.rows)
            else:
                counts, ends = self._topic_rows()
                steps, starts = self._differences(packed, 0, self.rows), ends - counts
                sums = steps.cumsum()
                sums += np.repeat(steps[starts] - sums[starts] + np.uint64(self.first), counts)  # wraps at 2 ** 64
                self._positions = sums
        return self._positions

    def positions_of(self, rows: slice) -> Positions:
        """Return the positions of some rows; if `rows_of` found these rows last, decode no other positions."""
        run, packed = self._found(rows), self._columns().positions
        if run is None or packed is None:
            return self.positions()[rows]
        sums = self._differences(packed, run[0], rows.stop).cumsum()
        return sums[rows.start - run[0] :] + np.uint64(self.first)

    def _differences(self, packed: bytes, start: int, stop: int) -> Positions:
        width = len(packed) // self.rows
        if not 0 < width <= 8 or len(packed) != width * self.rows:
            raise CorruptionError(f"positions of {len(packed)} bytes in a frame of {self.rows} rows")
        planes = np.frombuffer(packed, np.uint8).reshape(width, self.rows)
        steps = np.zeros((stop - start, 8), np.uint8)
        steps[:, :width] = planes[:, start:stop].T
        return steps.view("<u8")[:, 0]

    # --- client ids and payloads ---

    def client_ids(self) -> Coded | Constant[str]:
        """Return the client ids, as texts."""
        joined, places = self._columns().clients
        texts = joined.split("\0")
        self._check_place(places if isinstance(places, int) else int(unpack_array(places, self.rows).max()), texts)
        if isinstance(places, int):
            return Constant(texts[places], self.rows)
        return Coded(unpack_array(places, self.rows), Texts.of(texts))

    def _cut_client_ids(self, rows: slice) -> Column:
        joined, places = self._columns().clients
        texts = joined.split("\0")
        if isinstance(places, int):
            self._check_place(places, texts)
            return Constant(texts[places], rows.stop - rows.start)
        wanted = unpack_array(places, self.rows)[rows].tolist()
        self._check_place(max(wanted), texts)
        return [texts[place] for place in wanted]

    @staticmethod
    def _check_place(place: int, texts: list[str]) -> None:
        if place >= len(texts):
            raise CorruptionError(f"a name that is not among the {len(texts)} of its frame")

    def _open_payloads(self) -> SectionedPayloads:
        view, at, left, sections = memoryview(self._value), self._sections_at, self.rows, []
        for rows, codec, stored, raw in self._columns().sections:
            sections.append(Section(rows, codec, view[at : at + stored], raw))
            at, left = at + stored, left - rows
        sizes, whole = self.sizes(), sum(section.size for section in sections)
        # The sum of lengths of at most four bytes fits into 64 bits.
        fitting = sizes.value * self.rows == whole if isinstance(sizes, Constant) else sizes.itemsize <= 4
        if at != len(self._value) or left or not fitting:
            raise CorruptionError("the sections of a frame don't fit its rows and its size")
        return SectionedPayloads(sections, sizes)
