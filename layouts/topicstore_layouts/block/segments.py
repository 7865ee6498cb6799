"""Merged segments: all messages from one position to another, sorted by stream and topic, in frames.

A segment holds up to 131,072 messages. Its rows are cut into frames of about a thousand rows, each
compressed separately, and an index records the streams, topics and positions that each frame spans. So a
narrow filter opens few frames, and a reader that starts late opens few segments. A frame holds one stream,
except that small streams share frames.

Stored form, version 1 (integers in keys unsigned)::

    data   (generation, end, number) -> frame, see `frames`; numbers count from 0
    index  (generation, end, 0)      -> version:u8 = 1, checksum:u64, size:u32, zstd of a msgpack array
    meta   generation(u32) 0x30      -> msgpack: messages in all segments of the generation; with checksum

``end`` is the segment's last position. The array is [base, bytes, rows, lowest, highest, streams,
topics, small, directory, places]: the first position that could be in the segment; the
approximate bytes of all payloads and names when it was made; for each frame its rows (u32), its lowest and highest
position (u64), its first and last stream (u32 each), as bytes of little-endian integers; the first
and last topic of each frame; the number of the first frame that small streams share; all topics in the order
of their rows, and the first and last frame of each (u32). Shared frames come last, and only they hold more
than one stream. The list of topics is empty if a topic has fewer than eight rows on average, or if all
topics together are long. The checksum is xxh3 of 64 bits of the bytes after it, seeded like that of
the frame with the number 2 ** 32 - 1. A frame whose messages were all deleted has no value, and no rows
in the index.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Indices
from topicstore.contract.engine import DATA, INDEX, META, Engine, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError, NewerFormatError

from .compression import ZSTD, decompress
from .format import Block, frame_seed
from .frames import open_frame
from .packing import Array

if TYPE_CHECKING:
    from .sorted_rows import SortedRows
from .stream_ranges import StreamRanges

__all__ = ["FrameSpan", "Segment", "Segments", "make_segment"]

_VERSION = 1
_HEADER = struct.Struct(">BQ")
_SIZE = struct.Struct(">I")
_INDEX_NUMBER = 2**32 - 1
_MOST_BYTES = 256 << 20
"""The most bytes of an uncompressed index. A larger size means damage."""
_ROWS_A_TOPIC = 8
"""The least rows per topic, on average, for the topics to be listed: with fewer the list would be too large."""
_DIRECTORY_CHARACTERS = 1 << 20
"""The most characters of all topics together for the topics to be listed."""
_KEPT_BYTES = 48 << 20
"""The approximate bytes of memory that cached indexes may take. A single one may take more."""
_FRAME_MEMORY, _TOPIC_MEMORY = 400, 60
"""The approximate bytes of memory that a frame and a topic take in a decoded index, besides the topics' characters."""
_TOTAL = b"\x30"


class _Body(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    base: int
    raw_bytes: int
    rows: bytes
    lowest: bytes
    highest: bytes
    streams: bytes
    topics: list[str]
    small: int
    directory: msgspec.Raw
    places: bytes


_BODIES = msgspec.msgpack.Decoder(_Body)
_DIRECTORIES = msgspec.msgpack.Decoder(list[str])


@attrs.frozen
class FrameSpan:
    """The streams, topics and positions that a frame spans."""

    rows: int
    lowest: int
    highest: int
    first: tuple[int, str]
    """The stream and topic of the first row."""
    last: tuple[int, str]


@attrs.frozen
class Segment:
    """The index of a segment."""

    base: int
    end: int
    raw_bytes: int
    """The approximate bytes of payloads and names when the segment was made."""
    rows: Array
    lowest: Array
    highest: Array
    first: list[tuple[int, str]]
    last: list[tuple[int, str]]
    small: int
    """The number of the first frame that small streams share. All later frames are shared, too."""
    listed: bytes
    """The directory, as a msgpack array."""
    places: Array
    """The first and the last frame of each topic of the directory, one row per topic."""

    @cached_property
    def directory(self) -> list[str]:
        """The topics of the segment in the order of their rows; empty if there are too many.

        Decoded at the first use, because few readers need it. Raises `CorruptionError`.
        """
        try:
            topics = _DIRECTORIES.decode(self.listed)
        except msgspec.DecodeError as bad:
            raise CorruptionError(f"its list of topics can't be decoded: {bad}") from bad
        if len(topics) != len(self.places):
            raise CorruptionError("its index doesn't say of each topic where it is")
        return topics

    @property
    def own_streams(self) -> set[int]:
        """The streams that have frames of their own."""
        return {stream for stream, _ in self.first[: self.small]}

    @property
    def messages(self) -> int:
        """The number of messages in the segment."""
        return int(self.rows.sum())

    def select(self, wanted: StreamRanges, first: int, bound: int) -> list[int]:
        """Return the numbers of the frames that may hold matching topics with positions from ``first`` to ``bound``.

        The numbers ascend. A stream's rows are all in frames of its own, or all in shared frames.
        """
        rows, lowest, highest = self.rows.item, self.lowest.item, self.highest.item
        numbers: Sequence[int] = range(len(self.rows))
        if not wanted.everything:
            spanned: set[int] = set()
            for stream, low, high in wanted.ranges:
                behind: tuple[int] | tuple[int, str] = (stream + 1,) if high is None else (stream, high)
                begin, end = bisect_left(self.first, (stream,), 0, self.small), self.small
                # The stream has no frames of its own, so its rows are in shared ones.
                if begin == end or self.first[begin][0] != stream:
                    begin, end = self.small, len(self.rows)
                start = bisect_left(self.last, (stream, low), begin, end)
                spanned.update(range(start, bisect_right(self.first, behind, start, end)))
            numbers = sorted(spanned)
        return [n for n in numbers if rows(n) and highest(n) >= first and lowest(n) <= bound]

    def holding(self, topics: Indices) -> npt.NDArray[np.bool_]:
        """Return for each frame whether it holds any of these topics of the directory."""
        edges = np.zeros(len(self.rows) + 1, dtype=np.int64)
        np.add.at(edges, self.places[topics, 0], 1)
        np.add.at(edges, self.places[topics, 1] + 1, -1)
        held: npt.NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
        return held

    def topics_in(self, numbers: Sequence[int]) -> Indices:
        """Return the indexes in the directory of the topics that are in these frames."""
        held = np.zeros(len(self.rows) + 1, dtype=np.int64)
        held[np.array(numbers, np.intp) + 1] = 1
        before = np.cumsum(held)  # for each frame, how many of the given frames precede it
        return np.flatnonzero(before[self.places[:, 1].astype(np.int64) + 1] > before[self.places[:, 0]])

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the index takes, with a decoded directory."""
        return _FRAME_MEMORY * len(self.rows) + _TOPIC_MEMORY * len(self.places) + 2 * len(self.listed)

    def without(self, rows: dict[int, int]) -> Segment:
        """Return a copy of the index with new row counts for some frames, by frame number."""
        left = self.rows.copy()
        for number, count in rows.items():
            left[number] = count
        return attrs.evolve(self, rows=left)


def make_segment(base: int, end: int, rows: SortedRows, spans: Sequence[FrameSpan], small: int) -> Segment:
    """Return the index of sorted rows in frames with these spans; frames from ``small`` on are of small streams."""
    directory, places = _directory(rows, [span.rows for span in spans])
    return Segment(
        base,
        end,
        rows.raw_bytes,
        np.array([span.rows for span in spans], dtype="<u4"),
        np.array([span.lowest for span in spans], dtype="<u8"),
        np.array([span.highest for span in spans], dtype="<u8"),
        [span.first for span in spans],
        [span.last for span in spans],
        small,
        msgspec.msgpack.encode(directory),
        places,
    )


def _directory(rows: SortedRows, sizes: list[int]) -> tuple[list[str], Array]:
    """Return the topics of sorted rows, and the first and the last frame of each."""
    codes, topics = rows.topics, rows.topic_texts
    if len(topics) * _ROWS_A_TOPIC > len(codes) or sum(map(len, topics)) > _DIRECTORY_CHARACTERS:
        return [], np.empty((0, 2), dtype="<u4")
    numbers = np.arange(len(topics))
    ends = np.searchsorted(codes, numbers), np.searchsorted(codes, numbers, side="right") - 1
    frames = np.searchsorted(np.cumsum(sizes), np.stack(ends, axis=1), side="right")
    return topics, frames.astype("<u4")


class Segments:
    """The segments of a slab. Its methods read from the caller's reader, so that all of them can share one snapshot."""

    def __init__(self, engine: Engine, shard: int, generation: int) -> None:
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._slab = shard << 32 | generation
        self._kept: dict[int, tuple[bytes, Segment]] = {}
        """Decoded indexes by their segments' ends, each with the value that it was decoded from, the newest last."""
        self.reach = self.end(engine)
        """An upper bound of the last positions of all segments, including one that is being merged."""

    # --- keys ---

    def put(self, segment: Segment, frames: Sequence[bytes | None], write: WriteBatch) -> int:
        """Add a segment's index and frames to a write batch (None keeps a frame's stored value); return the bytes."""
        size = 0
        for number, value in enumerate(frames):
            if value is not None:
                write.put(DATA, self.frame_key(segment.end, number), value)
                size += len(value)
        index = self._encode(segment)
        write.put(INDEX, self.index_key(segment.end), index)
        return size + len(index)

    def replace_index(self, before: Segment, after: Segment, write: WriteBatch) -> int:
        """Replace a segment's index, or remove a segment without messages; return the bytes freed."""
        key = self.index_key(before.end)
        freed = len(self._engine.get(INDEX, key) or b"")
        if not after.messages:
            write.delete(INDEX, key)
            return freed
        index = self._encode(after)
        write.put(INDEX, key, index)
        return freed - len(index)

    def remove(self, segment: Segment, write: WriteBatch) -> None:
        """Add the removal of a segment to a write batch."""
        write.delete_range(DATA, (self._generation, segment.end, 0), (self._generation, segment.end + 1, 0))
        write.delete(INDEX, self.index_key(segment.end))

    def frame_key(self, end: int, number: int) -> tuple[int, int, int]:
        """Return the key of a frame."""
        return self._generation, end, number

    def frame_seed(self, end: int, number: int) -> int:
        """Return the seed of a frame's checksum."""
        return frame_seed(end, number, self._slab)

    def index_key(self, end: int) -> tuple[int, int, int]:
        """Return the key of a segment's index."""
        return self._generation, end, 0

    def behind(self) -> tuple[int, int, int]:
        """Return the key that follows the last possible index."""
        return self._generation + 1, 0, 0

    def end(self, reader: Reader, before: int | None = None) -> int:
        """Return the end of the last segment, or of the last one that ends below ``before``; -1 if there is none."""
        upper = self.behind() if before is None else self.index_key(before)
        for chunk in reader.scan(INDEX, self.index_key(0), upper, reverse=True, limit=1):
            return int(chunk[0][0][1])
        return -1

    def total(self) -> int:
        """Return the number of messages in all segments; if the stored number is damaged, they are counted."""
        try:
            return self.stored_total(self._engine)
        except CorruptionError:
            return self._count()

    def stored_total(self, reader: Reader) -> int:
        """Return the stored number of messages. Raises `CorruptionError`."""
        key = encode_generation(self._generation) + _TOTAL
        stored = reader.get(META, key)
        try:
            return 0 if stored is None else msgspec.msgpack.decode(strip_checksum(key, stored), type=int)
        except (CorruptionError, msgspec.DecodeError) as bad:
            raise CorruptionError(f"the number of their messages is damaged: {bad}") from bad

    def _count(self) -> int:
        messages = 0
        for chunk in self._engine.scan(INDEX, self.index_key(0), self.behind()):
            for key, value in chunk:
                with suppress(CorruptionError, NewerFormatError):  # readers of the segment raise this error
                    messages += self.open(key[1], value).messages
        return messages

    def put_total(self, messages: int, write: WriteBatch) -> None:
        """Add the number of messages in all segments to a write batch."""
        key = encode_generation(self._generation) + _TOTAL
        write.put(META, key, add_checksum(key, msgspec.msgpack.encode(messages)))

    # --- indexes ---

    def newest(self) -> Segment | None:
        """Return the index of the last segment, or None if there is none."""
        for chunk in self._engine.scan(INDEX, self.index_key(0), self.behind(), reverse=True, limit=1):
            return self.open(chunk[0][0][1], chunk[0][1])
        return None

    def between(self, reader: Reader, first: int, bound: int) -> Iterator[Segment]:
        """Yield the segments that may hold positions from ``first`` to ``bound``, in order."""
        for chunk in reader.scan(INDEX, self.index_key(first), self.behind()):
            for key, value in chunk:
                segment = self.open(key[1], value)
                if segment.base > bound:
                    return
                yield segment

    def stored_bytes(self, segment: Segment) -> int:
        """Return the bytes of a segment's values."""
        scan = self._engine.scan(DATA, self.frame_key(segment.end, 0), self.frame_key(segment.end + 1, 0))
        index = self._engine.get(INDEX, self.index_key(segment.end)) or b""
        return len(index) + sum(len(value) for chunk in scan for _, value in chunk)

    def open(self, end: int, value: bytes) -> Segment:
        """Decode the index of a segment. Raises `CorruptionError` or `NewerFormatError` that names the segment."""
        kept = self._kept.get(end)
        if kept is not None and kept[0] == value:
            return kept[1]
        try:
            segment = self._decode(end, value)
        except (CorruptionError, NewerFormatError) as bad:
            raise type(bad)(bad.reason, self.place(end)) from bad
        self._keep(end, value, segment)
        return segment

    def _keep(self, end: int, value: bytes, segment: Segment) -> None:
        """Cache a decoded index, and evict the oldest ones if they take too much memory."""
        held, room = [(end, (value, segment))], _KEPT_BYTES - len(value) - segment.memory
        for other, (stored, kept) in reversed(self._kept.items()):
            room -= len(stored) + kept.memory
            if room < 0:
                break
            if other != end:
                held.append((other, (stored, kept)))
        self._kept = dict(reversed(held))

    def directory(self, segment: Segment) -> list[str]:
        """Return the directory of a segment. Raises `CorruptionError` that names the segment."""
        try:
            return segment.directory
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, self.place(segment.end)) from bad

    def place(self, end: int, number: int | None = None) -> str:
        """Return a description of the place of a segment, or of one of its frames, for error messages."""
        frame = "" if number is None else f", frame {number}"
        return f"shard {self._shard}, generation {self._generation}, segment that ends at position {end}{frame}"

    def _seed(self, end: int) -> int:
        return frame_seed(end, _INDEX_NUMBER, self._slab)

    def _encode(self, segment: Segment) -> bytes:
        pairs = list(zip(segment.first, segment.last, strict=True))
        body = _Body(
            segment.base,
            segment.raw_bytes,
            segment.rows.tobytes(),
            segment.lowest.tobytes(),
            segment.highest.tobytes(),
            np.array([(first[0], last[0]) for first, last in pairs], dtype="<u4").tobytes(),
            [topic for first, last in pairs for topic in (first[1], last[1])],
            segment.small,
            msgspec.Raw(segment.listed),
            segment.places.tobytes(),
        )
        raw = msgspec.msgpack.encode(body)
        rest = _SIZE.pack(len(raw)) + zstandard.ZstdCompressor(level=1).compress(raw)
        return _HEADER.pack(_VERSION, xxhash.xxh3_64_intdigest(rest, seed=self._seed(segment.end))) + rest

    def _decode(self, end: int, value: bytes) -> Segment:
        if len(value) < _HEADER.size + _SIZE.size or value[0] != _VERSION:
            if value and value[0] > _VERSION:
                raise NewerFormatError(f"a segment of version {value[0]}; this topicstore reads up to {_VERSION}")
            raise CorruptionError("not the index of a segment")
        rest = value[_HEADER.size :]
        size = _SIZE.unpack_from(rest)[0]
        digest = xxhash.xxh3_64_intdigest(rest, seed=self._seed(end))
        if _HEADER.unpack_from(value)[1] != digest or size > _MOST_BYTES:
            raise CorruptionError("the checksum of its index is wrong")
        try:
            body = _BODIES.decode(decompress(ZSTD, memoryview(rest)[_SIZE.size :], size))
            streams = np.frombuffer(body.streams, dtype="<u4").tolist()
            ends = list(zip(streams, body.topics, strict=True))
            rows = np.frombuffer(body.rows, dtype="<u4")
            lowest, highest = (np.frombuffer(data, dtype="<u8") for data in (body.lowest, body.highest))
        except (msgspec.DecodeError, ValueError) as bad:
            raise CorruptionError(f"its index can't be decoded: {bad}") from bad
        if not 2 * len(rows) == 2 * len(lowest) == 2 * len(highest) == len(ends):
            raise CorruptionError("its index says more of some frames than of others")
        if not 0 <= body.small <= len(rows):
            raise CorruptionError("its index says that more frames are of small streams than there are")
        places = self._places(body, len(rows))
        frames = rows, lowest, highest, ends[::2], ends[1::2], body.small
        return Segment(body.base, end, body.raw_bytes, *frames, bytes(body.directory), places)

    @staticmethod
    def _places(body: _Body, frames: int) -> Array:
        """Return the first and the last frame of each topic of the directory."""
        if len(body.places) % 8:
            raise CorruptionError("its index doesn't say of each topic where it is")
        places = np.frombuffer(body.places, dtype="<u4").reshape(-1, 2)
        if len(places) and int(places.max()) >= frames:
            raise CorruptionError("its index says that a topic is in a frame that is not there")
        return places

    # --- frames ---

    def frames(self, reader: Reader, segment: Segment, numbers: Sequence[int]) -> list[Block]:
        """Return frames by number. Raises `CorruptionError` or `NewerFormatError` that names an unreadable frame."""
        found: Sequence[bytes | None]
        if 2 * len(numbers) > len(segment.rows):  # to read most frames, a scan is cheaper than single look-ups
            chosen = set(numbers)
            scan = reader.scan(DATA, self.frame_key(segment.end, 0), self.frame_key(segment.end + 1, 0))
            values = {key[2]: value for chunk in scan for key, value in chunk if key[2] in chosen}
            found = [values.get(number) for number in numbers]
        else:
            found = reader.get_many(DATA, [self.frame_key(segment.end, number) for number in numbers])
        return [self.frame(segment, number, value) for number, value in zip(numbers, found, strict=True)]

    def frame(self, segment: Segment, number: int, value: bytes | None) -> Block:
        """Return a frame decoded from its value."""
        try:
            if value is None:
                raise CorruptionError("it is missing")
            block = open_frame(value, segment.end, self.frame_seed(segment.end, number))
            if not block.frame or block.base != segment.base or block.rows != segment.rows[number]:
                raise CorruptionError("it is not the frame that its segment's index describes")
            return block
        except (CorruptionError, NewerFormatError) as bad:
            raise type(bad)(bad.reason, self.place(segment.end, number)) from bad
