"""Counting messages: when a count is requested, and into stored tally tables, one range at a time.

Messages of a layout that implements `Slab.heads` are counted by its compactions, each in the same write. Only gaps that
these compactions leave are counted here: those before the last table, such as of partly deleted messages, and sealed
generations. Messages of other layouts are all counted here, by `compact` and in the background: each range of `RANGE`
messages of a shard's generation becomes a table of `topicstore.shard.tally_tables`. The rest at the end of a sealed
generation, or before a range that is already counted, becomes a smaller table. Deletes wait while a range is read and
counted.

`KeptRows` caches the counts of a filter's messages from tally tables. Reading the tables of many topics takes seconds,
and histograms of the same filter are requested repeatedly, with other times. Only deletes change a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock
from typing import TypeAlias
from weakref import ref

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.layout import Heads
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.closing import do_all
from topicstore.shard.damaged_slab import DamagedSlab
from topicstore.shard.head_counter import HeadCounter, worth_a_table
from topicstore.shard.records import GenerationRecord
from topicstore.shard.rewriter import never
from topicstore.shard.shard import Shard
from topicstore.shard.tally_records import Gathering, Tally, TallyRange
from topicstore.shard.tally_tables import Span, uncounted
from topicstore.storage.reading.direct_reads import plan_generation, run_as_stored
from topicstore.storage.storage import Storage

__all__ = [
    "MOST_ROWS",
    "RANGE",
    "CountingScheduler",
    "KeptRows",
    "Rows",
    "backlog",
    "count",
    "read_counts",
    "times_of",
]

Numbers = npt.NDArray[np.float64]
Rows: TypeAlias = tuple[Numbers, Numbers, Numbers]
"""Columns of rows: the times of the first and the last message, in microseconds since the epoch, and the number of
messages between these times, inclusive."""
MOST_ROWS = 2_000_000
"""The maximum number of cached rows, of 24 bytes each. The least recently used are evicted first."""
_Key = tuple[int, int, str]
"""A shard, a generation, and a filter."""


class KeptRows:
    """A cache of rows of the tally tables of one open database. Its methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[_Key, tuple[int, dict[TallyRange, Rows]]] = {}
        """The cached rows, least recently used first, each with the shard's number of deleted messages at that time. If
        that number has changed, the rows are invalid."""
        self._firsts: dict[tuple[int, int], tuple[int, float]] = {}
        """By shard and generation, the shard's number of deleted messages, and the time of the first message."""

    def of(self, shard: Shard, generation: int, topic_filter: TopicFilter) -> tuple[tuple[TallyRange, ...], list[Rows]]:
        """Return the ranges of a generation's tables, and the rows of each table for a filter's messages."""
        key, deleted = (shard.number, generation, topic_filter.text), shard.writer.counters.deleted
        with self._lock:
            before, known = self._kept.get(key, (deleted, {}))
        if before != deleted or shard.writer.read_only:  # deletes of a writing process aren't visible to a reader
            known = {}
        found = {
            counted: known[counted] if parts is None else _joined([_rows_of(part) for part in parts])
            for counted, parts in shard.tallies.tallies(generation, topic_filter, known)
        }
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = deleted, found
            self._drop()
        return tuple(found), list(found.values())

    def first_time(self, shard: Shard, generation: int, find: Callable[[], float]) -> float:
        """Return the time of a generation's first message. ``find`` determines it if it isn't cached."""
        key, deleted = (shard.number, generation), shard.writer.counters.deleted
        if self._firsts.get(key, (-1, 0.0))[0] != deleted or shard.writer.read_only:
            self._firsts[key] = deleted, find()
        return self._firsts[key][1]

    def _drop(self) -> None:
        sizes = {key: sum(len(rows[0]) for rows in kept.values()) for key, (_, kept) in self._kept.items()}
        held = sum(sizes.values())
        for key, size in sizes.items():
            if held <= MOST_ROWS:
                return
            del self._kept[key]
            held -= size


def _rows_of(part: Tally) -> Rows:
    return times_of(part.first), times_of(part.last), part.messages.astype(np.float64)


def _joined(parts: list[Rows]) -> Rows:
    nothing = np.empty(0), np.empty(0), np.empty(0)
    first, last, messages = (np.concatenate(column) for column in zip(nothing, *parts, strict=True))
    return first, last, messages


def times_of(positions: Positions) -> Numbers:
    """Return the times of positions in microseconds as floats, which are exact up to 2**53."""
    return (positions >> np.uint64(COUNTER_BITS)).astype(np.float64)


def read_counts(
    storage: Storage,
    shard: Shard,
    generation: int,
    topic_filter: TopicFilter,
    span: Span,
    since: float,
    *,
    topics: bool = False,
    clients: bool = False,
) -> Tally:
    """Read the matching messages of a range of positions, if possible without payloads, and return their tally.

    The tally is by topic, by client id, or by both. ``since`` is that of `topicstore.shard.reader.ShardReader.plan`.
    Raises the errors of reading.
    """
    if shard.generations.slab(generation).reads_heads:
        counter = HeadCounter(topics=topics, clients=clients)
        for heads in shard.reader.heads(generation, topic_filter, span.before + 1, span.last):
            storage.check_open()
            counter.add(heads)
        return counter.total()
    change = Tally.by_topic if not clients else Tally.by_client if not topics else None
    total = Gathering() if change is None else Gathering(change)
    plan = plan_generation(storage, shard, generation, topic_filter, span.before + 1, span.last, since=since)
    for batch in run_as_stored(storage, shard, [plan], "any"):
        total.add(Tally.of(batch))
    return total.total()


RANGE = 65_536
"""The number of messages that are counted into one table, or more if they are counted from heads."""
_LONGEST = 16 * RANGE
"""The most messages that are counted into one table, apart from those that are read together with the last."""
_MOST_PAIRS = 8 * RANGE
"""The most pairs of topic and client id that are counted into one table, about 180 MB in memory; apart from those that
are read together with the last."""
_REST = 19
"""The pause after a range, as a multiple of the time for counting it, while messages are stored. Counting then uses a
twentieth of the time."""
FIRST_REST = 2.0
"""The pause before the first range, in seconds: that of a range that took a tenth of a second."""
_COUNTED = TopicFilter("#")
"""The filter of the messages that tables count."""


def backlog(shard: Shard) -> int:
    """Return the number of messages that no table counts, including those of ``$`` topics, which are never counted."""
    listed, tallies = shard.generations.listed(), shard.tallies
    counted = sum(part.messages for record in listed for part in tallies.ranges(record.number))
    return sum(record.messages for record in listed) - counted


def _gaps(shard: Shard, *, whole: bool = False) -> list[tuple[GenerationRecord, list[Span]]]:
    """Return the generations with gaps that can be counted now, and these gaps.

    Where a slab reads heads, messages after the last table of the current generation wait for a compaction, unless
    ``whole`` is true. Generations that can't be opened are left out; reading their messages raises the reason.
    """
    found = []
    for record in shard.generations.listed():
        slab = shard.generations.slabs.get(record.number)
        if slab is None or isinstance(slab, DamagedSlab):
            continue
        ranges = shard.tallies.ranges(record.number)
        last = shard.writer.watermark if record.last_position is None else record.last_position
        if record.sealed is None and slab.reads_heads and not whole:
            if not ranges:
                continue
            last = ranges[-1].last
        elif record.sealed is None and record.messages - sum(counted.messages for counted in ranges) < RANGE:
            continue
        if gaps := uncounted(ranges, record.first_position - 1, last):
            found.append((record, gaps))
    return found


def count(storage: Storage, shard: Shard, stop: Callable[[], bool] = never, *, whole: bool = False) -> int:
    """Count the messages of a shard that no table counts, until ``stop`` returns True; return their number.

    Without ``whole``, messages that a later compaction counts are left out.
    """
    counted = 0
    for record, gaps in _gaps(shard, whole=whole):
        try:
            for gap in gaps:
                counted += _count_gap(storage, shard, record, gap, stop)
        except GenerationDroppedError:  # the generation was dropped or archived after it was listed
            continue
    return counted


class CountingScheduler:
    """A scheduler that counts the messages of one database in the background.

    The scheduler doesn't wait for a pause of the writers, because there may never be one. It sleeps before the first
    range. While messages are stored, it also sleeps after each range, for many times the duration of the count, so that
    writers are hardly slowed down.
    """

    def __init__(self, storage: Storage) -> None:
        self.task = BackgroundTask("counting", lambda _: self._work())
        self._storage = ref(storage)  # a database without other references closes itself
        self._jobs = storage.jobs
        self._job = storage.jobs.add(self._look, messages=RANGE)
        self._seen = 0
        """The number of stored messages at the start of the current range. Used only by the task's thread."""
        self._began = 0.0
        """The start of the current range (`time.monotonic`). Used only by the task's thread."""
        if max(map(backlog, storage.shards)) >= RANGE:
            self.task.wake()

    def _look(self) -> None:
        self._job.messages = self._jobs.messages + RANGE
        self.task.wake()

    def stop(self) -> None:
        """Stop the scheduler, and wait until it has ended, at most one range later. This is idempotent."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        storage = self._storage()
        if storage is None or not any(_gaps(shard) for shard in storage.shards):
            return
        if not self.task.stopping.wait(FIRST_REST):
            self._begin()
            do_all((partial(count, storage, shard, self._rest) for shard in storage.shards), "could not be counted")

    def _rest(self) -> bool:
        """Sleep after a range if messages were stored meanwhile; return whether to stop."""
        if self._seen != self._jobs.messages:
            self.task.stopping.wait(_REST * (time.monotonic() - self._began))
        self._begin()
        return self.task.stopping.is_set()

    def _begin(self) -> None:
        self._seen, self._began = self._jobs.messages, time.monotonic()


def _count_gap(storage: Storage, shard: Shard, record: GenerationRecord, span: Span, stop: Callable[[], bool]) -> int:
    counted = 0
    last = shard.writer.watermark if record.last_position is None else record.last_position
    closed = record.sealed is not None or span.last < last
    gap = _Gap(storage, shard, record.number, span.before, span.last, closed=closed)
    while not stop() and (messages := gap.count_on()) is not None:
        counted += messages
    return counted


@attrs.define
class _Gap:
    """A range of positions that no table counts."""

    storage: Storage
    shard: Shard
    generation: int
    before: int
    last: int
    closed: bool = attrs.field(kw_only=True)
    """Whether no messages will be added to the gap, so that a rest of fewer than `RANGE` messages is counted, too."""
    _ranges: Iterator[_Range] | None = None
    _deleted: int = 0
    """The shard's number of deleted messages when reading began."""

    def count_on(self) -> int | None:
        """Count the next range, and return its number of messages; None if nothing is left to count."""
        with self.shard.generations.rewrite_lock:
            if uncounted(self.shard.tallies.ranges(self.generation), self.before, self.last) != [
                (self.before, self.last)
            ]:
                return None  # all is counted, or another thread has counted a part of it
            if (
                self._ranges is None or self._deleted != self.shard.writer.counters.deleted
            ):  # messages that were read ahead may have been deleted
                self._deleted = self.shard.writer.counters.deleted
                self._ranges = self._read()
            found = next(self._ranges, None)
            if found is None:
                return None
            self.shard.tallies.add(self.generation, self.before, found.last, found.tally)
            self.before = found.last
            return found.tally.count

    def _read(self) -> Iterator[_Range]:
        shard = self.shard
        if shard.generations.slab(self.generation).reads_heads:
            return _ranges_of_heads(shard.reader.heads(self.generation, _COUNTED, self.before + 1, self.last))
        plan = plan_generation(self.storage, shard, self.generation, _COUNTED, self.before + 1, self.last, since=None)
        batches = run_as_stored(self.storage, shard, [plan], "time")
        return _ranges(batches, self.last if self.closed else None)


@attrs.frozen
class _Range:
    """The tally of a range of messages, and the range's last position."""

    last: int
    tally: Tally


def _ranges_of_heads(found: Iterator[Heads]) -> Iterator[_Range]:
    """Yield ranges of at least `RANGE` messages that are worth a table or can't become longer, and then the rest."""
    counter, held, last = HeadCounter(), 0, None
    for heads in found:
        counter.add(heads)
        held, last = held + len(heads.positions), heads.last
        worth = held >= RANGE and worth_a_table(held, counter.pairs)
        if worth or held >= _LONGEST or counter.pairs >= _MOST_PAIRS:
            yield _Range(last, counter.total())
            counter, held, last = HeadCounter(), 0, None
    if last is not None:
        yield _Range(last, counter.total())


def _ranges(batches: Iterator[MessageBatch], end: int | None) -> Iterator[_Range]:
    """Yield full ranges of messages in order of positions, and then the rest up to ``end``, unless that is None."""
    total, held = Gathering(), 0
    for batch in batches:
        while len(batch):
            part = batch[: RANGE - held]
            total.add(Tally.of(part))
            held += len(part)
            batch = batch[len(part) :]
            if held == RANGE:
                yield _Range(int(part.positions[-1]), total.total())
                total, held = Gathering(), 0
    if end is not None:
        yield _Range(end, total.total())
