"""Reading a shard: planning the streams that a replay reads, and reading the next messages of a stream.

Layouts that don't order messages by position within an epoch (a range of positions, `Slab.epoch`) hide the current
epoch, to which messages are still added. A reader that needs these messages waits until the epoch's time is over, and
then ends the epoch: it commits the epoch's end as the shard's last position. Later messages then get later positions,
even if the clock is set back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs
import msgspec

from topicstore.contract.batch import ALL_FIELDS
from topicstore.contract.cursors import Cursor
from topicstore.contract.errors import (
    CorruptionError,
    EngineError,
    GenerationArchivedError,
    InvalidCursorError,
    PlaceAheadError,
)
from topicstore.contract.layout import Heads, ReadLimits, Slab
from topicstore.contract.positions import time_of
from topicstore.contract.replay_plan import GenerationPlan, ShardPlan, TimeRange
from topicstore.contract.requests import ReadResult
from topicstore.contract.times import format_time
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.cancelling import check_wanted

from .generations import Generations
from .records import GenerationRecord
from .writer import LogFullError, PendingWrite, ShardWriter
from .zones import Span, may_hold

__all__ = [
    "ShardReader",
    "SlabInfo",
    "Slabs",
]

_LOOK = 1.0
"""The interval in seconds at which a thread that waits for the end of an epoch checks whether the shard has failed. A
failed fsync doesn't notify it."""


def _reaches(record: GenerationRecord, first: int, last: int) -> bool:
    """Return whether a generation may have messages with positions from ``first`` to ``last``."""
    return record.first_position <= last and (record.last_position is None or record.last_position >= first)


class SlabInfo(msgspec.Struct, frozen=True):
    """A description of a slab, for `topicstore.storage.reading.explain`."""

    record: GenerationRecord
    """The record of its generation, with the counts of the current one."""
    streams: int
    epoch: int
    counters: tuple[int, ...]
    """The fields of its `ReadCounters`, in order."""


class Slabs(msgspec.Struct, frozen=True):
    """Descriptions of a shard's live slabs, and two counts of zones: those with timestamps in a range, and all."""

    slabs: list[SlabInfo]
    zones: tuple[int, int]


class ShardReader:
    """The read operations of one shard."""

    def __init__(self, writer: ShardWriter, generations: Generations) -> None:
        self._writer = writer
        self._generations = generations

    @property
    def watermark(self) -> int:
        """The highest position that readers may see."""
        return self._writer.watermark

    @property
    def last_position(self) -> int:
        """The last position that was assigned."""
        return self._writer.tail.last_position

    @property
    def displacement(self) -> int:
        """The maximum, in microseconds, by which a position's time is later than its message's own time."""
        return self._writer.displacement

    def plan(
        self,
        database: bytes,
        topic_filter: TopicFilter,
        first: int,
        bound: int,
        *,
        since: float | None,
        timestamps: TimeRange | None = None,
    ) -> ShardPlan:
        """Return a plan that reads the matching messages with positions from ``first`` to ``bound``, inclusive.

        The plan lists the generations in order, each with the streams that its layout chose as cheapest to read. If
        the bound lies in the current epoch, whose messages the layout still hides, this method waits until the epoch
        has ended: at most one epoch's length after ``since`` (by `time.monotonic`). If ``since`` is None, it lowers
        the bound instead of waiting.

        ``timestamps`` is a range of the messages' own times. The plan skips ranges of positions that are known to have
        no message in it. It reads all other ranges completely, so it may also return messages of other times.
        """
        if self._writer.log is None:
            return self._plan(database, topic_filter, first, bound, since=since, timestamps=timestamps)
        return self._generations.undisturbed(
            lambda: self._plan(database, topic_filter, first, bound, since=since, timestamps=timestamps)
        )

    def _plan(
        self,
        database: bytes,
        topic_filter: TopicFilter,
        first: int,
        bound: int,
        *,
        since: float | None,
        timestamps: TimeRange | None,
    ) -> ShardPlan:
        number, plans = self._writer.number, []
        for record, slab, begin, last in self._parts(first, bound, timestamps):
            streams = slab.cover(topic_filter, begin)
            if record.sealed is None and any(slab.visible(stream, self._writer.watermark) < last for stream in streams):
                if since is None:
                    bound = min(slab.visible(stream, self._writer.watermark) for stream in streams)
                else:
                    self.end_epoch(record.number, last, wait=True, since=since)
            if streams:
                cursors = [
                    Cursor.of(
                        *(database, number, record.number, stream, topic_filter),
                        slab.begin(stream, topic_filter, begin),
                    )
                    for stream in streams
                ]
                plans.append(GenerationPlan(cursors, slab.epoch, last, begin))
        return ShardPlan(shard=number, bound=bound, generations=plans)

    def _parts(
        self, first: int, bound: int, timestamps: TimeRange | None
    ) -> Iterator[tuple[GenerationRecord, Slab, int, int]]:
        """Yield (record, slab, first, last) of each range of positions to read, by generation and in order."""
        live = self._generations.with_slabs()
        if self._writer.elsewhere:  # checked after the read: dropping the copy sets it, then empties the list
            raise self._writer.elsewhere_error()
        if timestamps is not None:
            spans = self.spans(timestamps, first, bound)
        else:
            spans = [(first, bound)] if first <= bound else []
        for record, slab in live:
            for begin, last in spans:
                if _reaches(record, begin, last):
                    yield record, slab, begin, last

    def spans(self, timestamps: TimeRange, first: int, last: int) -> list[Span]:
        """Return the spans of positions, from ``first`` to ``last``, that may have messages of these times."""
        live = [record.number for record, _ in self._generations.with_slabs() if _reaches(record, first, last)]
        return list(may_hold(timestamps, self._generations.zones(live), first, last)) if first <= last else []

    def zones(self, timestamps: TimeRange) -> tuple[int, int]:
        """Return the number of zones that may have messages of these times, and the number of all zones."""
        zones = list(self._generations.zones(record.number for record, _ in self._generations.with_slabs()))
        return sum(timestamps.overlaps_any(zone.spans) for zone in zones), len(zones)

    def zone_ends(self, generation: int) -> list[int]:
        """Return the last position of each full zone of a generation, in order."""
        zones = self._generations.zones([generation])  # including the current zone, which has no end yet
        return sorted({zone.last for zone in zones if zone.last <= self._writer.watermark})

    def streams(self, topic_filter: TopicFilter, first: int) -> list[tuple[int, int, str, bool]]:
        """Return the streams that may hold matching messages at or after a position.

        Each is described by its generation, number and pattern, and by whether the generation is sealed.
        """

        def found() -> list[tuple[int, int, str, bool]]:
            live = self._generations.with_slabs()
            if self._writer.elsewhere:  # checked after the read: dropping the copy sets it, then empties the list
                raise self._writer.elsewhere_error()
            return [
                (record.number, info.stream, info.pattern, record.sealed is not None)
                for record, slab in live
                if record.last_position is None or record.last_position >= first
                for info in slab.streams(topic_filter)
            ]

        return self._generations.undisturbed(found)

    def slabs(self, timestamps: TimeRange | None) -> Slabs:
        """Return descriptions of the live slabs, and the result of `zones`; without ``timestamps``, zeros instead."""

        def found() -> Slabs:
            records = {record.number: record for record in self._generations.listed()}
            live = self._generations.with_slabs()
            if self._writer.elsewhere:  # checked after the read: dropping the copy sets it, then empties the list
                raise self._writer.elsewhere_error()
            slabs = [
                SlabInfo(records.get(one.number, one), slab.info().streams, slab.epoch, attrs.astuple(slab.counters))
                for one, slab in live
            ]
            return Slabs(slabs, (0, 0) if timestamps is None else self.zones(timestamps))

        return self._generations.undisturbed(found)

    def cursor(self, database: bytes, generation: int, stream: int, topic_filter: TopicFilter, position: int) -> Cursor:
        """Return a cursor over a stream's matching messages from a position on. Raises the errors of `Database.cursor`.

        A position after the end is lowered to the end, because messages stored later may get lower positions.
        """
        slab, shard = self._generations.slab(generation), self._writer.number
        try:
            place = slab.begin(stream, topic_filter, min(position, self._writer.tail.last_position + 1))
        except KeyError as unknown:
            raise InvalidCursorError(f"shard {shard}, generation {generation} has no stream {stream}") from unknown
        return Cursor.of(database, shard, generation, stream, topic_filter, place)

    def begin(self, cursors: Sequence[Cursor], position: int) -> list[Cursor]:
        """Return cursors of a generation, moved to a position; those without later messages may be left out."""
        slab = self._generations.slab(cursors[0].generation)
        filters = {cursor.topic_filter: cursor.filter for cursor in cursors}
        reaching = {stream for parsed in filters.values() for stream in slab.cover(parsed, position)}
        # A layout may now cover the filter by other streams than the cursors'; then no cursor is left out.
        known = reaching <= {cursor.stream for cursor in cursors}
        return [
            cursor.advance(slab.begin(cursor.stream, cursor.filter, position))
            for cursor in cursors
            if not known or cursor.stream in reaching
        ]

    def newest(self, cursor: Cursor, first: int, last: int, rows: int) -> Span | None:
        """Return a span of positions with the newest messages of a cursor's stream: see `Slab.newest`."""
        slab = self._generations.slab(cursor.generation)
        return slab.newest(cursor.stream, cursor.filter, first, last, rows)

    def next(
        self,
        cursor: Cursor,
        *,
        rows: int,
        size: int,
        bound: int | None = None,
        deadline: float | None = None,
        final: bool = False,
        columns: frozenset[str] = ALL_FIELDS,
    ) -> ReadResult:
        """Return the next batch of a cursor.

        See `ReadLimits` for ``rows``, ``size`` in bytes, ``deadline`` and ``columns``.

        ``bound`` is the highest position to return, if it is below the watermark. ``final`` promises that the caller
        never reads beyond ``bound``; in a read-only view, the read then includes the layout's current epoch. Raises
        `UnwantedError` if the read was cancelled (`topicstore.runtime.cancelling.while_wanted`).
        """
        check_wanted()
        generation = cursor.generation
        while True:
            slab = self._generations.slab(generation)
            try:
                return self._next(slab, cursor, rows, size, bound, deadline, final, columns)
            except (EngineError, GenerationArchivedError):
                record = self._generations.records.get(generation)
                if self._generations.slab(generation) is slab or record is None or record.archive is not None:
                    raise
                # Otherwise the shard was reopened after a failed write: read again, from the new slab.

    def _next(
        self,
        slab: Slab,
        cursor: Cursor,
        rows: int,
        size: int,
        bound: int | None,
        deadline: float | None,
        final: bool,
        columns: frozenset[str],
    ) -> ReadResult:
        writer, generation = self._writer, cursor.generation
        record = self._generations.records.get(generation)
        bound = writer.watermark if bound is None else min(bound, writer.watermark)
        if record is not None and record.sealed is None and not (final and writer.read_only):
            bound = self._visible(generation, cursor.stream, bound)
        limits = ReadLimits(rows=rows, bytes=size, bound=bound, deadline=deadline, columns=columns)
        started = time.perf_counter()
        try:
            step = slab.next(cursor.stream, cursor.filter, cursor.place, limits)
        except (KeyError, ValueError) as bad:
            raise InvalidCursorError(f"the cursor's place is not of this stream: {bad}") from bad
        except CorruptionError:
            self._check_still(generation, slab)  # a generation that was dropped meanwhile isn't damaged
            raise
        self._check_still(generation, slab)  # a slab that was replaced during the read may lack messages
        seconds = time.perf_counter() - started
        writer.counters.reads += 1
        writer.counters.read_messages += len(step.batch)
        writer.counters.read_seconds += seconds
        writer.latencies.read.observe(seconds)
        end = None if record is None else record.last_position
        ended = step.exhausted and end is not None and bound >= end
        return ReadResult(
            batch=step.batch, cursor=cursor.advance(step.place), end_of_stream=ended, caught_up=step.exhausted
        )

    def _check_still(self, generation: int, slab: Slab) -> None:
        """Raise if a generation was dropped or archived while its slab was read."""
        if self._generations.slab(generation) is not slab:
            raise GenerationArchivedError(
                f"generation {generation} of shard {self._writer.number} was archived while it was read; begin again"
            )

    def _visible(self, generation: int, stream: int, bound: int) -> int:
        """Return the highest position, at most ``bound``, that a read of the current generation's stream may return."""
        slab = self._generations.slab(generation)
        if slab.visible(stream, self._writer.watermark) < bound:
            self.end_epoch(generation, bound, wait=False)
        return min(bound, slab.visible(stream, self._writer.watermark))

    def heads(self, generation: int, topic_filter: TopicFilter, first: int, last: int) -> Iterator[Heads]:
        """Yield the metadata (`Heads`) of the matching messages of a generation at positions ``first`` to ``last``.

        The generation's slab must implement `Slab.heads`. Raises `UnwantedError` if the read was cancelled
        (`topicstore.runtime.cancelling.while_wanted`), and the errors of `next`.
        """
        while first <= last:
            slab = self._generations.slab(generation)
            try:
                for heads in slab.heads(topic_filter, first, last):
                    check_wanted()
                    self._check_still(generation, slab)  # a slab that was replaced during the read may lack messages
                    first = heads.last + 1
                    self._writer.counters.reads += 1
                    self._writer.counters.read_messages += len(heads.positions)
                    yield heads
                return
            except CorruptionError:
                self._check_still(generation, slab)  # a generation that was dropped meanwhile isn't damaged
                raise
            except (EngineError, GenerationArchivedError):
                record = self._generations.records.get(generation)
                if self._generations.slab(generation) is slab or record is None or record.archive is not None:
                    raise
                # Otherwise the shard was reopened after a failed write: read on, from the new slab.

    def check_reached(self, position: int, epoch: int = 1) -> None:
        """Raise `PlaceAheadError` if ``position`` is above the highest position that the shard ever assigned.

        A position in the same epoch (of ``epoch`` positions) is accepted, because versions of topicstore differ in
        whether they commit the epoch's end. Raises `ShardElsewhereError` if this site of a cluster has no whole copy.
        """
        last = self._writer.tail.last_position
        if position > last | (epoch - 1):
            raise self._writer.elsewhere_error() if self._writer.elsewhere else self._ahead_error(position, last)

    def _ahead_error(self, position: int, last: int) -> PlaceAheadError:
        return PlaceAheadError(
            f"the place is at position {position} ({format_time(time_of(position))}) of shard "
            f"{self._writer.number}, which ends at {last} ({format_time(time_of(last))}): the database has lost "
            "what was read there, as when it was restored from an older copy; begin again at a time, or from now on"
        )

    # --- epochs ---

    def end_epoch(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """Make everything up to ``position`` visible to readers of a generation.

        If the position lies in the layout's current epoch, that epoch must end first. With ``wait``, wait for its end,
        at most for the length of an epoch after ``since`` (by `time.monotonic`; None means the time of the call).
        Without ``wait``, do nothing if the epoch isn't over.
        """
        writer, epoch = self._writer, self._generations.slab(generation).epoch
        if epoch == 1 or writer.read_only or not writer.owned:
            return  # the log decides where a replica's epochs end
        latest = (time.monotonic() if since is None else since) + time_of(epoch) / 1e6
        with writer.lock:
            while generation == writer.generation and self._is_open_locked(position, epoch):
                seconds = self._left_locked(epoch, latest)
                if seconds <= 0 and (wait or writer.failure is None) and self._submit_end_locked(epoch):
                    break
                if not wait:
                    return
                writer.check_writable()
                writer.moved_on.wait(min(max(seconds, 0), _LOOK) or _LOOK)
        if wait or writer.failure is None:
            writer.finish_all()  # another thread may have committed the epoch's end, but not made it visible yet

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its fsync and its layout's epoch."""
        if self._writer.policy.durability == "sync":
            self._writer.flush()
        record, _ = self._generations.with_slabs()[-1]
        self.end_epoch(record.number, position, wait=True)

    def _is_open_locked(self, position: int, epoch: int) -> bool:
        """Return whether a position lies in the current epoch, and the epoch's end isn't committed yet."""
        proposed = self._writer.proposed
        last = (proposed[-1] if proposed else self._writer.tail).last_position
        end = last | (epoch - 1)
        return end - epoch < position and last < end

    def _left_locked(self, epoch: int, latest: float) -> float:
        """Return the seconds until the current epoch ends, at the first of these times.

        * The clock passes the epoch's end, if positions follow the clock.
        * One epoch length has passed since the last commit.
        * The time ``latest``, one epoch length after the wait began.
        """
        lasted = min(self._writer.last_commit + time_of(epoch) / 1e6, latest) - time.monotonic()
        if self._writer.policy.timestamps != "commit":
            return lasted
        after = (self._writer.tail.last_position | (epoch - 1)) + 1
        return min(lasted, (time_of(after) - self._writer.policy.now()) / 1e6)

    def _submit_end_locked(self, epoch: int) -> bool:
        """Submit the end of the current epoch; return False if the log is full."""
        pending = PendingWrite(self._writer)
        self._writer.prepare_locked(pending)
        pending.last_position |= epoch - 1
        try:
            self._writer.submit_locked(pending)
        except LogFullError:
            return False
        return True
