"""A slab of values, one per message, and an index over the levels that vary.

Stored form, version 1: keyspace ``keys`` (see `keys` for the keys)::

    message (stream, position)     -> the message (see `topicstore_layouts.shared.message_rows`)
    index entry (hash, position)   -> empty; a message has one for each level of its topic that
                                      varies within its stream

and keyspace ``meta`` the learned topic structure (see `topicstore_layouts.shared.learned_topics`). ``hash`` is
xxh3, 64 bits, of the level's text in UTF-8, with ``stream << 16 | number of the level, counted
from 0`` as seed. The levels that vary are those learned as ``+``, and the
first eight that a last ``#`` stands for. Hashes of two levels may be equal, so a message found
by the index counts only if its own topic matches.

A reader's place is the next position, 8 bytes big-endian.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.engine import KEYS, Engine, Reader, WriteBatch
from topicstore.contract.layout import (
    Damage,
    DeleteStep,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
    TopicNode,
)
from topicstore.contract.positions import Positions
from topicstore.contract.topics import matches_any

from topicstore_layouts.shared.latest_positions import LatestPositions
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.message_rows import Row, batch_of, encode_rows, read_rows

from .entries import Entries
from .keys import entry_keys, message_keys
from .postings import Postings, intersect
from .verification import Verification

__all__ = ["SkipstreamSlab"]

_QUERIES, _LONGEST_KEPT = 4_096, 256
"""The most cached queries, which each batch of a replay needs again, and the most characters of their filters."""
_LEAST_READ, _MOST_READ = 256, 65_536
"""The least number of messages in a chunk, unless all messages of the stream match, and the largest number."""
_FETCHED_FIRST, _FETCHED_MOST, _FETCHED_BYTES = 16, 1_024, 1 << 20
"""The number of messages in the first look-up by keys and in the largest, and the estimated bytes of the largest."""
_LOOKED_AT, _LOOKED_AT_BYTES = 1_000, 8 << 20
"""The most messages, and bytes of values, that one step of a delete examines."""
_DENSE = 2
"""The number of messages that a scan reads in the time of fetching one by its key."""
_SAMPLED, _LEAST_SAMPLED = 4, 16
"""The candidates per sampled message, and the least number of samples from which the density is estimated."""


@attrs.frozen
class _Query:
    """A topic filter applied to one stream."""

    stream: int
    topic_filter: TopicFilter
    hashes: list[int]
    """The hashes for which every matching message has an entry."""
    certain: bool
    """Whether all messages of the stream match."""


@attrs.frozen
class _Helping:
    """A chunk of consecutive messages that a reader examines."""

    positions: Positions
    values: Sequence[bytes]
    size: int
    """The number of bytes of the values."""
    last: int
    """The position up to which everything was examined."""


@attrs.frozen
class _Chosen:
    """The matching messages of a chunk."""

    rows: list[Row]
    positions: Positions
    values: Sequence[bytes]
    size: int
    """The number of bytes of the values."""

    def only(self, chosen: list[int]) -> _Chosen:
        """Return the messages with these indexes."""
        values = [self.values[number] for number in chosen]
        return _Chosen([self.rows[n] for n in chosen], self.positions[chosen], values, sum(map(len, values)))

    def first(self, limit: int, limit_bytes: int) -> _Chosen:
        """Return the messages up to the one that reaches either limit; at least one."""
        if len(self.rows) <= limit and self.size <= limit_bytes:
            return self
        sizes = np.cumsum([len(value) for value in self.values[:limit]])
        count = min(int(np.searchsorted(sizes, limit_bytes)) + 1, len(sizes))
        return _Chosen(self.rows[:count], self.positions[:count], self.values[:count], int(sizes[count - 1]))


class SkipstreamSlab(Slab):
    """A slab of the skipstream layout; see the module's docstring. With few ``hash_bits``, tests cause collisions."""

    def __init__(
        self, engine: Engine, shard: int, generation: int, learned: LearnedTopics, hash_bits: int = 64
    ) -> None:
        self.counters = ReadCounters()
        self.trie = learned
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._slab = shard << 32 | generation
        self._entries = Entries(learned, hash_bits)
        self._queries: dict[tuple[int, str], _Query] = {}
        self._messages = message_keys(generation)
        self._index = entry_keys(generation)
        self._latest = LatestPositions(engine, self._latest_in)

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add each message with its index entries, and newly learned structure, to a write batch."""
        streams, counts, hashes = self._entries.learn(batch.topics)
        positions = np.asarray(batch.positions, dtype=np.uint64)
        self._latest.note(streams, positions)
        values = encode_rows(batch, self._slab)
        # Sorted, because an engine inserts a key faster if it is near the previous one.
        order = np.argsort(streams, kind="stable")
        keys = self._messages.many(streams[order], positions[order])
        write.put_many(KEYS, keys, list(map(values.__getitem__, order.tolist())))
        order = np.argsort(hashes, kind="stable")
        keys = self._index.many(hashes[order], np.repeat(positions, counts)[order])
        write.put_many(KEYS, keys, [b""] * len(keys))
        self.trie.save(write)

    def committed(self) -> None:
        """Mark the learned structure as committed."""
        self.trie.saved()

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the learned streams that may hold matches of the filter."""
        return [StreamInfo(stream=s, pattern=self.trie.pattern(s)) for s in self.trie.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the streams that may hold matches, except those that end before ``first``."""
        return self._latest.reaching(self.trie.match(topic_filter), first)

    def _latest_in(self, view: Reader, stream: int) -> int:
        for chunk in view.scan(KEYS, *self._messages.of_number(stream), reverse=True, limit=1):
            return int(self._messages.positions([key for key, _ in chunk])[0])
        return 0

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a reader that starts at a position."""
        if stream not in self.trie:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    def reached(self, stream: int, place: bytes) -> int:
        """Return the last position that a reader at this place has passed."""
        if len(place) != 8:
            raise ValueError(place)
        return int.from_bytes(place, "big") - 1

    # --- reading ---

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Read chunks of messages from the place until a limit is reached."""
        if stream not in self.trie or len(place) != 8:
            raise ValueError(place)
        query = self._query(stream, topic_filter)
        at = int.from_bytes(place, "big")
        batches: list[MessageBatch] = []
        rows = size = 0
        exhausted = True
        for helping in self._helpings(query, at, limits):
            found = self._choose(query, helping)
            taken = found.first(limits.rows - rows, limits.bytes - size)
            if taken.rows:
                batches.append(batch_of(taken.rows, taken.positions, self._shard))
            rows += len(taken.rows)
            size += taken.size
            at = (helping.last if taken is found else int(taken.positions[-1])) + 1
            enough = rows >= limits.rows or size >= limits.bytes
            late = limits.deadline is not None and time.monotonic() >= limits.deadline
            if at <= limits.bound and (enough or late):
                exhausted = False
                break
        self.counters.rows += rows
        after = max(at, limits.bound + 1) if exhausted else at
        return SlabStep(batch=MessageBatch.concat(batches), place=after.to_bytes(8, "big"), exhausted=exhausted)

    def _query(self, stream: int, topic_filter: TopicFilter) -> _Query:
        query = self._queries.get((stream, topic_filter.text))
        if query is None:
            pattern = self.trie.pattern(stream)
            certain = not pattern.endswith("#") and topic_filter.matches(pattern)
            query = _Query(stream, topic_filter, self._entries.wanted(stream, topic_filter), certain)
            if len(self._queries) >= _QUERIES:
                self._queries = {}
            if len(topic_filter.text) <= _LONGEST_KEPT:
                self._queries[stream, topic_filter.text] = query
        return query

    def _helpings(self, query: _Query, first: int, limits: ReadLimits) -> Iterator[_Helping]:
        """Yield chunks of a stream's messages from ``first`` to the bound, in order: at least all that match."""
        last = limits.bound
        most = min(limits.rows if query.certain else max(limits.rows, _LEAST_READ), _MOST_READ)
        if not query.hashes:
            yield from self._scan(query, first, last, most, limits.bytes)
            return
        lists = [Postings(self._engine, self._index, each, last, self.counters) for each in query.hashes]
        for found in intersect(lists, first, last, self.counters):
            if not len(found.positions):
                yield _Helping(found.positions, [], 0, found.last)
            elif self._dense(query, found.positions):
                yield from self._scan(query, found.first, found.last, most, limits.bytes)
            else:
                yield from self._fetch(query, found.positions, found.last)

    def _scan(self, query: _Query, first: int, last: int, most: int, most_bytes: int) -> Iterator[_Helping]:
        """Yield all messages of a stream from ``first`` to ``last``, in chunks."""
        while first <= last:
            self.counters.seeks += 1
            keys: list[bytes] = []
            values: list[bytes] = []
            size = 0
            for chunk in self._engine.scan(KEYS, *self._messages.span(query.stream, first, last), limit=most):
                more = [value for _, value in chunk]
                keys += [key for key, _ in chunk]
                values += more
                size += sum(map(len, more))
                if size >= most_bytes:
                    break
            positions = self._messages.positions(keys)
            end = last if len(keys) < most and size < most_bytes else int(positions[-1])
            yield _Helping(positions, values, size, end)
            first = end + 1

    def _fetch(self, query: _Query, positions: Positions, last: int) -> Iterator[_Helping]:
        """Yield the messages at some positions of a range that ends at ``last``."""
        start, count = 0, _FETCHED_FIRST
        while True:
            part = positions[start : start + count]
            start += count
            found = self._engine.get_many(KEYS, self._messages.many(query.stream, part))
            values = [value for value in found if value is not None]
            # Candidates without a message: entries of other streams with equal hashes, or of deleted messages.
            if len(values) < len(found):
                part = part[[value is not None for value in found]]
            size = sum(map(len, values))
            yield _Helping(part, values, size, int(positions[start - 1]) if start < len(positions) else last)
            if start >= len(positions):
                return
            largest = max(map(len, values), default=0)
            count = max(min(4 * count, _FETCHED_MOST, _FETCHED_BYTES // (largest + 1)), 1)

    def _dense(self, query: _Query, positions: Positions) -> bool:
        """Return whether candidates lie so close together that scanning all messages between them is faster."""
        sampled = len(positions) // _SAMPLED
        if sampled < _LEAST_SAMPLED:
            return False
        first, last = int(positions[0]), int(positions[-1])
        self.counters.seeks += 1
        sample = self._engine.scan(KEYS, *self._messages.span(query.stream, first, last), limit=sampled)
        near = self._messages.positions([key for chunk in sample for key, _ in chunk])
        if len(near) < sampled:  # most candidates are messages of other streams with the same hash
            return True
        return len(near) * (last - first + 1) <= _DENSE * len(positions) * (int(near[-1]) - first + 1)

    def _choose(self, query: _Query, helping: _Helping) -> _Chosen:
        """Return the messages of a chunk that match."""
        if not helping.values:
            return _Chosen([], helping.positions, [], 0)
        self.counters.visited += len(helping.values)
        rows = read_rows(helping.values, helping.positions, self._slab)
        whole = _Chosen(rows, helping.positions, helping.values, helping.size)
        if query.certain:
            return whole
        topics = [row.topic for row in rows]
        distinct = set(topics)
        wanted = set(filter(query.topic_filter.matches, distinct))
        if len(wanted) == len(distinct):
            return whole
        return whole.only([number for number, topic in enumerate(topics) if topic in wanted])

    # --- deleting ---

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Delete matching messages and their entries; each step examines at most a thousand messages."""
        limits = ReadLimits(rows=_LOOKED_AT, bytes=_LOOKED_AT_BYTES, bound=last)
        for stream in self.trie.match(topic_filter):
            query = self._query(stream, topic_filter)
            for helping in self._helpings(query, first, limits):
                found = self._choose(query, helping)
                if spare:
                    found = found.only([n for n, row in enumerate(found.rows) if not matches_any(spare, row.topic)])
                yield self._delete(query, found)

    def _delete(self, query: _Query, found: _Chosen) -> DeleteStep:
        write = WriteBatch()
        hashes = {topic: self._entries.of(query.stream, topic) for topic in {row.topic for row in found.rows}}
        for row, position in zip(found.rows, found.positions.tolist(), strict=True):
            write.delete(KEYS, self._messages.one(query.stream, position))
            for hash_ in hashes[row.topic]:
                write.delete(KEYS, self._index.one(hash_, position))
        return DeleteStep(write=write, messages=len(found.rows), freed=found.size)

    # --- maintenance ---

    def learned(self) -> Iterator[TopicNode]:
        """Yield the nodes of the learned topic structure."""
        return self.trie.describe()

    def info(self) -> SlabInfo:
        """Return the numbers of streams and of nodes of the trie."""
        return SlabInfo(streams=len(self.trie), details={"trie nodes": self.trie.nodes})

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Read every message of one view, check that its topic belongs to its stream, and compare with the index."""
        if bound < 0:  # no message is committed
            return
        with self._engine.snapshot() as view:
            yield from Verification(view, self._shard, self._generation, self.trie, self._entries, bound).run()
