"""`Database.explain`: the cost of one replay, by slab.

The replay runs to its end or to a limit, like `Database.replay`, and every fetch of a batch is attributed
to the slab that it reads. A slab's reads are the difference of its `ReadCounters`
between the end and the beginning. They therefore include concurrent reads of the same slab,
and those of a compaction if the layout counts them.

In a cluster, the reads of a shard that this site doesn't keep are those of the site that is asked about the shard. If
different sites have answered the requests of one replay, the difference of their counters has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Literal

import attrs

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.cursors import Cursor
from topicstore.contract.layout import ReadCounters
from topicstore.contract.positions import first_position, time_of
from topicstore.contract.replay_plan import By, Order, TimeRange
from topicstore.contract.requests import ReadResult, ReplayRequest
from topicstore.shard.reader import SlabInfo
from topicstore.shard.records import GenerationRecord
from topicstore.storage.replays import limited, run
from topicstore.storage.storage import Storage

__all__ = ["LEGEND", "Explanation", "SlabCost", "UnreadSlab", "explain"]

LEGEND = "visited: blocks or keys, by the layout, that were decoded; skipped: passed over"
"""A legend of the counters for the printed report."""

_PATTERNS = 5

_SlabKey = tuple[int, int]
"""The shard and generation of a slab."""

Reason = Literal[
    "it is empty",
    "it ended before the start",
    "it begins behind the end",
    "no topic of it matches",
    "what matches ended before the start",
    "no timestamp of it lies between the two",
]


@attrs.frozen(kw_only=True)
class SlabCost:
    """The cost of reading one generation of one shard."""

    shard: int
    generation: int
    layout: str
    streams: int
    """The number of streams of the slab."""
    matching: int
    """The number of the slab's streams that may have matching messages."""
    patterns: list[str]
    """The patterns of a few matching streams, which show why they are read. Patterns with wildcards come first."""
    passes: int
    """The number of cursors that read the matching streams; a layout may read many streams with one cursor."""
    batches: int
    """The number of batches fetched, including empty ones."""
    reads: ReadCounters
    """The seeks, blocks or keys visited and skipped, and messages returned."""
    seconds: float
    """The seconds spent fetching batches."""
    epoch_seconds: float
    """The maximum number of seconds for which a stored message may stay hidden from cursors, the length of an epoch.
    0 for layouts without epochs."""

    def __str__(self) -> str:
        reads = self.reads
        return (
            f"shard {self.shard}, generation {self.generation} ({self.layout}): {self.matching:,} of {self.streams:,} "
            f"streams may match; seeks {reads.seeks:,}, visited {reads.visited:,}, skipped {reads.skipped:,}, "
            f"messages {reads.rows:,}; {self.seconds * 1e3:,.2f} ms"
        )


@attrs.frozen(kw_only=True)
class UnreadSlab:
    """A generation of a shard that the replay didn't read, and the reason."""

    shard: int
    generation: int
    layout: str
    reason: Reason

    def __str__(self) -> str:
        return f"not read: shard {self.shard}, generation {self.generation} ({self.layout}): {self.reason}"


@attrs.frozen(kw_only=True)
class Explanation:
    """The cost of one replay. Times are in microseconds since the epoch, durations in seconds."""

    topic_filter: str
    start: int
    until: int | None
    by: By
    """The times with which ``start`` and ``until`` are compared."""
    order: Order
    zones: int | None
    """The number of zones, of about 65,000 consecutive messages each, that may have messages of these timestamps; None
    for a replay by position."""
    all_zones: int | None
    """The number of all zones; None for a replay by position."""
    ended: bool
    """Whether the replay ran to its end. Otherwise it stopped at the limit: the statistics are those of its first
    messages, and slabs that were not reached have no batches."""
    messages: int
    payload_bytes: int
    batches: int
    """The number of batches fetched from all slabs."""
    planning_seconds: float
    """The seconds spent choosing streams and seeking their starts, including the wait for the end of an epoch."""
    seconds: float
    """The seconds from the call to the last `Message` object."""
    rate: float
    """The number of messages per second."""
    slabs: list[SlabCost]
    """The costs of the slabs that were read, by shard and generation."""
    unread: list[UnreadSlab]

    def __str__(self) -> str:
        rate = f", {self.rate:,.0f} a second" if self.messages else ""
        first = "" if self.ended else "the first "
        lines = [f"{self.topic_filter}: {first}messages {self.messages:,} in {self.seconds * 1e3:,.2f} ms{rate}"]
        if self.zones is not None:
            lines.append(f"by timestamps: {self.zones:,} of {self.all_zones:,} zones may hold some of them")
        lines += map(str, (*self.slabs, *self.unread))
        return "\n".join([*lines, LEGEND] if self.slabs else lines)


@attrs.define
class _Fetches:
    """The totals of the fetches from one slab."""

    passes: int = 0
    batches: int = 0
    seconds: float = 0.0


def explain(storage: Storage, request: ReplayRequest, limit: int | None = None) -> Explanation:
    """Run a replay and return its cost; see `Database.explain`."""
    if limit is not None:
        check_count("limit", limit)
        request.batch_size = min(limit, request.batch_size)
    return _Run(storage, request, limit).explanation()


class _Run:
    """The measurement of one replay."""

    def __init__(self, storage: Storage, request: ReplayRequest, limit: int | None) -> None:
        self._storage = storage
        self._request = request
        self._limit = limit
        self._ended = False
        self._fetches: dict[_SlabKey, _Fetches] = {}
        self._messages = self._payload_bytes = 0
        self._planning = self._seconds = 0.0

    def explanation(self) -> Explanation:
        """Run the replay, and return the explanation."""
        request = self._request
        times = request.timestamps
        before, _ = self._slabs(None)
        self._replay()
        patterns = self._patterns()
        after, zones = self._slabs(times)
        return Explanation(
            topic_filter=request.topic_filter.text,
            start=request.start if times is None else times.start,
            until=request.until if times is None else times.until,
            by="position" if times is None else "timestamp",
            order=request.order,
            zones=None if times is None else sum(some for some, _ in zones),
            all_zones=None if times is None else sum(every for _, every in zones),
            ended=self._ended,
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            batches=sum(fetches.batches for fetches in self._fetches.values()),
            planning_seconds=self._planning,
            seconds=self._seconds,
            rate=self._messages / self._seconds,
            slabs=[
                self._cost(key, before[key], after.get(key, before[key]), patterns.get(key, []))
                for key in sorted(self._fetches.keys() & before.keys())
            ],
            unread=[
                self._unread(key, slab.record, key in patterns)
                for key, slab in before.items()
                if key not in self._fetches
            ],
        )

    def _slabs(self, times: TimeRange | None) -> tuple[dict[_SlabKey, SlabInfo], list[tuple[int, int]]]:
        """Return the live slabs of all shards, and by shard the numbers of zones with messages of ``times``."""
        found = [(shard.number, shard.reader.slabs(times)) for shard in self._storage.shards]
        slabs = {(shard, slab.record.number): slab for shard, some in found for slab in some.slabs}
        return slabs, [some.zones for _, some in found]

    def _replay(self) -> None:
        began = perf_counter()
        plan = self._storage.plan(self._request)
        for shard in plan.shards:
            for generation in shard.generations:
                for cursor in generation.cursors:
                    self._fetches.setdefault((cursor.shard, cursor.generation), _Fetches()).passes += 1
        self._planning = self._seconds = perf_counter() - began
        batches = run(plan, self._fetch)
        if self._limit is not None:
            batches = limited(batches, self._limit)
        while self._take(batches):
            pass
        self._ended = self._limit is None or self._messages < self._limit

    def _fetch(self, cursor: Cursor, bound: int, limit: int) -> ReadResult:
        began = perf_counter()
        result = self._storage.fetch(cursor, bound, limit)
        fetches = self._fetches[cursor.shard, cursor.generation]
        fetches.batches += 1
        fetches.seconds += perf_counter() - began
        return result

    def _take(self, batches: Iterator[MessageBatch]) -> bool:
        """Fetch the next batch and create its messages; return False at the end. Only this time is measured."""
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

    def _cost(self, key: _SlabKey, before: SlabInfo, slab: SlabInfo, patterns: list[str]) -> SlabCost:
        fetches = self._fetches[key]
        pairs = zip(slab.counters, before.counters, strict=True)
        return SlabCost(
            shard=key[0],
            generation=key[1],
            layout=slab.record.layout,
            streams=slab.streams,
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
        if not matching:
            return "no topic of it matches"
        by_position = self._request.timestamps is None
        return "what matches ended before the start" if by_position else "no timestamp of it lies between the two"


def _learned_first(pattern: str) -> tuple[bool, str]:
    return not any(level in ("+", "#", "$+") for level in pattern.split("/")), pattern
