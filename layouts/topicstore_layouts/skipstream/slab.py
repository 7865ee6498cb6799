"""A slab of values, one a message, and an index over the levels that vary.

Stored form, version 1: keyspace ``keys`` (see `keys` for the keys)::

    message (stream, position)     -> the message (see `topicstore_layouts.shared.message_rows`)
    index entry (hash, position)   -> nothing; a message has one for each level of its topic that
                                      varies within its stream

and keyspace ``meta`` the learned topic structure (see `topicstore_layouts.shared.learned_topics`). ``hash`` is
xxh3, 64 bits, of the level's text in UTF-8, with ``stream << 16 | number of the level, counted
from 0`` as seed. The levels that vary are those learned as ``+``, and the
first eight that a last ``#`` stands for. Hashes of two levels may be the same: what a reader finds
by the index counts only if the message's own topic matches.

A place is the next position, 8 bytes big-endian.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.engine import KEYS, Engine, Reader, WriteBatch
from topicstore.contract.layout import Damage, DeleteStep, ReadCounters, Slab, SlabInfo, SlabStep, StreamInfo, TopicNode
from topicstore.contract.positions import Positions

from topicstore_layouts.shared.latest_positions import LatestPositions
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.message_rows import Row, batch_of, encode_rows, read_rows

from .entries import Entries
from .keys import entry_keys, message_keys
from .postings import Postings, common
from .verification import Verification

__all__ = ["SkipstreamSlab"]

_QUERIES, _LONGEST_KEPT = 4_096, 256
"""Queries that are kept, because every batch of a replay asks for its own again, and characters of their filters."""
_LEAST_READ = 256
"""Messages that are read at once at least where not all may match."""
_FETCHED_FIRST, _FETCHED_MOST, _FETCHED_BYTES = 16, 1_024, 1 << 20
"""Messages fetched by their keys at once, at first and at most, and bytes, should they be as large as those before."""
_LOOKED_AT, _LOOKED_AT_BYTES = 1_000, 8 << 20
"""Messages that one step of a delete looks at."""
_DENSE = 2
"""Messages that are read in passing in the time that it takes to fetch one by its key."""
_SAMPLED, _LEAST_SAMPLED = 4, 16
"""Candidates for each message that is read to find out, and messages below which that says too little."""


@attrs.frozen
class _Query:
    """What a reader wants of a stream."""

    stream: int
    topic_filter: TopicFilter
    hashes: list[int]
    """Those that every matching message has an entry of."""
    certain: bool
    """All messages of the stream match."""


@attrs.frozen
class _Helping:
    """Messages that lie one behind the other among those a reader looks at."""

    positions: Positions
    values: Sequence[bytes]
    size: int
    """Bytes of the values."""
    last: int
    """Nothing more is to be looked at up to here."""


@attrs.frozen
class _Chosen:
    """Matching messages of a helping."""

    rows: list[Row]
    positions: Positions
    values: Sequence[bytes]
    size: int
    """Bytes of the values."""

    def first(self, limit: int, limit_bytes: int) -> _Chosen:
        """Return those up to the one that reaches either limit; one at least."""
        if len(self.rows) <= limit and self.size <= limit_bytes:
            return self
        sizes = np.cumsum([len(value) for value in self.values[:limit]])
        count = min(int(np.searchsorted(sizes, limit_bytes)) + 1, len(sizes))
        return _Chosen(self.rows[:count], self.positions[:count], self.values[:count], int(sizes[count - 1]))


class SkipstreamSlab(Slab):
    """See the head of the module. ``hash_bits`` narrows the hashes, for those who want them to collide."""

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
        """Put each message and its entries, and what was learned."""
        streams, counts, hashes = self._entries.learn(batch.topics)
        positions = np.asarray(batch.positions, dtype=np.uint64)
        self._latest.note(streams, positions)
        values = encode_rows(batch, self._slab)
        # Keys in order, because the engine then finds each one's place near that of the one before.
        order = np.argsort(streams, kind="stable")
        keys = self._messages.many(streams[order], positions[order])
        write.put_many(KEYS, keys, list(map(values.__getitem__, order.tolist())))
        order = np.argsort(hashes, kind="stable")
        keys = self._index.many(hashes[order], np.repeat(positions, counts)[order])
        write.put_many(KEYS, keys, [b""] * len(keys))
        self.trie.save(write)

    def committed(self) -> None:
        """The learned structure is saved."""
        self.trie.saved()

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the learned streams that the filter may touch."""
        return [StreamInfo(stream=s, pattern=self.trie.pattern(s)) for s in self.trie.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the streams that the filter may touch, but those that end in front of ``first``."""
        return self._latest.reaching(self.trie.match(topic_filter), first)

    def _latest_in(self, view: Reader, stream: int) -> int:
        for chunk in view.scan(KEYS, *self._messages.of_number(stream), reverse=True, limit=1):
            return int(self._messages.positions([key for key, _ in chunk])[0])
        return 0

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """A place is a position."""
        if stream not in self.trie:
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
        """Read helpings from the place on until there are enough rows."""
        if stream not in self.trie or len(place) != 8:
            raise ValueError(place)
        query = self._query(stream, topic_filter)
        at = int.from_bytes(place, "big")
        batches: list[MessageBatch] = []
        rows = size = 0
        exhausted = True
        for helping in self._helpings(query, at, bound, limit, limit_bytes):
            found = self._choose(query, helping)
            taken = found.first(limit - rows, limit_bytes - size)
            if taken.rows:
                batches.append(batch_of(taken.rows, taken.positions, self._shard))
            rows += len(taken.rows)
            size += taken.size
            at = (helping.last if taken is found else int(taken.positions[-1])) + 1
            enough = rows >= limit or size >= limit_bytes
            if at <= bound and (enough or (deadline is not None and time.monotonic() >= deadline)):
                exhausted = False
                break
        self.counters.rows += rows
        after = max(at, bound + 1) if exhausted else at
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

    def _helpings(self, query: _Query, first: int, last: int, limit: int, limit_bytes: int) -> Iterator[_Helping]:
        """Yield all of a stream's messages from ``first`` to ``last`` that may match, in order, some at a time."""
        most = limit if query.certain else max(limit, _LEAST_READ)
        if not query.hashes:
            yield from self._scan(query, first, last, most, limit_bytes)
            return
        lists = [Postings(self._engine, self._index, each, last, self.counters) for each in query.hashes]
        for stretch in common(lists, first, last, self.counters):
            if not len(stretch.positions):
                yield _Helping(stretch.positions, [], 0, stretch.last)
            elif self._dense(query, stretch.positions):
                yield from self._scan(query, stretch.first, stretch.last, most, limit_bytes)
            else:
                yield from self._fetch(query, stretch.positions, stretch.last)

    def _scan(self, query: _Query, first: int, last: int, most: int, most_bytes: int) -> Iterator[_Helping]:
        """Yield all messages of a stretch."""
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
        """Yield the messages at some positions of a stretch that ends at ``last``."""
        start, count = 0, _FETCHED_FIRST
        while True:
            part = positions[start : start + count]
            start += count
            found = self._engine.get_many(KEYS, self._messages.many(query.stream, part))
            values = [value for value in found if value is not None]
            if len(values) < len(found):  # what has the same hash by chance, or was deleted meanwhile
                part = part[[value is not None for value in found]]
            size = sum(map(len, values))
            yield _Helping(part, values, size, int(positions[start - 1]) if start < len(positions) else last)
            if start >= len(positions):
                return
            largest = max(map(len, values), default=0)
            count = max(min(4 * count, _FETCHED_MOST, _FETCHED_BYTES // (largest + 1)), 1)

    def _dense(self, query: _Query, positions: Positions) -> bool:
        """Say whether candidates lie so close together that it is quicker to read what is between them, too."""
        sampled = len(positions) // _SAMPLED
        if sampled < _LEAST_SAMPLED:
            return False
        first, last = int(positions[0]), int(positions[-1])
        self.counters.seeks += 1
        sample = self._engine.scan(KEYS, *self._messages.span(query.stream, first, last), limit=sampled)
        near = self._messages.positions([key for chunk in sample for key, _ in chunk])
        if len(near) < sampled:  # most candidates are of other streams
            return True
        return len(near) * (last - first + 1) <= _DENSE * len(positions) * (int(near[-1]) - first + 1)

    def _choose(self, query: _Query, helping: _Helping) -> _Chosen:
        """Return the messages of a helping that match."""
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
        chosen = [number for number, topic in enumerate(topics) if topic in wanted]
        values = [helping.values[number] for number in chosen]
        return _Chosen([rows[n] for n in chosen], helping.positions[chosen], values, sum(map(len, values)))

    # --- deleting ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[DeleteStep]:
        """Delete matching messages and their entries; each step looks at a thousand messages at most."""
        for stream in self.trie.match(topic_filter):
            query = self._query(stream, topic_filter)
            for helping in self._helpings(query, first, last, _LOOKED_AT, _LOOKED_AT_BYTES):
                yield self._delete(query, self._choose(query, helping))

    def _delete(self, query: _Query, found: _Chosen) -> DeleteStep:
        write = WriteBatch()
        hashes = {topic: self._entries.of(query.stream, topic) for topic in {row.topic for row in found.rows}}
        for row, position in zip(found.rows, found.positions.tolist(), strict=True):
            write.delete(KEYS, self._messages.one(query.stream, position))
            for hash_ in hashes[row.topic]:
                write.delete(KEYS, self._index.one(hash_, position))
        return DeleteStep(write=write, messages=len(found.rows), freed=found.size)

    # --- care ---

    def learned(self) -> Iterator[TopicNode]:
        """Yield the trie's nodes."""
        return self.trie.describe()

    def info(self) -> SlabInfo:
        """Streams and nodes of the trie."""
        return SlabInfo(streams=len(self.trie), details={"trie nodes": self.trie.nodes})

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Read every message of the moment, check that it lies where its topic leads, and compare with the index."""
        with self._engine.snapshot() as view:
            yield from Verification(view, self._shard, self._generation, self.trie, self._entries, bound).run()
