"""What one replay costs, and where: `Database.explain`.

The replay is run to its end, as `Database.replay` would, and every fetch of a batch is put down
to the slab that it reads. What a slab read comes from its layout's own `ReadCounters`, as the
difference between before and after: other readers of the same slabs at the same time are counted
in, and so is a compaction's reading if its layout counts that.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Literal

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.iterators import Iterator as StreamIterator
from topicstore.contract.layout import ReadCounters, Slab
from topicstore.contract.positions import first_position, time_of
from topicstore.contract.requests import NextResult, ReplayRequest
from topicstore.shard.records import GenerationRecord

from .replays import run
from .storage import Storage

__all__ = ["LEGEND", "Explanation", "SlabCost", "UnreadSlab", "explain"]

LEGEND = "visited: blocks or keys, by the layout, that were decoded; skipped: passed over"
"""For people: what the counters count."""

_PATTERNS = 5

_SlabKey = tuple[int, int]
"""Shard and generation."""

Reason = Literal[
    "it is empty",
    "it ended before the start",
    "it begins behind the end",
    "no topic of it matches",
    "what matches ended before the start",
]


@attrs.frozen(kw_only=True)
class SlabCost:
    """What the replay read of one generation of one shard."""

    shard: int
    generation: int
    layout: str
    streams: int
    """Of the slab."""
    matching: int
    """Streams of it that may hold matching messages."""
    patterns: list[str]
    """Topic filters of a few of those, what the layout learned as ``+`` first: why a stream is read."""
    passes: int
    """Iterators that read them; a layout may read many streams in one pass."""
    batches: int
    """Fetched, empty ones too."""
    reads: ReadCounters
    """Seeks, blocks or keys visited and skipped, and messages returned."""
    seconds: float
    """Spent fetching."""
    epoch_seconds: float
    """How long a message may stay hidden after it was stored; 0 for layouts that show it at once."""

    def __str__(self) -> str:
        reads = self.reads
        return (
            f"shard {self.shard}, generation {self.generation} ({self.layout}): {self.matching:,} of {self.streams:,} "
            f"streams may match; seeks {reads.seeks:,}, visited {reads.visited:,}, skipped {reads.skipped:,}, "
            f"messages {reads.rows:,}; {self.seconds * 1e3:,.2f} ms"
        )


@attrs.frozen(kw_only=True)
class UnreadSlab:
    """A generation of a shard that the replay left out."""

    shard: int
    generation: int
    layout: str
    reason: Reason

    def __str__(self) -> str:
        return f"not read: shard {self.shard}, generation {self.generation} ({self.layout}): {self.reason}"


@attrs.frozen(kw_only=True)
class Explanation:
    """What one replay cost. Times are microseconds since the epoch, durations seconds."""

    topic_filter: str
    start: int
    until: int | None
    order: str | None
    messages: int
    payload_bytes: int
    batches: int
    """Fetched, over all slabs."""
    planning_seconds: float
    """Choosing streams and finding the start in them; waiting for an epoch to end is a part of it."""
    seconds: float
    """All of it, from the call to the last `Message` object."""
    rate: float
    """Messages a second."""
    slabs: list[SlabCost]
    """That were read, by shard and generation."""
    unread: list[UnreadSlab]

    def __str__(self) -> str:
        rate = f", {self.rate:,.0f} a second" if self.messages else ""
        lines = [f"{self.topic_filter}: messages {self.messages:,} in {self.seconds * 1e3:,.2f} ms{rate}"]
        lines += map(str, (*self.slabs, *self.unread))
        return "\n".join([*lines, LEGEND] if self.slabs else lines)


@attrs.define
class _Fetches:
    """What the fetches of one slab add up to."""

    passes: int = 0
    batches: int = 0
    seconds: float = 0.0


def explain(storage: Storage, request: ReplayRequest) -> Explanation:
    """Run a replay and return what it cost; see `Database.explain`."""
    return _Run(storage, request).explanation()


class _Run:
    """One replay that is measured."""

    def __init__(self, storage: Storage, request: ReplayRequest) -> None:
        self._storage = storage
        self._request = request
        self._fetches: dict[_SlabKey, _Fetches] = {}
        self._messages = self._payload_bytes = 0
        self._planning = self._seconds = 0.0

    def explanation(self) -> Explanation:
        """Run it, and put together what was counted."""
        request = self._request
        slabs = {(s.number, record.number): (record, slab) for s in self._storage.shards for record, slab in s.slabs()}
        counted = {(s.number, record.number): record for s in self._storage.shards for record in s.generations()}
        before = {key: attrs.evolve(slab.counters) for key, (_, slab) in slabs.items()}
        self._replay()
        patterns = self._patterns()
        return Explanation(
            topic_filter=request.topic_filter.text,
            start=request.start,
            until=request.until,
            order=request.order,
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            batches=sum(fetches.batches for fetches in self._fetches.values()),
            planning_seconds=self._planning,
            seconds=self._seconds,
            rate=self._messages / self._seconds,
            slabs=[
                self._cost(key, *slabs[key], before[key], patterns.get(key, []))
                for key in sorted(self._fetches.keys() & slabs.keys())
            ],
            unread=[
                self._unread(key, counted.get(key, record), key in patterns)
                for key, (record, _) in slabs.items()
                if key not in self._fetches
            ],
        )

    def _replay(self) -> None:
        began = perf_counter()
        plan = self._storage.plan(self._request)
        for shard in plan.shards:
            for generation in shard.generations:
                for iterator in generation.iterators:
                    self._fetches.setdefault((iterator.shard, iterator.generation), _Fetches()).passes += 1
        self._planning = self._seconds = perf_counter() - began
        batches = run(plan, self._fetch)
        while self._take(batches):
            pass

    def _fetch(self, iterator: StreamIterator, bound: int, limit: int) -> NextResult:
        began = perf_counter()
        result = self._storage.fetch(iterator, bound, limit)
        fetches = self._fetches[iterator.shard, iterator.generation]
        fetches.batches += 1
        fetches.seconds += perf_counter() - began
        return result

    def _take(self, batches: Iterator[MessageBatch]) -> bool:
        """Make the next batch's messages; counting their bytes is our work, not the replay's."""
        began = perf_counter()
        batch = next(batches, None)
        if batch is not None:
            batch.to_messages()
        self._seconds += perf_counter() - began
        if batch is None:
            return False
        self._messages += len(batch)
        self._payload_bytes += batch.payload_bytes()
        return True

    def _patterns(self) -> dict[_SlabKey, list[str]]:
        """Return the patterns of the streams that may match, by slab."""
        found: dict[_SlabKey, list[str]] = {}
        for stream in self._storage.streams(self._request.topic_filter, 0):
            found.setdefault((stream.shard, stream.generation), []).append(stream.pattern)
        return found

    def _cost(
        self, key: _SlabKey, record: GenerationRecord, slab: Slab, before: ReadCounters, patterns: list[str]
    ) -> SlabCost:
        fetches = self._fetches[key]
        pairs = zip(attrs.astuple(slab.counters), attrs.astuple(before), strict=True)
        return SlabCost(
            shard=key[0],
            generation=key[1],
            layout=record.layout,
            streams=slab.info().streams,
            matching=len(patterns),
            patterns=sorted(patterns, key=_learned_first)[:_PATTERNS],
            passes=fetches.passes,
            batches=fetches.batches,
            reads=ReadCounters(*(after - earlier for after, earlier in pairs)),
            seconds=fetches.seconds,
            epoch_seconds=time_of(slab.epoch) / 1e6,
        )

    def _unread(self, key: _SlabKey, record: GenerationRecord, matching: bool) -> UnreadSlab:
        reason = self._reason(record, matching)
        return UnreadSlab(shard=key[0], generation=key[1], layout=record.layout, reason=reason)

    def _reason(self, record: GenerationRecord, matching: bool) -> Reason:
        if not record.messages:
            return "it is empty"
        if record.last_position is not None and record.last_position < first_position(self._request.start):
            return "it ended before the start"
        until = self._request.until
        if until is not None and record.first_position >= first_position(until):
            return "it begins behind the end"
        return "what matches ended before the start" if matching else "no topic of it matches"


def _learned_first(pattern: str) -> tuple[bool, str]:
    return not any(level in ("+", "#", "$+") for level in pattern.split("/")), pattern
