"""A shard: one engine, its generations, and one order of writes. It composes its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from topicstore.contract.batch import MessageBatch
from topicstore.contract.cursors import Cursor
from topicstore.contract.engine import Engine, Reader
from topicstore.contract.errors import CorruptionError, PlaceAheadError
from topicstore.contract.layout import Damage, Slab
from topicstore.contract.positions import time_of
from topicstore.contract.replay_plan import ShardPlan, TimeRange
from topicstore.contract.requests import ReadResult
from topicstore.contract.state import StateWrite
from topicstore.contract.times import format_time
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.locks import FairLock

from .generations import Generations, MakeLayout, OpenArchive
from .reader import Epochs, Reads, filters_of_all
from .records import GenerationRecord, Tail
from .rewriter import Decoders, Rewriting, never, verify
from .tally_tables import TallyTables
from .write_path import Prepared, WritePath
from .writer import CommitLog, NoteSynced, ShardCounters, ShardLatencies, Ticket, WriteSettings
from .zones import Span

__all__ = ["Shard"]


class Shard:
    """One shard of an open database. All methods may be called from any thread."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: WriteSettings,
        make_layout: MakeLayout,
        open_archive: OpenArchive,
        note_synced: NoteSynced,
        *,
        read_only: bool = False,
    ) -> None:
        self.number = number
        try:
            self.log = CommitLog(number, engine, policy, note_synced, read_only=read_only)
            """The commit log, through which every write goes. It is the only part that holds the engine."""
            self._generations = Generations(self.log, make_layout, open_archive)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
        self._generations.open()
        self._writes = WritePath(self.log, self._generations)
        self._epochs = Epochs(self.log, self._generations)
        self._reads = Reads(self.log, self._generations, self._epochs)
        self.tallies = TallyTables(self.log, self._generations)
        """The tables of messages counted by topic and client id."""
        self._rewriting = Rewriting(self.log, self._generations, self.tallies)

    # --- looking up ---

    @property
    def lock(self) -> FairLock:
        """The lock that everything which writes the shard takes."""
        return self.log.lock

    @property
    def rewriting(self) -> FairLock:
        """The lock of deletes and compactions. While it is held, sealed generations don't change."""
        return self._generations.rewriting

    @property
    def counters(self) -> ShardCounters:
        """The counters of work done since the shard was opened."""
        return self.log.counters

    @property
    def latencies(self) -> ShardLatencies:
        """The durations of stores and reads since the shard was opened."""
        return self.log.latencies

    @property
    def watermark(self) -> int:
        """The highest position that readers may see."""
        return self.log.watermark

    @property
    def last_position(self) -> int:
        """The highest position that was assigned."""
        return self.log.tail.last_position

    @property
    def lifted(self) -> int:
        """The number of late messages that took the next position, since the database was created."""
        return self.log.tail.lifted

    @property
    def displacement(self) -> int:
        """The most microseconds by which the time of a position is later than its message's own, if it goes by that."""
        return self._writes.displacement

    @property
    def failure(self) -> str | None:
        """The reason why the shard takes no writes, or None."""
        return self.log.failure

    def check_reached(self, position: int, epoch: int = 1) -> None:
        """Raise `PlaceAheadError` if a reader has a place after the highest position that was ever assigned.

        A place in the same epoch, of so many positions, is not refused: releases differ in whether they commit its end.
        """
        last = self.last_position
        if position > last | (epoch - 1):
            raise PlaceAheadError(
                f"the place is at position {position} ({format_time(time_of(position))}) of shard {self.number}, which "
                f"ends at {last} ({format_time(time_of(last))}): the database has lost what was read there, as when it "
                "was restored from an older copy; begin again at a time, or from now on"
            )

    def ahead(self) -> int:
        """Return the number of microseconds by which the last position lies in the future; 0 if it doesn't."""
        return self._writes.ahead()

    def reader(self) -> Reader:
        """Return the engine for reading state."""
        return self.log.open_engine()

    def engine(self) -> Engine:
        """Return the engine, for checkpoints and sizes."""
        return self.log.open_engine()

    # --- writing ---

    def recover(self, open_again: Callable[[Callable[[], object]], object]) -> bool:
        """Take writes again after one failed; return False, and do nothing, if the shard takes writes.

        ``open_again`` opens the engine again, and calls its argument, before readers see the engine: see
        `LastingEngine.open_again`. Raises its errors, and those of the flush of what is there. Then the shard still
        takes no writes. Nobody writes meanwhile, and what was prepared before isn't committed.
        """
        log, generations = self.log, self._generations

        def read_again() -> None:
            generations.open_again_locked()
            self._writes.open_again_locked()

        with generations.rewriting, log.lock:
            log.check_open()
            if log.failure is None:
                return False
            open_again(partial(log.begin_again_locked, read_again))
        log.flush()
        generations.remove_dropped()
        generations.reclaim_removed()
        return True

    def prepare(self, batch: MessageBatch, state: Sequence[StateWrite]) -> Prepared:
        """Check a batch and its state, and assign positions: see `topicstore.shard.write_path`."""
        return self._writes.prepare(batch, state)

    def encode(self, prepared: Prepared) -> Prepared:
        """Add the stored form of the messages to the batch's write; nothing is committed yet."""
        return self._writes.encode(prepared)

    def commit(self, prepared: Prepared) -> Ticket:
        """Commit messages and state in one engine write; return the ticket for `settle`."""
        return self._writes.commit(prepared)

    def store_again(self, batch: MessageBatch, end: Tail) -> None:
        """Store messages at the positions that they have, in one engine write, and continue after ``end``."""
        self._writes.store_again(batch, end)

    def settle(self, ticket: Ticket) -> None:
        """Make the write of a ticket durable and visible. The lock must not be held, so that writes share flushes."""
        self.log.settle(ticket)

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state writes without messages."""
        self._writes.write_state(writes)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self.log.flush()

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError`, `ReadOnlyDatabaseError` or `DatabaseClosedError` if the shard takes no writes."""
        self.log.check_writable()

    # --- reading ---

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
        """Return a plan that reads the matching messages from ``first`` to ``bound``: see `Reads.plan`."""
        return self._reads.plan(database, topic_filter, first, bound, since=since, timestamps=timestamps)

    def spans(self, timestamps: TimeRange, first: int, last: int) -> list[Span]:
        """Return spans of positions from ``first`` to ``last`` outside of which no message has any of these times."""
        return self._reads.spans(timestamps, first, last)

    def zones(self, timestamps: TimeRange) -> tuple[int, int]:
        """Return the number of zones that may have messages of these times, and the number of all zones."""
        return self._reads.zones(timestamps)

    def zone_ends(self, generation: int) -> list[int]:
        """Return the last position of each full zone of a generation, in order."""
        return self._reads.zone_ends(generation)

    def next(
        self,
        cursor: Cursor,
        *,
        rows: int,
        size: int,
        bound: int | None = None,
        deadline: float | None = None,
        final: bool = False,
    ) -> ReadResult:
        """Return the next batch of a cursor: see `Reads.next`."""
        return self._reads.next(cursor, rows=rows, size=size, bound=bound, deadline=deadline, final=final)

    def end_epoch(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """Make everything up to ``position`` visible to readers of a generation: see `Epochs.end`."""
        self._epochs.end(generation, position, wait=wait, since=since)

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its flush, and its epoch."""
        self._epochs.await_visible(position)

    # --- generations ---

    @property
    def current(self) -> int:
        """The number of the generation that is being written; 0 before the first was added."""
        return self._generations.current

    @property
    def live(self) -> list[tuple[GenerationRecord, Slab]]:
        """The live generations, oldest first. It is a new list whenever they change, and must not be modified."""
        return self._generations.live

    def generations(self) -> list[GenerationRecord]:
        """Return the live generations, oldest first, with the counts of the current one filled in."""
        return self._generations.listed()

    def slabs(self) -> list[tuple[GenerationRecord, Slab]]:
        """Return the live generations with their slabs, at one moment. Never waits for a writer."""
        return self._generations.with_slabs()

    def slab(self, generation: int) -> Slab:
        """Return a live generation's slab. Raises `GenerationDroppedError` or `InvalidCursorError` if it isn't live."""
        return self._generations.slab(generation)

    def archived_in(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the archived generations with messages from ``first`` to ``last``: see `Generations.archived_in`."""
        return self._generations.archived_in(first, last)

    def add_generation(self, layout_name: str, options: dict[str, Any]) -> int:
        """Seal the current generation and begin the next, in one engine write; return its number."""
        return self._generations.add(layout_name, options)

    def check_droppable(self, number: int) -> bool:
        """Return whether a generation can be dropped; False if it was dropped before."""
        return self._generations.check_droppable(number)

    def drop_generation(self, number: int) -> bool:
        """Make a sealed generation invisible, in one engine write. Returns False if it was dropped before."""
        return self._generations.drop(number)

    def archive(self, number: int, location: str, messages: int) -> None:
        """Have a generation read from its export, and remove its local messages, in one engine write."""
        self._generations.archive(number, location, messages)

    def remove_dropped(self) -> None:
        """Remove the messages of dropped generations. It may be interrupted; the next open continues."""
        self._generations.remove_dropped()

    def reclaim_removed(self) -> None:
        """Free the disk space of generations whose messages were removed. May take long."""
        self._generations.reclaim_removed()

    def removing_bytes(self) -> int:
        """Return the bytes of values of dropped generations that were not removed yet."""
        return self._generations.removing_bytes()

    # --- maintenance ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> int:
        """Remove the matching messages with positions from ``first`` to ``last``; return their number."""
        return self._rewriting.delete(topic_filter, first, last)

    def delete_local(
        self, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[TopicFilter]
    ) -> int:
        """Remove messages that don't match ``spare`` and aren't archived, of all topics if the filter is None.

        Returns their number.
        """
        text = None if topic_filter is None else (topic_filter.text,)
        return self._rewriting.delete_local(lambda slab: text or filters_of_all(slab), first, last, spare)

    def backlog(self) -> int:
        """Return the number of messages that wait to be compacted."""
        return self._rewriting.backlog()

    def compact(self, *, whole: bool, stop: Callable[[], bool] = never) -> int:
        """Compact the generations until ``stop`` returns True; return the number of messages rewritten."""
        return self._rewriting.compact(whole=whole, stop=stop)

    def reclaim(self) -> None:
        """Free the disk space of values that were replaced. May take long."""
        self._rewriting.reclaim()

    def verify(self, decoders: Decoders) -> Iterator[Damage | int]:
        """Read everything; yield each damaged place, and the numbers of good messages."""
        return verify(self.log, self._generations, decoders)

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self.log.close(self._generations.forget)
