"""A slab of bit-field keys: one value per message, under a key that lets a wildcard filter skip other keys.

Stored form, version 1 (keyspace ``keys``; fields are unsigned, from the most significant bit on)::

    generation:32 index:8*I epoch:53-E hash:B ... hash:B low:11+E 0...0  -> a row
    generation:32 index:8*I position:64                                  -> a row

with the options I = ``topic_index_bytes``, B = ``bits_per_topic_level`` and E = ``epoch_bits``.
``index`` is the number of the topic's stream in the learned topic structure (keyspace ``meta``,
see `topicstore_layouts.shared.learned_topics`). Each ``+`` of the stream's pattern, of the first ten, has a hash:
the highest B bits of the 64-bit xxh3 digest of the topic's level, in UTF-8. Further levels, and those that a pattern's
``#`` stands for, have no hash. ``epoch`` and ``low`` are the higher and the lower bits of the position; zero bits fill
up the last byte. The second form is for streams whose pattern has no ``+``, and for the highest index, which serves
every stream of that number and above.

The row is defined in `topicstore_layouts.shared.message_rows`, and the place of a reader in `place`.

A read seeks to the lowest key at or above its place that its filter accepts. It scans while keys are accepted,
and then seeks to the next possible key. Hashes may collide, so each message's topic is checked as well.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

import attrs
import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.engine import KEYS, Engine, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError, NewerFormatError
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
from topicstore.contract.positions import COUNTER_BITS
from topicstore.contract.topics import matches_any

from topicstore_layouts.shared.latest_positions import LatestPositions
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.message_rows import Row, batch_of, encode_rows, read_rows

from .keymapper import KeyFilter
from .place import Place, Span
from .streams import KeyOptions, StreamKeys, Streams

__all__ = ["WildcardSlab"]

_LEAP = 12
"""The number of rejected keys at the end of a list, with no possible match among them, after which a seek is
assumed to be cheaper than scanning. A seek costs as much as scanning about fifty keys."""
_LOOKED_AT = 1_000
"""The number of keys that one step of a delete examines, besides the rest of the last list."""
_DELETED_BYTES = 1 << 20
"""The bytes of values that one step of a delete reads."""

Pair = tuple[bytes, bytes]


@attrs.frozen
class _Found:
    """The pairs of a scanned list whose keys the filter accepts."""

    keys: Sequence[bytes]
    """The keys of messages that may match."""
    values: Sequence[bytes]
    looked_at: int
    after: int
    """The key below which everything was examined."""


class _Taken:
    """The pairs that a read has collected, counted against its limits."""

    def __init__(self, limits: ReadLimits, keys: int) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self._limits, self._most_keys = limits, keys
        self._bytes = self._looked_at = 0

    def take(self, found: _Found) -> int:
        """Add the pairs that fit the limits, at least one if there are any; return their number."""
        keys, values, size = found.keys, found.values, sum(map(len, found.values))
        rows, bytes_ = self._limits.rows - len(self.values), self._limits.bytes - self._bytes
        if len(values) > rows or size > bytes_:
            ends = list(accumulate(map(len, values[:rows])))
            count = min(bisect_left(ends, bytes_) + 1, len(ends))
            keys, values, size = keys[:count], values[:count], ends[count - 1]
        self.keys += keys
        self.values += values
        self._bytes += size
        self._looked_at += found.looked_at
        return len(values)

    @property
    def enough(self) -> bool:
        """Whether a limit is reached."""
        limits = self._limits
        return (
            len(self.values) >= limits.rows
            or self._bytes >= limits.bytes
            or self._looked_at >= self._most_keys
            or (limits.deadline is not None and time.monotonic() >= limits.deadline)
        )


@attrs.frozen
class _Read:
    """The result of a read."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    place: Place
    exhausted: bool


class WildcardSlab(Slab):
    """A slab of the wildcard_optimized layout; the docstring of the module describes it."""

    def __init__(self, engine: Engine, shard: int, generation: int, trie: LearnedTopics, options: KeyOptions) -> None:
        self.counters = ReadCounters()
        self.epoch = 1 << COUNTER_BITS + options.epoch_bits
        self.trie = trie
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._number = shard << 32 | generation
        self._streams = Streams(generation, trie, options)
        self._latest = LatestPositions(engine, self._latest_in)

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add every message, in order of keys, and newly learned structure to a write batch."""
        values = encode_rows(batch, self._number)
        streams, positions = self._streams, np.asarray(batch.positions)
        parts = streams.learn(batch.topics)
        self._latest.note(parts[:, 0], positions)
        for rows, keys in streams.pack(parts, positions):
            write.put_many(KEYS, keys, list(map(values.__getitem__, rows.tolist())))
        self.trie.save(write)

    def committed(self) -> None:
        """Mark the learned structure as committed."""
        self.trie.saved()

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the streams that may hold matches of the filter."""
        streams = self._streams
        return [StreamInfo(stream=s, pattern=streams.describe(s)) for s in streams.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the streams that may hold matches, except those that end before ``first``."""
        return self._latest.reaching(self._streams.match(topic_filter), first)

    def _latest_in(self, view: Reader, stream: int) -> int:
        """Return the end of the last epoch with a message. Within it, messages are not in order of position."""
        keys = self._streams.keys(stream)
        span = keys.encode(0), keys.encode(1 << keys.mapper.bits)
        for chunk in view.scan(KEYS, *span, reverse=True, limit=1):
            position = int(keys.positions([key for key, _ in chunk])[0])
            return position | keys.epochs.last_position
        return 0

    def visible(self, stream: int, watermark: int) -> int:
        """Return the position up to which a stream can be read; if its keys have hashes, the end of an epoch."""
        return watermark if self._streams.is_ordered(stream) else super().visible(stream, watermark)

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a reader that starts at a position."""
        return Place.before(self._streams.keys(stream).epochs, position).encode()

    def reached(self, stream: int, place: bytes) -> int:
        """Return the highest position that a reader at this place may have read."""
        return Place.decode(self._streams.keys(stream).epochs, place).reached

    # --- reading ---

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Scan from the place, seeking over keys that can't match, until a limit is reached."""
        try:
            keys = self._streams.keys(stream)
        except KeyError as bad:
            raise ValueError(f"there is no stream {stream}") from bad
        read = self._read(stream, topic_filter, Place.decode(keys.epochs, place), limits)
        positions = keys.positions(read.keys)
        rows = read_rows(read.values, positions, self._number)
        chosen = _matching(keys, topic_filter, rows)
        if len(chosen) < len(rows):
            rows, positions = [rows[row] for row in chosen], positions[chosen]
        batch = batch_of(rows, positions, self._shard)
        self.counters.rows += len(batch)
        return SlabStep(batch=batch, place=read.place.encode(), exhausted=read.exhausted)

    def _read(
        self, stream: int, topic_filter: TopicFilter, place: Place, limits: ReadLimits, most_keys: int = sys.maxsize
    ) -> _Read:
        """Read until a limit is reached, ``most_keys`` were examined, or everything up to the bound was read.

        Stored values count as payload bytes, because they are only a little longer.
        """
        taken, keys, bound = _Taken(limits, most_keys), self._streams.keys(stream), limits.bound
        hashes = self._streams.hashes(stream, topic_filter)
        for span in place.spans(bound):
            for found in self._walk(keys, keys.filter(hashes, span), span, limits.rows - len(taken.keys)):
                count = taken.take(found)
                if count < len(found.keys):
                    after = keys.decode(found.keys[count])
                elif taken.enough:
                    after = found.after
                else:
                    continue
                return _Read(taken.keys, taken.values, place.moved(after, bound), exhausted=False)
        return _Read(taken.keys, taken.values, place.done(bound), exhausted=True)

    def _walk(self, keys: StreamKeys, let_through: KeyFilter, span: Span, rows: int) -> Iterator[_Found]:
        """Yield the pairs of a span whose keys a filter accepts; the caller takes at most ``rows`` of them."""
        limit = rows if let_through.free else None
        at = let_through.ratchet(span.start)
        while at is not None and at < span.end:
            self.counters.seeks += 1
            leap = None
            for chunk in self._engine.scan(KEYS, keys.encode(at), keys.encode(span.end), limit=limit):
                stored, values = [key for key, _ in chunk], [value for _, value in chunk]
                chosen = let_through.select(stored)
                found = self._found(stored, values, chosen, keys.decode(stored[-1]) + 1)
                yield found
                idle = len(stored) - 1 - chosen[-1] if chosen else len(stored)
                if idle >= _LEAP:
                    leap = _leap(let_through, keys.decode(stored[-_LEAP]), found.after, span.end)
                    if leap is not None:
                        break
            at = leap

    def _found(self, stored: Sequence[bytes], values: Sequence[bytes], chosen: Sequence[int], after: int) -> _Found:
        self.counters.visited += len(chosen)
        self.counters.skipped += len(stored) - len(chosen)
        if len(chosen) < len(stored):
            return _Found([stored[at] for at in chosen], [values[at] for at in chosen], len(stored), after)
        return _Found(stored, values, len(stored), after)

    # --- deleting ---

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Find matching messages as `next` does, and delete them; each step reads a bounded number of keys."""
        limits = ReadLimits(rows=_LOOKED_AT, bytes=_DELETED_BYTES, bound=last)
        for stream in self._streams.match(topic_filter):
            keys = self._streams.keys(stream)
            place, exhausted = Place.before(keys.epochs, first), False
            while not exhausted:
                read = self._read(stream, topic_filter, place, limits, _LOOKED_AT)
                yield self._deletion(keys, topic_filter, spare, read)
                place, exhausted = read.place, read.exhausted

    def _deletion(
        self, keys: StreamKeys, topic_filter: TopicFilter, spare: Sequence[TopicFilter], read: _Read
    ) -> DeleteStep:
        rows = read_rows(read.values, keys.positions(read.keys), self._number)
        chosen = _matching(keys, topic_filter, rows)
        if spare:
            chosen = [row for row in chosen if not matches_any(spare, rows[row].topic)]
        write = WriteBatch()
        for row in chosen:
            write.delete(KEYS, read.keys[row])
        return DeleteStep(write=write, messages=len(chosen), freed=sum(len(read.values[row]) for row in chosen))

    # --- maintenance ---

    def learned(self) -> Iterator[TopicNode]:
        """Yield the nodes of the learned topic structure."""
        return self._streams.learned()

    def info(self) -> SlabInfo:
        """Return the number of streams and the size of the trie."""
        return SlabInfo(streams=len(self._streams), details={"trie nodes": self.trie.nodes})

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Decode every message, and compare its key with the key made from its topic and position."""
        first, end = (encode_generation(number) for number in (self._generation, self._generation + 1))
        for chunk in self._engine.scan(KEYS, first, end):
            yield from self._verify(chunk, bound)

    def _verify(self, pairs: list[Pair], bound: int) -> Iterator[Damage | int]:
        """Check messages together and, if that fails, one by one."""
        try:
            yield sum(self._check(*of_stream, bound) for of_stream in groupby(pairs, self._streams.stream_of))
        except (CorruptionError, NewerFormatError) as bad:  # a damaged version byte looks like a newer format
            if len(pairs) > 1:
                for pair in pairs:
                    yield from self._verify([pair], bound)
            else:
                place = f"shard {self._shard}, generation {self._generation}, key {pairs[0][0].hex()}"
                yield Damage(place=place, reason=bad.reason)

    def _check(self, stream: int, pairs: Iterable[Pair], bound: int) -> int:
        """Return the number of messages up to position ``bound``. Raises `CorruptionError` if one is damaged."""
        stored, values = map(list, zip(*pairs, strict=True))
        try:
            keys = self._streams.keys(stream)
        except KeyError:
            raise CorruptionError(f"there is no stream {stream}") from None
        if any(len(key) != keys.width for key in stored):
            raise CorruptionError(f"not a key of stream {stream}")
        positions = keys.positions(stored)
        seen = np.flatnonzero(positions <= np.uint64(max(bound, 0))).tolist()
        if not seen:
            return 0
        stored, values, positions = [stored[row] for row in seen], [values[row] for row in seen], positions[seen]
        topics = [row.topic for row in read_rows(values, positions, self._number)]
        if any(self._streams.find(topic) != stream for topic in set(topics)):
            raise CorruptionError(f"its topic is not of stream {stream}")
        made = self._streams.pack(self._streams.parts(topics, stream), positions)
        if [key for _, keys_made in made for key in keys_made] != stored:
            raise CorruptionError("its key is not that of its topic")
        return len(stored)


def _leap(let_through: KeyFilter, idle: int, after: int, end: int) -> int | None:
    """Return the key to seek to after rejected keys from ``idle`` on; None if one of these keys could match."""
    target = let_through.ratchet(idle)
    if target is None:
        return end
    return target if target >= after else None


def _matching(keys: StreamKeys, topic_filter: TopicFilter, rows: Sequence[Row]) -> Sequence[int]:
    """Return the indexes of the rows whose topics match."""
    if keys.covered(topic_filter):
        return range(len(rows))
    matches = topic_filter.matches
    verdicts = {topic: matches(topic) for topic in {row.topic for row in rows}}
    return [index for index, row in enumerate(rows) if verdicts[row.topic]]
