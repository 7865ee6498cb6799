"""Reading a slab in order of position, piece by piece: from the segments, then from the blocks of batches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Literal

import attrs
import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.batch import ALL_FIELDS, unread
from topicstore.contract.columns import Coded, Column, Constant, concat, to_integers
from topicstore.contract.engine import Engine, Reader
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import ReadCounters, ReadLimits
from topicstore.contract.positions import Positions

from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable

from .batch_blocks import BatchBlocks
from .format import MIXED, Block
from .gathered_rows import Rows, concat_names, count, gather, picked
from .matching import Mask, Matchers
from .packing import Array
from .payloads import join_payloads
from .segments import Segment, Segments
from .stream_ranges import StreamRanges, StreamRangesCache
from .topic_index import Lookup, Passing, Sought, TopicIndex

__all__ = ["ALL", "Piece", "Reading"]

ALL = 0
"""The number of the stream that holds every message of the slab, in order of position."""
_FEW_FRAMES = 8
"""Up to this many frames are opened without first looking up which topics they hold."""
_TOGETHER = 32_768
"""The most rows of the frames that are read together from several segments."""
_TOGETHER_BYTES = 8 << 20
"""The stored bytes of frames after which no frames of another segment are read together with them."""
_KEPT = 64
"""The number of segments whose sorted rows are cached, for readers that have read them in part."""
_KEPT_BYTES = 96 << 20
"""The approximate bytes of memory that the cached rows may take. The rows of a single reader may take more."""
_ROW_BYTES = 120
"""The approximate bytes of memory that a row takes besides its payload."""


class Piece(ABC):
    """A part of a read's result: the matching messages up to a position."""

    most: int
    """The most rows that the piece can have; 0 if a read may end the piece where the remaining limits of a call end."""
    bytes: int
    """The approximate bytes of the payloads, known after `read`."""
    last: int
    """The last position that the piece covers."""
    picked = False
    """Whether the piece has only some of its blocks' rows, known after `read`."""

    @abstractmethod
    def read(self, limits: ReadLimits) -> tuple[MessageBatch, int]:
        """Return rows in order, and the position at which to continue: after the piece, unless a limit was reached."""


_MOST_TOGETHER = 64
"""The most segments that are read together, also if no frame of them may match."""
_Part = tuple[Segment, list[int]]
"""A segment, and the numbers of its frames that may hold matching rows."""
_Found = tuple[Block, Rows]
"""A block and its matching rows."""
_Key = tuple[int, int, str, frozenset[str]]
"""The end of a segment, and the stream, the filter and the columns of a read."""


@attrs.frozen
class _Ask:
    """A read request: a stream, a filter, the first and last position, and the columns that the reader uses."""

    stream: int
    topic_filter: TopicFilter
    at: int
    bound: int
    columns: frozenset[str]


@attrs.frozen
class _Kept:
    """The matching rows of one or more segments, cached for the next read."""

    deletes: int
    """The value of `Reading.deletes` before the rows were read."""
    end: int
    """The last position of the last segment that was examined."""
    first: int
    """The first of the positions that were examined."""
    last: int
    """The last of the positions that were examined."""
    batch: MessageBatch
    sizes: Array
    """The bytes of the payloads of all rows up to and including each row."""

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the rows take."""
        return self.bytes(0, len(self.batch)) + _ROW_BYTES * len(self.batch)

    def bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the payloads of the rows from ``start`` to before ``stop``."""
        return int(self.sizes[stop - 1]) - self._before(start) if start < stop else 0

    def rows_within(self, start: int, size: int) -> int:
        """Return the number of rows, from row ``start`` on, whose payloads reach ``size`` bytes; at least one."""
        return int(np.searchsorted(self.sizes[start:], self._before(start) + size)) + 1

    def _before(self, row: int) -> int:
        return int(self.sizes[row - 1]) if row else 0

    def rows(self, at: int, bound: int) -> tuple[int, int]:
        """Return the first row at or after a position, and the row after the last one up to another position."""
        if not len(self.batch):
            return 0, 0
        positions = self.batch.positions
        start, stop = np.searchsorted(positions, np.array([at, bound + 1], dtype=np.uint64))
        return int(start), int(stop)


class Reading:
    """The reader of one slab. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        shard: int,
        place: str,
        blocks: BatchBlocks,
        segments: Segments,
        trie: LearnedTopics,
        names: tuple[NameTable, NameTable],
        counters: ReadCounters,
    ) -> None:
        self.engine = engine
        self.shard = shard
        self.place = place
        """A description of the slab, for errors."""
        self.blocks = blocks
        self.segments = segments
        self.trie = trie
        self.topics, self.clients = names
        self.counters = counters
        self._wanted = StreamRangesCache(trie)
        self.deletes = 0
        """A counter that changes whenever messages were deleted, which invalidates cached rows."""
        self._deleting: dict[object, None] = {}
        """The steps of deletes that may be committed at any moment. Meanwhile rows are neither cached nor reused."""
        self._kept: dict[_Key, _Kept] = {}
        self._matchers = Matchers(self.topics)
        self.index = TopicIndex(blocks, lambda: segments.reach)

    def pieces(
        self, stream: int, topic_filter: TopicFilter, at: int, limits: ReadLimits, joined: int
    ) -> Generator[Piece, None, None]:
        """Yield the pieces that together hold all matching messages up to the bound, in order of position.

        If everything matches, blocks of batches are joined until a piece has ``joined`` rows or reaches another limit.
        """
        bound, columns = limits.bound, limits.columns
        if at > bound:
            return
        everything = self._wanted.of(topic_filter, None if stream == ALL else stream).everything
        lookup = None if everything else self.index.lookup(at, partial(self.sought, topic_filter))
        if at > self.segments.reach and lookup is None:
            ask = _Ask(stream, topic_filter, at, bound, columns)
            behind = self._batch_pieces(self.engine, ask, limits, joined, everything=everything)
            first = next(behind, None)  # this opens the scan
            # checked again, because a compaction may have merged blocks after `at` before the scan was opened
            if at > self.segments.reach:
                if first is not None:
                    yield first
                    yield from behind
                return
        begun = self._begun_piece(_Ask(stream, topic_filter, at, bound, columns))
        if begun is not None:
            yield begun
            at = begun.last + 1
        deletes = self.deletes  # read before the view is opened, so that the view includes all counted deletes
        with self.engine.snapshot() as view:
            self.counters.seeks += 1
            ask = _Ask(stream, topic_filter, at, bound, columns)
            for parts in self._segments_together(view, ask):
                end = parts[-1][0].end
                yield SegmentPiece(self, ask, end, partial(self._find_some, view, deletes, parts, ask))
                at = end + 1
                if at > bound:
                    return
            ask = _Ask(stream, topic_filter, at, bound, columns)
            if lookup is None:
                yield from self._batch_pieces(view, ask, limits, joined, everything=everything)
            else:
                yield from self._found_pieces(view, ask, limits, lookup)

    def _batch_pieces(
        self, reader: Reader, ask: _Ask, limits: ReadLimits, joined: int, *, everything: bool
    ) -> Iterator[Piece]:
        """Yield the pieces of all blocks of batches; those of which not everything matches are added to the index."""
        if ask.at > ask.bound:
            return
        self.counters.seeks += 1
        if not everything:
            passing = Passing(self.index, (), partial(self.sought, ask.topic_filter), ask.at)
            try:
                for blocks in self.blocks.batches(reader, ask.at, ask.bound):
                    passing.add(blocks)
                    yield BatchPiece(self, blocks, ask)
            finally:
                passing.end()
            return
        held: list[Block] = []
        rows = size = 0
        try:
            for blocks in self.blocks.batches(reader, ask.at, ask.bound):
                more = sum([block.rows for block in blocks])
                if held and rows + more > limits.rows:
                    yield BatchPiece(self, held, ask)
                    held, rows, size = [], 0, 0
                held += blocks
                rows += more
                size += sum([block.payload_bytes for block in blocks])
                late = limits.deadline is not None and time.monotonic() >= limits.deadline
                if rows >= joined or size >= limits.bytes or late:
                    yield BatchPiece(self, held, ask)
                    held, rows, size = [], 0, 0
        except (CorruptionError, NewerFormatError):
            if held:
                yield BatchPiece(self, held, ask)  # messages before the damage precede the error
            raise
        if held:
            yield BatchPiece(self, held, ask)

    def _found_pieces(self, view: Reader, ask: _Ask, limits: ReadLimits, lookup: Lookup) -> Iterator[Piece]:
        """Yield the matching rows of the batches that the index finds or lacks, and add the latter to the index.

        These batches have few matching rows, so several become one piece. ``view`` is a snapshot, because a merge may
        move messages between two reads.
        """
        if ask.at > ask.bound:
            return
        self.counters.seeks += 1
        chunks = self.index.scan(view, lookup, ask.at, ask.bound, limits.rows)
        batches = self.blocks.batches(view, ask.at, ask.bound, chunks)
        passing = Passing(self.index, lookup.pages, partial(self.sought, ask.topic_filter), ask.at)
        held: list[_Found] = []
        rows = size = stored = 0
        try:
            for blocks in batches:
                try:
                    found = self.matching(blocks, ask)
                except CorruptionError:
                    if held:
                        yield self._found_piece(held, ask)  # messages before the damage precede the error
                    yield BatchPiece(self, blocks, ask)  # raises an error that names the block
                    return
                more = sum(count(block, rows) for block, rows in found)
                if held and rows + more > limits.rows:
                    yield self._found_piece(held, ask)
                    held, rows, size, stored = [], 0, 0, 0
                passing.add(blocks)
                held += found
                rows += more
                size += sum([block.payload_bytes * count(block, rows) // block.rows for block, rows in found])
                stored += sum([block.size for block, _ in found])
                late = limits.deadline is not None and time.monotonic() >= limits.deadline
                if rows >= limits.rows or size >= limits.bytes or stored >= _TOGETHER_BYTES or late:
                    yield self._found_piece(held, ask) if held else BatchPiece(self, blocks, ask)
                    held, rows, size, stored = [], 0, 0, 0
        except (CorruptionError, NewerFormatError):
            if held:
                yield self._found_piece(held, ask)
            raise
        finally:
            passing.end()
        if held:
            yield self._found_piece(held, ask)

    def _found_piece(self, found: Sequence[_Found], ask: _Ask) -> BatchPiece:
        return BatchPiece(self, [block for block, _ in found], ask, found)

    def matching(self, blocks: Sequence[Block], ask: _Ask) -> list[_Found]:
        """Return the blocks of batches that have matching rows, with these rows. Its errors name no block."""
        found: list[_Found] = []
        for block in blocks:
            rows = self.match(block, ask.stream, ask.topic_filter, ask.at, ask.bound)
            if not isinstance(rows, bool):
                found.append((block, rows))
        return found

    def sought(self, topic_filter: TopicFilter) -> Sought | None:
        """Return a filter's topics to look up in the index; None if they are too many for the index to help."""
        return self._matchers.of(topic_filter).sought()

    def _segments_together(self, view: Reader, ask: _Ask) -> Iterator[list[_Part]]:
        """Yield segments, each with the numbers of its frames that may match, those with few such frames together."""
        held: list[_Part] = []
        rows = 0
        try:
            for segment in self.segments.between(view, ask.at, ask.bound):
                numbers = self.select(segment, ask.stream, ask.topic_filter, ask.at, ask.bound)
                more = sum(map(segment.rows.item, numbers))
                if held and (rows + more > _TOGETHER or len(held) == _MOST_TOGETHER):
                    yield held
                    held, rows = [], 0
                held.append((segment, numbers))
                rows += more
                if rows >= _TOGETHER:  # enough rows, so the next segment's index isn't read yet
                    yield held
                    held, rows = [], 0
        except (CorruptionError, NewerFormatError):
            if held:
                yield held  # messages before the damage precede the error
            raise
        if held:
            yield held

    def _begun_piece(self, ask: _Ask) -> SegmentPiece | None:
        """Return the piece of segments that a reader has read in part, or None if its rows aren't cached."""
        if self._deleting:
            return None
        asked = ask.stream, ask.topic_filter.text, ask.columns
        for (end, *read), kept in self._kept.items():
            same = asked == tuple(read) and kept.deletes == self.deletes
            if same and kept.first <= ask.at <= end and min(ask.bound, end) <= kept.last:
                return SegmentPiece(self, ask, end, lambda kept=kept: kept)  # type: ignore[misc]
        return None

    def _find_some(self, view: Reader, deletes: int, parts: Sequence[_Part], ask: _Ask) -> _Kept:
        """Read the matching rows of one or more of these segments; of one only, if a later one is damaged."""
        try:
            return self._find(view, deletes, parts, ask)
        except (CorruptionError, NewerFormatError):
            if len(parts) == 1:
                raise
            return self._find(view, deletes, parts[:1], ask)  # messages before the damage precede the error

    def _find(self, view: Reader, deletes: int, parts: Sequence[_Part], ask: _Ask) -> _Kept:
        """Read the matching rows of segments, in a view that includes the deletes counted by ``deletes``.

        Later segments are left out once the frames that were read are large.
        """
        found: list[_Found] = []
        end, size = ask.at, 0
        for segment, numbers in parts:
            if size >= _TOGETHER_BYTES:
                break
            for number, block in zip(numbers, self.segments.frames(view, segment, numbers), strict=True):
                size += block.size
                try:
                    rows = self.match(block, ask.stream, ask.topic_filter, ask.at, ask.bound)
                except CorruptionError as bad:
                    raise CorruptionError(bad.reason, self.segments.place(segment.end, number)) from bad
                if not isinstance(rows, bool):
                    found.append((block, rows))
            end = segment.end
        nothing = MessageBatch.empty(), np.empty(0, dtype=np.int64)
        batch, sizes = gather(found, self.shard, ask.columns) if found else nothing
        return _Kept(deletes, end, ask.at, min(end, ask.bound), batch, np.cumsum(sizes))

    def find_in_segment(
        self,
        view: Reader,
        deletes: int,
        segment: Segment,
        stream: int,
        topic_filter: TopicFilter,
        first: int,
        last: int,
    ) -> Positions:
        """Return the positions of the matching rows of a segment, and cache the rows for the next read."""
        ask = _Ask(stream, topic_filter, max(first, segment.base), last, ALL_FIELDS)
        numbers = self.select(segment, stream, topic_filter, ask.at, last)
        kept = self._find(view, deletes, [(segment, numbers)], ask)
        if len(kept.batch):
            self.keep((segment.end, stream, topic_filter.text, ALL_FIELDS), kept)
        return kept.batch.positions

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Ignore cached rows within this context, in which a step of a delete is committed, and invalidate them."""
        step = object()
        self._deleting[step] = None
        try:
            yield
        finally:
            # Before the step is removed: otherwise a reader could use rows that were cached before the step.
            self.deletes += 1
            del self._deleting[step]

    def keep(self, key: _Key, kept: _Kept) -> None:
        """Cache rows, and evict the least recently used ones if there are too many."""
        if self._deleting:
            return
        others = [(other, each) for other, each in self._kept.items() if other != key and each.deletes == self.deletes]
        room, held = _KEPT_BYTES - kept.memory, [(key, kept)]
        for other, each in reversed(others[-_KEPT + 1 :]):
            room -= each.memory
            if room < 0:
                break
            held.append((other, each))
        self._kept = dict(reversed(held))

    def forget(self, key: _Key) -> None:
        """Drop the cached rows of a segment that a reader has read to its end."""
        if key in self._kept:
            self._kept = {other: kept for other, kept in self._kept.items() if other != key}

    # --- frames and rows ---

    def select(self, segment: Segment, stream: int, topic_filter: TopicFilter, first: int, bound: int) -> list[int]:
        """Return the numbers of the frames that may hold matching rows."""
        wanted = self._wanted.of(topic_filter, None if stream == ALL else stream)
        numbers = segment.select(wanted, first, bound)
        if len(segment.places) and len(numbers) > _FEW_FRAMES and not wanted.everything:
            listed, directory = segment.topics_in(numbers), self.segments.directory(segment)
            matching = self._matchers.of(topic_filter).judge_texts([directory[topic] for topic in listed.tolist()])
            holding = segment.holding(listed[matching])
            numbers = [number for number in numbers if holding.item(number)]
        self.counters.skipped += len(segment.rows) - len(numbers)
        return numbers

    def match(
        self, block: Block, stream: int, topic_filter: TopicFilter, first: int, bound: int
    ) -> Rows | Literal[False]:
        """Return the matching rows of a block: None for all, False for none."""
        rows = self._match(block, stream, topic_filter, first, bound)
        if rows is False:
            self.counters.skipped += 1
            return False
        self.counters.visited += 1
        return rows

    def _match(
        self, block: Block, stream: int, topic_filter: TopicFilter, first: int, bound: int
    ) -> Rows | Literal[False]:
        if stream not in (ALL, block.stream) and block.stream != MIXED:
            return False
        if block.frame and topic_filter.literal:
            return self._rows_of_topic(block, stream, topic_filter.text, first, bound)
        wanted = self._wanted.of(topic_filter, None if stream == ALL else stream)
        mask: Mask | bool = wanted.everything or block.stream in wanted.covered
        if not mask and block.stream != MIXED:
            if block.stream not in wanted.by_stream and block.stream in self.trie:
                return False  # its topics needn't be decoded; but a stream that was lost by damage may have any
            if block.frame:
                return self._rows_of_stream(block, topic_filter, wanted, first, bound)
        mask = mask or self._matchers.of(topic_filter).rows(block.topics())
        if mask is not False and stream != ALL and block.stream == MIXED:
            mask = mask & (self._streams(block.topics(), block.rows) == stream)
        return _within(block, mask, first, bound)

    def _rows_of_stream(
        self, frame: Block, topic_filter: TopicFilter, wanted: StreamRanges, first: int, bound: int
    ) -> Rows | Literal[False]:
        """Return the matching rows of a frame of one stream: None for all, False for none. Its topics are sorted."""
        prefix, _ = wanted.by_stream.get(frame.stream, ("", None))
        number, topics = frame.topics_with(prefix)
        if not topics:
            return False
        matching = self._matchers.of(topic_filter).judge_texts(topics)
        if np.count_nonzero(matching) == 1:
            return self._rows_of_topic(frame, frame.stream, topics[matching.argmax()], first, bound)
        return _within(frame, frame.rows_of_topics(number, matching), first, bound)

    def _rows_of_topic(self, frame: Block, stream: int, topic: str, first: int, bound: int) -> slice | Literal[False]:
        """Return the rows of one topic in a frame, which lie together, in order of position."""
        rows = frame.rows_of(topic)
        if rows is None or (stream != ALL and frame.stream == MIXED and self.find_all([topic]) != [stream]):
            return False
        if frame.first < first or frame.last > bound:
            positions = frame.positions_of(rows)
            start, stop = positions.searchsorted(np.array([first, bound + 1], dtype=np.uint64)).tolist()
            rows = slice(rows.start + start, rows.start + stop)
        return rows if rows.start < rows.stop else False

    def _streams(self, topics: Column, rows: int) -> Array:
        """Return the stream of each topic of a block."""
        if isinstance(topics, Coded):
            streams: Array = np.array(self.find_all(topics.texts.values.tolist()))[topics.codes]
            return streams
        if isinstance(topics, Constant):
            known = isinstance(topics.value, int)
            return np.full(rows, self.topics.stream(topics.value) if known else self.trie.find(topics.value))
        return self.topics.streams(np.asarray(topics))

    def find_all(self, topics: Iterable[str]) -> list[int]:
        """Return the streams of stored topics. Raises `CorruptionError` if the stream of a topic was lost."""
        try:
            return self.trie.find_all(topics)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"{self.place}, learned topics") from bad

    def batch(self, found: Sequence[tuple[Block, Rows]], wanted: frozenset[str]) -> MessageBatch:
        """Return rows of one or more blocks of batches, in order of position.

        Payloads and client ids are read only if they are among the columns ``wanted``.
        """
        payloads: Column
        if len(found) == 1:
            ((block, rows),) = found
            at = block.positions()
            clients = block.client_ids() if "client_ids" in wanted else unread("client_ids", block.rows)
            columns: Sequence[Column] = (
                *(block.topics(), clients),
                *(block.qos(), block.retain(), block.timestamps(at), block.properties()),
            )
            if rows is not None:
                columns, at = [picked(column, rows) for column in columns], at[rows]
            if "payloads" not in wanted:
                payloads = unread("payloads", len(at))
            elif rows is None:
                payloads = block.payloads()
            else:
                payloads = block.payloads().pick(rows)
            return MessageBatch(
                self.texts(self.topics, columns[0]),
                payloads,
                self.texts(self.clients, columns[1]),
                *columns[2:],
                positions=at,
                shards=Constant(self.shard, len(at)),
            )
        parts: list[Sequence[Column]] = []
        for block, rows in found:
            at = block.positions()
            clients = block.client_ids() if "client_ids" in wanted else unread("client_ids", block.rows)
            names, rest = (block.topics(), clients), (block.qos(), block.retain(), block.properties())
            columns = (*names, *rest, block.timestamps(at), at)
            parts.append([picked(column, rows) for column in columns])
        topics, client_ids, qos, retain, properties, timestamps, positions = zip(*parts, strict=True)
        if "payloads" not in wanted:
            payloads = unread("payloads", sum(map(len, positions)))
        elif all(rows is None for _, rows in found):
            payloads = join_payloads([block.payloads() for block, _ in found])
        else:  # copies, so that the result keeps no block in memory
            copies = (b.payloads().tolist() if rows is None else b.payloads().pick(rows) for b, rows in found)
            payloads = list(chain.from_iterable(copies))
        batch = MessageBatch(
            topics=self.texts(self.topics, *topics),
            payloads=payloads,
            client_ids=self.texts(self.clients, *client_ids),
            qos=concat(qos),
            retain=concat(retain),
            timestamps=np.concatenate(list(map(to_integers, timestamps))),
            properties=concat(properties),
            positions=np.concatenate(positions),
            shards=Constant(self.shard, sum(map(len, positions))),
        )
        ordered = (batch.positions[1:] > batch.positions[:-1]).all()
        return batch if ordered else batch.take(np.argsort(batch.positions))  # blocks of one batch may interleave

    @staticmethod
    def texts(table: NameTable, *names: Column) -> Constant[str] | Coded:
        """Return the names of one or more blocks as texts, whether the blocks have texts or numbers."""
        if len(names) == 1:
            (column,) = names
            if isinstance(column, Constant):
                value = column.value
                return column if isinstance(value, str) else Constant(table.name(value), len(column))
            return column if isinstance(column, Coded) else table.names(np.asarray(column))
        first = names[0]
        if isinstance(first, Constant) and all(isinstance(c, Constant) and c.value == first.value for c in names):
            return Constant(
                first.value if isinstance(first.value, str) else table.name(first.value), sum(map(len, names))
            )
        if any(isinstance(c, Coded) or (isinstance(c, Constant) and isinstance(c.value, str)) for c in names):
            return concat_names([Reading.texts(table, column) for column in names])
        return table.names(np.concatenate(list(map(to_integers, names))))


def _within(block: Block, mask: Mask | bool, first: int, bound: int) -> Rows | Literal[False]:
    """Return the rows of a mask with positions from ``first`` to ``bound``: None for all rows, False for none."""
    if mask is not False and (block.first < first or block.last > bound):
        positions = block.positions()
        mask = mask & (positions >= np.uint64(first)) & (positions <= np.uint64(bound))
    if mask is True:
        return None
    rows = np.flatnonzero(mask)
    if mask is False or not len(rows):
        return False
    if len(rows) == block.rows:
        return None
    start, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(start, stop) if block.frame and stop - start == len(rows) else rows


class BatchPiece(Piece):
    """The blocks of one or more batches."""

    def __init__(
        self, reading: Reading, blocks: Sequence[Block], ask: _Ask, found: Sequence[_Found] | None = None
    ) -> None:
        """Make a piece of blocks, of which those with matching rows are ``found``; None if that is unknown."""
        counts = [block.rows for block in blocks] if found is None else [count(block, rows) for block, rows in found]
        self.most = sum(counts)
        self.bytes = 0
        self.last = blocks[-1].last
        self._reading = reading
        self._blocks = blocks
        self._ask = ask
        self._found = found

    def read(self, limits: ReadLimits) -> tuple[MessageBatch, int]:
        """Decode the matching rows of all blocks, and return them in order of position."""
        reading, ask = self._reading, self._ask
        blocks, found, self._found = self._blocks, self._found, None
        try:
            if found is None:
                found = reading.matching(blocks, ask)
            self.picked = any(rows is not None for _, rows in found)
            batch = reading.batch(found, ask.columns) if found else MessageBatch.empty()
        except CorruptionError as bad:
            if len(blocks) == 1:
                raise CorruptionError(bad.reason, reading.blocks.place(blocks[0].last)) from bad
            first = [block for block in blocks if block.base == blocks[0].base]
            if len(first) == len(blocks):
                for block in blocks:
                    BatchPiece(reading, [block], ask).read(limits)  # raises an error that names the block
                raise
            self._blocks = first  # messages before the damage precede the error
            return self.read(limits)
        whole = not self.picked and "payloads" in ask.columns
        self.bytes = sum([block.payload_bytes for block, _ in found]) if whole else batch.payload_bytes()
        behind = min(blocks[-1].last, ask.bound) + 1
        if len(batch) > limits.rows:
            reading.blocks.cache.keep(blocks)
            batch = batch[: limits.rows]
            behind = int(batch.positions[-1]) + 1
        return batch, behind


class SegmentPiece(Piece):
    """Segments up to position ``last``; ``find`` returns the matching rows of one or more of them, in order."""

    most = 0

    def __init__(self, reading: Reading, ask: _Ask, last: int, find: Callable[[], _Kept]) -> None:
        self.last = last
        self.bytes = 0
        self._reading = reading
        self._ask = ask
        self._find = find

    def read(self, limits: ReadLimits) -> tuple[MessageBatch, int]:
        """Return as many matching rows as the limits allow, and cache the rows for the next read if some remain."""
        ask = self._ask
        kept = self._find()
        key = kept.end, ask.stream, ask.topic_filter.text, ask.columns
        start, stop = kept.rows(ask.at, ask.bound)
        cut = min(stop, start + limits.rows, start + kept.rows_within(start, limits.bytes))
        self.bytes = kept.bytes(start, cut)
        if cut < stop:
            self._reading.keep(key, kept)
            return kept.batch[start:cut], int(kept.batch.positions[cut - 1]) + 1
        self._reading.forget(key)
        return kept.batch[start:cut], min(kept.end, ask.bound) + 1
