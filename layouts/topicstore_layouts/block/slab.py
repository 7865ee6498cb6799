"""A slab of blocks: one a batch, or one a stream where a batch touches few streams.

All blocks lie in one run, ordered by position, whatever their streams: a reader of one
stream passes over the others' blocks by their headers, and a reader of everything (stream
0) reads them as they lie. Blocks of one batch may interleave; they are read together.

A place is the next position, 8 bytes big-endian.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.columns import Column, Constant, Indices, take, to_list
from topicstore.engine import DATA, Engine, WriteBatch
from topicstore.errors import CorruptionError, NewerFormatError
from topicstore.layout import Damage, DeleteStep, ReadCounters, Slab, SlabInfo, SlabStep, StreamInfo, TopicNode

from topicstore_layouts.learned import LearnedTopics
from topicstore_layouts.names import NameTable

from .codec import Compressor
from .format import MIXED, Block, Columns, encode_block
from .matching import Matchers
from .recent import RecentBlocks

__all__ = ["BlockSlab"]

_RUN = 0
_ALL = 0
"""The stream of every message of the slab, in order of position."""
_TOPICS, _CLIENTS = 0x10, 0x20
_MOST_ROWS = 8_192
_MOST_BYTES = 1 << 20
"""Payload bytes after which a block ends: what a reader of one message may have to decompress."""
_SPLIT_ROWS = 256
"""A batch is split by stream if each would get this many rows on average; smaller blocks cost more than they save."""
_ENOUGH = 512
"""Rows after which a batch that is read ends. Smaller blocks are joined; joining larger ones costs
more, in copies and cold memory, than the next call does."""
_LOOKED_AT = 64
"""Blocks that one step of a delete looks at."""


@attrs.frozen
class _Found:
    """Rows of a block that a reader wants."""

    block: Block
    rows: Indices | None
    """None: all."""


class BlockSlab(Slab):
    """See the head of the module."""

    def __init__(
        self, engine: Engine, shard: int, generation: int, learned: LearnedTopics, compression: str, level: int
    ) -> None:
        self.counters = ReadCounters()
        self.trie = learned
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._slab = shard << 32 | generation
        self._topics = NameTable(engine, generation, _TOPICS, learned.learn)
        self._clients = NameTable(engine, generation, _CLIENTS, lambda _: 0)
        self._matchers = Matchers(self._topics)
        self._compress = Compressor(compression, level)
        self._recent = RecentBlocks()

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Put the batch as blocks, with the names and the learned structure that are new in it."""
        payloads = to_list(batch.payloads)
        columns = Columns(
            np.asarray(batch.positions),
            self._topics.encode(batch.topics),
            self._clients.encode(batch.client_ids),
            batch.qos,
            batch.retain,
            batch.timestamps,
            batch.properties,
            payloads,
            list(map(len, payloads)),
        )
        for part in _by_size(columns):
            self._put(part, write)
        self.trie.save(write)
        self._topics.save(write)
        self._clients.save(write)

    def _put(self, columns: Columns, write: WriteBatch) -> None:
        base = int(columns.positions[0])
        for stream, part in self._by_stream(columns):
            last = int(part.positions[-1])
            write.put(DATA, self._key(last), encode_block(part, stream, base, last, self._compress, self._slab))

    def _by_stream(self, columns: Columns) -> list[tuple[int, Columns]]:
        topics = columns.topics
        if isinstance(topics, Constant):
            return [(self._topics.stream(topics.value), columns)]
        streams = self._topics.streams(topics)
        if (streams == streams[0]).all():
            return [(int(streams[0]), columns)]
        touched = np.unique(streams).tolist()
        if len(streams) < _SPLIT_ROWS * len(touched):
            return [(MIXED, columns)]
        return [(stream, columns.take(np.flatnonzero(streams == stream))) for stream in touched]

    def committed(self) -> None:
        """Names and structure are saved."""
        self.trie.saved()
        self._topics.saved()
        self._clients.saved()

    def _key(self, position: int) -> tuple[int, int, int]:
        return self._generation, _RUN, position

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the learned streams that the filter may touch."""
        return [StreamInfo(stream=s, pattern=self.trie.pattern(s)) for s in self.trie.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter) -> list[int]:
        """Return the one stream that is touched, or that of everything: one pass serves them all."""
        streams = self.trie.match(topic_filter)
        if not streams or (topic_filter.literal and self._topics.find(topic_filter.text) is None):
            return []
        return streams if len(streams) == 1 else [_ALL]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """A place is a position."""
        if stream != _ALL and stream not in self.trie:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    # --- reading ---

    def next(
        self,
        stream: int,
        topic_filter: TopicFilter,
        place: bytes,
        *,
        limit: int,
        limit_bytes: int,
        bound: int,
        deadline: float | None,
    ) -> SlabStep:
        """Read blocks from the place on until there are enough rows."""
        if len(place) != 8 or (stream != _ALL and stream not in self.trie):
            raise ValueError(place)
        at = int.from_bytes(place, "big")
        batches: list[MessageBatch] = []
        rows = size = 0
        exhausted = True
        for blocks in self._batches(at, bound):
            if batches and rows + sum(block.rows for block in blocks) > limit:
                exhausted = False  # it may not fit; the next call takes it whole
                break
            found = [match for block in blocks if (match := self._match(block, stream, topic_filter, at, bound))]
            last = blocks[-1].last
            at = min(last, bound) + 1
            if found:
                batch = self._decode(found)
                if len(batch) > limit:
                    batch = batch[:limit]
                    at = int(batch.positions[-1]) + 1
                    self._recent.keep(blocks)
                batches.append(batch)
                rows += len(batch)
                size += sum(match.block.payload_bytes for match in found)
            enough = rows >= min(limit, _ENOUGH) or size >= limit_bytes
            if at <= bound and (enough or (deadline is not None and time.monotonic() >= deadline)):
                exhausted = False
                break
        self.counters.rows += rows
        place = (max(at, bound + 1) if exhausted else at).to_bytes(8, "big")
        return SlabStep(batch=MessageBatch.concat(batches), place=place, exhausted=exhausted)

    def _batches(self, first: int, bound: int) -> Iterator[list[Block]]:
        """Yield the blocks that may hold positions from ``first`` to ``bound``, those of a batch together."""
        if first > bound:
            return
        self.counters.seeks += 1
        together: list[Block] = []
        for block in self._scan(first):
            if together and block.base != together[0].base:
                yield together
                together = []
            if block.base > bound:
                return
            together.append(block)
            if block.rows == block.last - block.base + 1:  # all of its batch: no other block can follow
                yield together
                together = []
        if together:
            yield together

    def _scan(self, first: int) -> Iterator[Block]:
        for chunk in self._engine.scan(DATA, self._key(first), (self._generation, _RUN + 1, 0)):
            for key, value in chunk:
                yield self._open(key[2], value)

    def _open(self, last: int, value: bytes) -> Block:
        block = self._recent.get(last, value)
        if block is not None:
            return block
        try:
            return Block(value, last, self._slab)
        except CorruptionError as bad:
            raise self._damaged(last, bad) from bad

    def _damaged(self, last: int, bad: CorruptionError) -> CorruptionError:
        return CorruptionError(bad.reason, self._place_of(last))

    def _place_of(self, last: int) -> str:
        return f"shard {self._shard}, generation {self._generation}, block that ends at position {last}"

    def _match(self, block: Block, stream: int, topic_filter: TopicFilter, first: int, bound: int) -> _Found | None:
        """Return the rows of a block that a reader wants, or None if there are none."""
        if stream not in (_ALL, MIXED, block.stream) and block.stream != MIXED:
            self.counters.skipped += 1
            return None
        try:
            rows = self._rows(block, stream, topic_filter, first, bound)
        except CorruptionError as bad:
            raise self._damaged(block.last, bad) from bad
        if rows is not None and not len(rows):
            self.counters.skipped += 1
            return None
        self.counters.visited += 1
        return _Found(block, rows)

    def _rows(self, block: Block, stream: int, topic_filter: TopicFilter, first: int, bound: int) -> Indices | None:
        topics = block.topics()
        mask = self._matchers.of(topic_filter).rows(topics)
        if mask is False:
            return np.empty(0, dtype=np.intp)
        if stream != _ALL and block.stream == MIXED:
            numbers = np.full(block.rows, topics.value) if isinstance(topics, Constant) else topics
            mask = mask & (self._topics.streams(numbers) == stream)
        if block.first < first or block.last > bound:
            positions = block.positions()
            mask = mask & (positions >= np.uint64(first)) & (positions <= np.uint64(bound))
        return None if mask is True else np.flatnonzero(mask)

    def _decode(self, found: list[_Found]) -> MessageBatch:
        """Return the wanted rows of the blocks of one batch, in order of position."""
        if len(found) == 1:
            return self._batch(found[0])
        joined = MessageBatch.concat([self._batch(match) for match in found])
        return joined.take(np.argsort(joined.positions, kind="stable"))

    def _batch(self, found: _Found) -> MessageBatch:
        block, rows = found.block, found.rows
        try:
            positions = block.positions()
            return MessageBatch(
                topics=self._names(self._topics, block.topics(), rows),
                payloads=block.payloads() if rows is None else block.payloads().pick(rows),
                client_ids=self._names(self._clients, block.client_ids(), rows),
                qos=_pick(block.qos(), rows),
                retain=_pick(block.retain(), rows),
                timestamps=_pick(block.timestamps(positions), rows),
                properties=_pick(block.properties(), rows),
                positions=_pick(positions, rows),
                shards=Constant(self._shard, block.rows if rows is None else len(rows)),
            )
        except CorruptionError as bad:
            raise self._damaged(block.last, bad) from bad

    def _names(self, table: NameTable, numbers: Column, rows: Indices | None) -> Column:
        if isinstance(numbers, Constant):
            return Constant(table.name(numbers.value), len(numbers) if rows is None else len(rows))
        return table.names(numbers if rows is None else numbers[rows])

    # --- deleting ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[DeleteStep]:
        """Rewrite the blocks that hold matching messages under the same keys; each step looks at a few."""
        more = True
        while more:
            write, deleted, freed, seen = WriteBatch(), 0, 0, 0
            more = False
            for together in self._batches(first, last):
                for block in together:
                    found = self._match(block, _ALL, topic_filter, first, last)
                    if found is not None:
                        deleted += block.rows if found.rows is None else len(found.rows)
                        freed += block.size - self._rewrite(found, write)
                first = together[-1].last + 1
                seen += len(together)
                if seen >= _LOOKED_AT:
                    more = True
                    break
            yield DeleteStep(write=write, messages=deleted, freed=freed)

    def _rewrite(self, found: _Found, write: WriteBatch) -> int:
        """Replace a block by one without the rows found; return the bytes of the new one."""
        block = found.block
        key = self._key(block.last)
        rows = np.arange(block.rows) if found.rows is None else found.rows
        keep = np.setdiff1d(np.arange(block.rows), rows, assume_unique=True)
        if not len(keep):
            write.delete(DATA, key)
            return 0
        rest = block.columns().take(keep)
        value = encode_block(rest, block.stream, block.base, block.last, self._compress, self._slab)
        write.put(DATA, key, value)
        return len(value)

    # --- care ---

    def learned(self) -> Iterator[TopicNode]:
        """Yield the trie's nodes."""
        return self.trie.describe()

    def info(self) -> SlabInfo:
        """Streams, and what the dictionaries and the trie hold."""
        return SlabInfo(
            streams=len(self.trie),
            details={"topics": len(self._topics), "client ids": len(self._clients), "trie nodes": self.trie.nodes},
        )

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Decode every block, check it against the ones before, and check the dictionaries."""
        tables = (self._topics, self.trie.find, "topic"), (self._clients, lambda _: 0, "client id")
        for table, stream_of, what in tables:
            for sentence in table.verify(stream_of):
                yield Damage(place=f"shard {self._shard}, generation {self._generation}, {what} names", reason=sentence)
        end_of_batch_before = end = base = -1
        for chunk in self._engine.scan(DATA, self._key(0), (self._generation, _RUN + 1, 0)):
            for key, value in chunk:
                last = key[2]
                try:
                    block = Block(value, last, self._slab)
                    if block.base > bound:
                        return
                    if block.base != base:
                        base, end_of_batch_before = block.base, end
                    end = last
                    self._check(block, end_of_batch_before)
                except (CorruptionError, NewerFormatError) as bad:  # the latter from a damaged version byte
                    reason = bad.reason if isinstance(bad, CorruptionError) else str(bad)
                    yield Damage(place=self._place_of(last), reason=reason)
                else:
                    yield block.rows

    def _check(self, block: Block, end_before: int) -> None:
        columns = block.columns()
        positions = columns.positions
        if block.base <= end_before:
            raise CorruptionError(f"its batch begins at {block.base}, before the end of the one before, {end_before}")
        if int(positions[0]) < block.base or int(positions[-1]) > block.last or (positions[1:] <= positions[:-1]).any():
            raise CorruptionError("its positions are not in order")
        topics = np.unique(to_list(columns.topics)).astype(np.uint32)
        self._topics.names(topics)
        self._clients.names(np.unique(to_list(columns.client_ids)).astype(np.uint32))
        if block.stream != MIXED and (self._topics.streams(topics) != block.stream).any():
            raise CorruptionError(f"it holds topics that are not of its stream {block.stream}")
        cut = block.payloads().pick(np.arange(0, block.rows, 5, dtype=np.intp))
        if cut != columns.payloads[::5]:
            raise CorruptionError("its lengths don't fit its payloads")


def _pick(column: Column, rows: Indices | None) -> Column:
    return column if rows is None else take(column, rows)


def _by_size(columns: Columns) -> Iterator[Columns]:
    """Cut a large batch so that no block has too many rows or bytes."""
    sizes = columns.sizes
    if len(sizes) <= _MOST_ROWS and sum(sizes) <= _MOST_BYTES:
        yield columns
        return
    start = size = 0
    for row, bytes_ in enumerate(sizes):
        if row > start and (row - start >= _MOST_ROWS or size + bytes_ > _MOST_BYTES):
            yield columns.window(start, row)
            start, size = row, 0
        size += bytes_
    yield columns.window(start, len(sizes))
