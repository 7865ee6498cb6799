"""A shard: one engine, its generations, and the one lock under which messages get positions.

Positions are assigned and committed under the lock, so no reader sees a position before a
lower one. Readers see up to the watermark, which moves after the commit, or, under
``sync``, after the flush: never what power loss could take back. Flushes are shared: one
serves every batch written before it began (group commit).

Layouts that order messages by something else within an epoch hide the epoch that is being
written. A reader who wants to see all there is has it ended (`Shard.end_epoch`): once it is over,
the shard's last position moves to its end, in a commit of its own, so that nothing can come
before what was read, whatever the clock does later.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from .contract.batch import MessageBatch
from .contract.columns import Column, Constant, to_iterable, to_list
from .contract.engine import GENERATION_END, Engine, Reader, WriteBatch
from .contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    GenerationArchivedError,
    GenerationDroppedError,
    GenerationError,
    InvalidIteratorError,
    LateMessageError,
    NewerFormatError,
    PluginError,
    ReadOnlyDatabaseError,
    ShardReadOnlyError,
    TimestampAheadError,
)
from .contract.layout import CompactStep, Damage, Layout, Slab, SlabStep
from .contract.options import options_dict
from .contract.positions import MAX_TIME, Times, commit_positions, late_rows, message_positions, span_text, time_of
from .contract.state import StateWrite
from .contract.topics import TopicFilter
from .counters import ShardCounters
from .damaged import DamagedSlab
from .generations import (
    ARCHIVED_VERSION,
    GenerationRecord,
    Tail,
    load_generations,
    load_tail,
    put_generation,
    put_tail,
    ranges_of,
    remove_messages,
)
from .locking import FairLock, owned
from .state import stage
from .tiering import Archives

__all__ = ["MakeLayout", "Policy", "Prepared", "Shard", "check_local"]

_LOOK = 1.0
"""Seconds after which who waits for the end of an epoch looks whether the shard has failed: a flush can't tell it."""

MakeLayout = Callable[[str, dict[str, Any]], Layout]


@attrs.frozen(kw_only=True)
class Policy:
    """What the manifest says of writing."""

    durability: str
    timestamps: str
    late: str
    max_skew: float
    clock: Callable[[], int]
    """Returns the present as microseconds since the epoch."""


@attrs.frozen
class Prepared:
    """A batch that may be committed."""

    batch: MessageBatch
    """With positions and times."""
    tail: Tail
    write: WriteBatch
    lifted: int


class Shard:
    """One shard of an open database. All methods may be called from any thread."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: Policy,
        make_layout: MakeLayout,
        archives: Archives,
        *,
        read_only: bool = False,
    ) -> None:
        self.number = number
        self.counters = ShardCounters()
        self._engine = engine
        self._policy = policy
        self._make_layout = make_layout
        self._archives = archives
        self._read_only = read_only
        """Whether the engine is a view of one moment, to which nothing is added."""
        self._lock = FairLock()
        self._moved_on = threading.Condition(self._lock)
        """Told when the last position moves."""
        self._rewriting = FairLock()
        """Held, before `_lock`, by who replaces what is stored: deletes and compactions keep out of each other."""
        self._last_commit = time.monotonic()
        self._flush_lock = FairLock()
        self._closed = False
        self._owner = os.getpid()
        self._failure: BaseException | None = None
        try:
            self._tail = load_tail(engine)
            self._records = {record.number: record for record in load_generations(engine)}
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
        self._slabs: dict[int, Slab] = {}
        self._live: list[tuple[GenerationRecord, Slab]] = []
        """The live generations, replaced as a whole, so that readers needn't wait for a writer."""
        self._watermark = self._tail.last_position
        self._written = 1  # engine writes: all before the opening count as one, whether on disk or not
        self._flushed = 0
        self._end = (1, self._watermark)  # the last write and its position, set in one step
        if read_only:
            self._flushed = 1
        else:
            self.settle(1)
        self._open_slabs()
        if not read_only:
            self._warn_of_future()

    def _open_slabs(self) -> None:
        for number, record in sorted(self._records.items()):
            if not record.dropped:
                self._slabs[number] = self._open_slab(record)
            elif not self._read_only:
                self._remove(number)
        self._list_live()

    def _list_live(self) -> None:
        self._live = [(record, self._slabs[n]) for n, record in sorted(self._records.items()) if n in self._slabs]

    def _open_slab(self, record: GenerationRecord) -> Slab:
        if record.archive is not None:
            return self._archives.open(self.number, record)
        layout = self._make_layout(record.layout, record.options)
        if record.format > layout.format:
            raise NewerFormatError(
                f"generation {record.number} has format {record.format} of layout {record.layout!r}; "
                f"the one installed reads up to {layout.format}"
            )
        try:
            return self._open_with(layout, record.layout, record.number)
        except CorruptionError as bad:
            place = f"shard {self.number}, generation {record.number}"
            return DamagedSlab(CorruptionError(bad.reason, f"{place}, {bad.place}" if bad.place else place))

    def _open_with(self, layout: Layout, name: str, generation: int) -> Slab:
        slab = layout.open(self._engine, self.number, generation)
        if not isinstance(slab, Slab):
            raise PluginError(f"layout {name!r}: open returned a {type(slab).__name__}, not a Slab")
        return slab

    def _warn_of_future(self) -> None:
        ahead = self.ahead()
        if ahead > 0:
            warnings.warn(
                f"shard {self.number}: its last position lies {span_text(ahead)} in the future; "
                "messages committed until then get positions right behind it",
                stacklevel=6,
            )

    @property
    def lock(self) -> FairLock:
        """The lock of everything that writes."""
        return self._lock

    @property
    def rewriting(self) -> FairLock:
        """The lock of deletes and compactions: to who holds it, what is sealed stays as it is."""
        return self._rewriting

    # --- looking ---

    @property
    def watermark(self) -> int:
        """The highest position that readers may see."""
        return self._watermark

    @property
    def last_position(self) -> int:
        """The highest position given out."""
        return self._tail.last_position

    @property
    def lifted(self) -> int:
        """Late messages lifted since the database was created."""
        return self._tail.lifted

    @property
    def failure(self) -> str | None:
        """Why the shard takes no writes, or None."""
        return None if self._failure is None else str(self._failure) or type(self._failure).__name__

    def _now(self) -> int:
        """Return the present; a clock before 1970 or behind 2255 counts as their ends."""
        return min(max(self._policy.clock(), 0), MAX_TIME)

    def ahead(self) -> int:
        """Return by how many microseconds the last position lies in the future; 0 if it doesn't."""
        # Without this allowance every store would look ahead by its own batch's counters.
        return max(0, time_of(self._tail.last_position) - self._now() - 1_000)

    def reader(self) -> Reader:
        """Return the engine, to read state from."""
        self._check_open()
        return self._engine

    def generations(self) -> list[GenerationRecord]:
        """Return the live generations, oldest first, with the counts of the current one filled in."""
        with self._lock:
            tail = self._tail
            return [
                record
                if record.sealed is not None
                else msgspec.structs.replace(record, messages=tail.messages, live_bytes=tail.live_bytes)
                for _, record in sorted(self._records.items())
                if not record.dropped
            ]

    @property
    def live(self) -> list[tuple[GenerationRecord, Slab]]:
        """The live generations, oldest first; another list whenever they change. Not to be changed."""
        return self._live

    def slabs(self) -> list[tuple[GenerationRecord, Slab]]:
        """Return the live generations, oldest first, with their slabs, as of one moment. Never waits for a writer.

        The counts of the current one are not filled in; `generations` does that.
        """
        live = self._live
        self._check_open()  # behind it: a close since then emptied the list
        return list(live)

    @property
    def current(self) -> int:
        """The number of the generation that is written; 0 before the first was added."""
        return max(self._records, default=0)

    def slab(self, generation: int) -> Slab:
        """Return a live generation's slab.

        Raises `GenerationDroppedError`, or `InvalidIteratorError` if there never was one of that number.
        """
        self._check_open()
        slab = self._slabs.get(generation)
        if slab is None:
            self._check_open()  # again: a close since then emptied the dictionary
            if 0 < generation <= self.current:
                raise GenerationDroppedError(f"generation {generation} of shard {self.number} was dropped")
            raise InvalidIteratorError(f"shard {self.number} has no generation {generation}")
        return slab

    # --- writing ---

    def prepare(self, batch: MessageBatch, state: Sequence[StateWrite]) -> Prepared:
        """Check a batch and its state, and give it positions; nothing has changed yet.

        The caller holds `lock` from here until `commit`, for all shards of its batch, so that a
        message refused by one shard keeps the whole batch out of all of them. Then come `encode`
        for all and `commit` for all.
        """
        self.check_writable()
        slab = self._slabs[self.current]
        if len(batch) and isinstance(slab, DamagedSlab):
            raise slab.error
        write = WriteBatch()
        stage(state, self._engine, write)
        placed, tail = self._place(batch)
        return Prepared(placed, tail, write, tail.lifted - self._tail.lifted)

    def encode(self, prepared: Prepared) -> Prepared:
        """Add to the batch's write what keeps its messages; nothing is committed yet.

        Whatever interrupts it closes the shard to writes: the layout's memory may be half changed.
        """
        if not len(prepared.batch):
            return prepared
        write = prepared.write
        before = write.size
        try:
            self._slabs[self.current].store(prepared.batch, write)
            live_bytes = prepared.tail.live_bytes + write.size - before
            tail = msgspec.structs.replace(prepared.tail, live_bytes=live_bytes)
            put_tail(write, tail)
        except BaseException as error:
            self._fail(error)
            raise
        return attrs.evolve(prepared, tail=tail)

    def commit(self, prepared: Prepared) -> int:
        """Commit messages and state in one engine write; return the ticket for `settle`."""
        rows = len(prepared.batch)
        slab = self._slabs[self.current]
        ticket = self._commit(prepared.write, prepared.tail, slab.committed if rows else bool)
        self.counters.batches += 1
        self.counters.messages += rows
        return ticket

    def _place(self, batch: MessageBatch) -> tuple[MessageBatch, Tail]:
        """Give a batch its positions and times; return it and the tail that follows."""
        rows, tail, now = len(batch), self._tail, self._now()
        if not rows:
            return batch, tail
        timestamps = _fill(batch.timestamps, now)
        lifted = 0
        last_time = tail.last_time
        if self._policy.timestamps == "commit":
            positions = commit_positions(tail.last_position, now, rows)
        else:
            times, lifted = self._times(batch.timestamps, timestamps, now)
            positions = message_positions(tail.last_position, times)
            last_time = max(last_time, int(times.max()))
        placed = batch.placed(positions, timestamps, self.number)
        return placed, msgspec.structs.replace(
            tail,
            last_position=int(positions[-1]),
            last_time=last_time,
            lifted=tail.lifted + lifted,
            messages=tail.messages + rows,
        )

    def _times(self, given: Column, filled: Column, now: int) -> tuple[Times, int]:
        """Return the times that make positions, and how many are late.

        A message without a time is never late: it follows what came before it.
        """
        if isinstance(filled, np.ndarray):
            times = filled.astype(np.int64)
        else:
            times = np.fromiter(to_iterable(filled), np.int64, len(filled))
        self._refuse_ahead(times, now)
        newest = np.maximum.accumulate(np.maximum(times, self._tail.last_time))
        if isinstance(given, Constant):
            times = newest if given.value is None else times
        elif given is not filled:  # some were filled in
            absent = np.fromiter((value is None for value in to_iterable(given)), np.bool_, len(times))
            times = np.where(absent, newest, times)
        late = np.flatnonzero(late_rows(self._tail.last_time, times))
        if len(late) and self._policy.late == "raise":
            first = int(late[0])
            raise LateMessageError(
                f"its time lies {span_text(int(newest[first]) - int(times[first]))} before that of a message "
                f"stored before it in shard {self.number}",
                first,
            )
        return times, len(late)

    def _refuse_ahead(self, times: Times, now: int) -> None:
        ahead = np.flatnonzero(times > now + int(self._policy.max_skew * 1e6))
        if len(ahead):
            first = int(ahead[0])
            raise TimestampAheadError(
                f"its time lies {span_text(int(times[first]) - now)} ahead of the clock; "
                f"{self._policy.max_skew:g} s are allowed",
                first,
            )

    def _commit(self, write: WriteBatch, tail: Tail, then: Callable[[], object] = bool) -> int:
        """Apply a write, and ``then`` what memory must know of it.

        Returns the ticket with which `settle` makes it durable and visible. Whatever interrupts
        it, Ctrl-C too, closes the shard to writes, because memory may lag behind the engine.
        """
        started = time.perf_counter()
        try:
            self._engine.write(write)
            then()
            if tail.last_position != self._tail.last_position:
                self._last_commit = time.monotonic()
                self._moved_on.notify_all()
            self._tail = tail
            self._written += 1
            self._end = (self._written, tail.last_position)
        except BaseException as error:
            self._fail(error)
            raise
        self.counters.commit_seconds += time.perf_counter() - started
        self.counters.bytes += write.size
        if self._policy.durability == "commit":
            self._watermark = tail.last_position
        return self._written

    def settle(self, ticket: int) -> None:
        """The second half of every write, without the lock, so that others can join the flush.

        Under ``sync``, return when the write of this ticket is on disk, and let readers see it.
        """
        if self._policy.durability == "sync":
            self._flush(ticket)

    def _flush(self, ticket: int) -> None:
        """Flush unless it was done since. Takes no other lock, because who holds that may wait for this."""
        with self._flush_lock:
            if self._flushed >= ticket:
                return  # a flush that began after this write has served it
            self.check_writable()
            written, position = self._end
            started = time.perf_counter()
            try:
                self._engine.flush_log()
            except BaseException as error:
                self._fail(error)
                raise
            self.counters.flushes += 1
            self.counters.flush_seconds += time.perf_counter() - started
            self._flushed = written
            if self._policy.durability == "sync":  # else it has moved on meanwhile
                self._watermark = position

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self._flush(self._end[0])

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state alone."""
        with self._lock:
            self.check_writable()
            write = WriteBatch()
            stage(writes, self._engine, write)
            ticket = self._commit(write, self._tail)
        self.settle(ticket)

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> int:
        """Remove matching messages with positions from ``first`` to ``last``; return how many."""
        deleted = 0
        last = min(last, self._watermark)
        for record in self.generations():
            if record.first_position <= last and (record.last_position is None or record.last_position >= first):
                deleted += self._delete_in(record.number, topic_filter, first, last)
        return deleted

    def archived_in(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the archived generations that have messages from position ``first`` to ``last``.

        Each with its last position.
        """
        return [
            (record.number, end)
            for record in self.generations()
            if record.archive is not None and record.messages and (end := record.last_position) is not None
            if record.first_position <= last and end >= first
        ]

    def _delete_in(self, generation: int, topic_filter: TopicFilter, first: int, last: int) -> int:
        deleted = 0
        try:
            slab = self.slab(generation)
        except GenerationDroppedError:
            return 0  # dropped since it was listed: nothing is left to delete
        if not slab.cover(topic_filter):
            return 0
        with self._rewriting:
            check_local(self.archived_in(first, last))  # again: it may have been archived since
            steps = slab.delete(topic_filter, first, last)
            while True:
                with self._lock:  # a step at a time, so that writers get their turn in between
                    self.check_writable()
                    step = next(steps, None) if generation in self._slabs else None  # dropped in between
                    if step is None:
                        return deleted
                    if not step.write:
                        continue
                    ticket = self._replace(generation, step.write, step.messages, step.freed)
                    self.counters.deleted += step.messages
                self.settle(ticket)
                deleted += step.messages

    def _replace(self, generation: int, write: WriteBatch, messages: int, freed: int) -> int:
        """Commit a write that takes messages and bytes away, off the books too; return its ticket."""
        record, tail = self._records[generation], self._tail
        books: Tail | GenerationRecord = tail if record.sealed is None else record
        books = msgspec.structs.replace(books, messages=books.messages - messages, live_bytes=books.live_bytes - freed)
        if isinstance(books, Tail):
            put_tail(write, books)
            return self._commit(write, books)
        put_generation(write, books)

        def adopt() -> None:
            self._records[generation] = books
            self._list_live()

        return self._commit(write, tail, adopt)

    # --- compacting ---

    def backlog(self) -> int:
        """Return how many messages wait to be compacted."""
        messages = {record.number: record.messages for record in self.generations()}
        return sum(slab.backlog(messages.get(record.number, 0)) for record, slab in self.slabs())

    def compact(self, *, whole: bool, stop: Callable[[], bool] = bool) -> int:
        """Compact the generations, a step at a time, until ``stop`` says so; return the messages rewritten.

        ``whole``: everything stored before the call, whatever the work.
        """
        rewritten = 0
        for record, slab in self.slabs():
            bound = self._watermark if record.last_position is None else record.last_position
            steps = slab.compact(bound, whole=whole)
            while not stop():
                messages = self._compact_step(record.number, slab, steps)
                if messages is None:
                    break
                rewritten += messages
        return rewritten

    def _compact_step(self, generation: int, slab: Slab, steps: Iterator[CompactStep]) -> int | None:
        """Make the next step beside readers and writers, and commit it; None after the last."""
        with self._rewriting:
            try:
                self.check_writable()
                if self._slabs.get(generation) is not slab:
                    return None  # dropped or archived
                step = next(steps, None)
            except (CorruptionError, DatabaseClosedError):
                if generation not in self._slabs:
                    return None  # dropped under it
                raise
            if step is None:
                return None
            with self._lock:
                self.check_writable()
                if generation not in self._slabs:
                    return None
                ticket = self._replace(generation, step.write, 0, step.freed)
                self.counters.compacted += step.messages
            self.settle(ticket)
        return step.messages

    def reclaim(self) -> None:
        """Give back the disk space of what was replaced. May take long."""
        for record in self.generations():
            for keyspace, start, end in ranges_of(record.number):
                self._engine.reclaim(keyspace, start, end)

    # --- epochs ---

    def end_epoch(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """See that readers of a generation may see everything up to ``position``.

        If that lies in the epoch being written, it must be over: with ``wait``, return when it is, at
        most an epoch after ``since``, of `time.monotonic`, or the call; else do nothing while it isn't.
        """
        epoch = self.slab(generation).epoch
        if epoch == 1 or self._read_only:
            return
        latest = (time.monotonic() if since is None else since) + time_of(epoch) / 1e6
        with self._moved_on:
            while generation == self.current and self._in_open_epoch(position, epoch):
                seconds = self._left_of_epoch(epoch, latest)
                if seconds <= 0 and (wait or self._failure is None):
                    self._commit_end(epoch)
                    break
                if not wait:
                    return
                self.check_writable()
                self._moved_on.wait(min(seconds, _LOOK))
            ticket = self._written
        if wait or self._failure is None:
            self.settle(ticket)  # somebody else may have ended it, and not be done with that

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its flush, and its epoch."""
        if self._policy.durability == "sync":
            self.flush()
        record, _ = self.slabs()[-1]
        self.end_epoch(record.number, position, wait=True)

    def _in_open_epoch(self, position: int, epoch: int) -> bool:
        """Say whether a position lies in the epoch being written."""
        end = self._tail.last_position | (epoch - 1)
        return end - epoch < position and self._tail.last_position < end

    def _left_of_epoch(self, epoch: int, latest: float) -> float:
        """Return the seconds until the epoch being written is over.

        By the clock, where positions go by it; or when it has lasted for its length since the last
        commit; or at the latest, which is its length since somebody began to wait.
        """
        lasted = min(self._last_commit + time_of(epoch) / 1e6, latest) - time.monotonic()
        if self._policy.timestamps != "commit":
            return lasted
        behind = (self._tail.last_position | (epoch - 1)) + 1
        return min(lasted, (time_of(behind) - self._now()) / 1e6)

    def _commit_end(self, epoch: int) -> None:
        self.check_writable()
        write = WriteBatch()
        tail = msgspec.structs.replace(self._tail, last_position=self._tail.last_position | (epoch - 1))
        put_tail(write, tail)
        self._commit(write, tail)

    # --- reading ---

    def next(
        self,
        generation: int,
        stream: int,
        topic_filter: TopicFilter,
        place: bytes,
        *,
        limit: int,
        limit_bytes: int,
        bound: int | None,
        deadline: float | None,
        final: bool = False,
    ) -> tuple[SlabStep, bool]:
        """Read on in a stream; return the step, and whether it ended the stream for good.

        ``final``: the caller wants what is there up to ``bound``, and won't go on behind it. Of a view of one
        moment it then gets the open epoch too.
        """
        slab, record = self.slab(generation), self._records.get(generation)
        bound = self._watermark if bound is None else min(bound, self._watermark)
        if record is not None and record.sealed is None and not (final and self._read_only):
            bound = self._visible(generation, stream, bound)
        started = time.perf_counter()
        try:
            step = slab.next(
                stream,
                topic_filter,
                place,
                limit=limit,
                limit_bytes=limit_bytes,
                bound=bound,
                deadline=deadline,
            )
        except (KeyError, ValueError) as bad:
            raise InvalidIteratorError(f"the iterator's place is not of this stream: {bad}") from bad
        except CorruptionError:
            self._check_still(generation, slab)  # if not, it is no damage
            raise
        self._check_still(generation, slab)  # if not, what was read may be less than there was
        self.counters.reads += 1
        self.counters.read_messages += len(step.batch)
        self.counters.read_seconds += time.perf_counter() - started
        end = None if record is None else record.last_position
        return step, step.exhausted and end is not None and bound >= end

    def _check_still(self, generation: int, slab: Slab) -> None:
        """Raise if a generation was dropped or archived while its slab was read."""
        if self.slab(generation) is not slab:
            raise GenerationArchivedError(
                f"generation {generation} of shard {self.number} was archived while it was read; begin anew"
            )

    def _visible(self, generation: int, stream: int, bound: int) -> int:
        """Return how far a stream of the generation being written may be read, at most to ``bound``."""
        slab = self.slab(generation)
        if slab.visible(stream, self._watermark) < bound:
            self.end_epoch(generation, bound, wait=False)
        return min(bound, slab.visible(stream, self._watermark))

    # --- generations ---

    def add_generation(self, layout_name: str, options: dict[str, Any]) -> int:
        """Seal the current generation and begin the next, in one engine write; return its number."""
        with self._lock:
            self.check_writable()
            now, number, tail = self._now(), self.current + 1, self._tail
            if number >= GENERATION_END:
                raise GenerationError(f"shard {self.number} has used up its generations")
            layout = self._make_layout(layout_name, options)
            write = WriteBatch()
            parent, sealed = self._seal(now, write)
            record = GenerationRecord(
                number=number,
                layout=layout_name,
                format=layout.format,
                options=options_dict(layout.options),
                created=now,
                first_position=tail.last_position + 1,
            )
            put_generation(write, record)
            same = sealed is not None and sealed.layout == layout_name
            heir = same and not isinstance(parent, DamagedSlab)
            layout.create(self._engine, self.number, number, parent if heir else None, write)
            tail = msgspec.structs.replace(tail, messages=0, live_bytes=0)
            put_tail(write, tail)

            def adopt() -> None:
                self._slabs[number] = self._open_with(layout, layout_name, number)
                if sealed is not None:
                    self._records[sealed.number] = sealed
                self._records[number] = record
                self._list_live()
                self._moved_on.notify_all()

            ticket = self._commit(write, tail, adopt)
        self.settle(ticket)
        return number

    def _seal(self, now: int, write: WriteBatch) -> tuple[Slab | None, GenerationRecord | None]:
        if not self.current:
            return None, None
        tail = self._tail
        sealed = msgspec.structs.replace(
            self._records[self.current],
            sealed=now,
            last_position=tail.last_position,
            messages=tail.messages,
            live_bytes=tail.live_bytes,
        )
        put_generation(write, sealed)
        return self._slabs[self.current], sealed

    def check_droppable(self, number: int) -> bool:
        """Return whether a generation is there to be dropped; False if it was dropped before.

        Raises `GenerationError` for the current one and for one that never was.
        """
        with self._lock:
            record = self._records.get(number)
            if record is None or record.dropped:
                if 0 < number < self.current:
                    return False
                raise GenerationError(f"there is no generation {number}")
            if record.sealed is None:
                raise GenerationError(f"generation {number} is the current one; add another before dropping it")
            return True

    def drop_generation(self, number: int) -> bool:
        """Make a sealed generation invisible, in one engine write; False if it was dropped before.

        `remove_dropped` then removes what it held.
        """
        with self._lock:
            self.check_writable()
            if not self.check_droppable(number):
                return False
            record = self._records[number]
            record = msgspec.structs.replace(record, dropped=True)
            write = WriteBatch()
            put_generation(write, record)

            def forget() -> None:
                self._records[number] = record
                del self._slabs[number]
                self._list_live()

            ticket = self._commit(write, self._tail, forget)
        self.settle(ticket)
        return True

    def archive(self, number: int, location: str, messages: int) -> None:
        """Read a generation from its export, and remove what is local of it, in one engine write.

        ``messages``: that the export holds. The caller has compared them. Raises `GenerationError` if
        the generation has others now, `GenerationDroppedError` if it is gone.
        """
        with self._rewriting, self._lock:
            self.check_writable()
            if not self.check_droppable(number):
                raise GenerationDroppedError(f"generation {number} of shard {self.number} was dropped")
            record = self._records[number]
            if record.messages != messages:
                raise GenerationError(f"messages of generation {number} were deleted since it was exported")
            record = msgspec.structs.replace(record, version=ARCHIVED_VERSION, archive=location, live_bytes=0)
            slab, write = self._open_slab(record), WriteBatch()
            for keyspace, start, end in ranges_of(number):
                write.delete_range(keyspace, start, end)
            put_generation(write, record)

            def adopt() -> None:
                self._records[number] = record
                self._slabs[number] = slab
                self._list_live()

            ticket = self._commit(write, self._tail, adopt)
        self.settle(ticket)
        for keyspace, start, end in ranges_of(number):
            self._engine.reclaim(keyspace, start, end)

    def remove_dropped(self) -> None:
        """Remove what dropped generations held. May be interrupted; the next open goes on."""
        with self._lock:
            dropped = [number for number, record in self._records.items() if record.dropped]
        for number in dropped:
            self._remove(number)

    def _remove(self, number: int) -> None:
        for write in remove_messages(number):
            with self._lock:
                self._commit(write, self._tail)
        with self._lock:
            self._records.pop(number, None)
        for keyspace, start, end in ranges_of(number):
            self._engine.reclaim(keyspace, start, end)

    # --- care ---

    def verify(self) -> Iterator[Damage | int]:
        """Read everything; yield each damage, and numbers of good messages."""
        for sentence in self._engine.verify():
            yield Damage(place=f"shard {self.number}", reason=sentence)
        slabs = {record.number: slab for record, slab in self.slabs()}
        for record in self.generations():
            if record.number in slabs:
                yield from self._verify(record, slabs[record.number])

    def _verify(self, record: GenerationRecord, slab: Slab) -> Iterator[Damage | int]:
        damages: list[Damage] = []
        counted, bound = 0, self._watermark
        whole = bound == self._tail.last_position  # else the record counts messages not yet to be seen
        try:
            for found in slab.verify(bound):
                if isinstance(found, Damage):
                    damages.append(found)
                else:
                    counted += found
                    yield found
        except (CorruptionError, NewerFormatError) as bad:  # nothing of the slab can be read behind it
            damages.append(Damage(place=f"shard {self.number}, generation {record.number}", reason=str(bad)))
        if self._slabs.get(record.number) is not slab:
            return  # dropped or archived meanwhile: what was missing had been removed
        yield from damages
        unchanged = whole and record in self.generations()  # else the count was of something else
        if unchanged and not damages and counted != record.messages:
            yield Damage(
                place=f"shard {self.number}, generation {record.number}",
                reason=f"holds {counted:,} messages where its record says {record.messages:,}",
            )

    def engine(self) -> Engine:
        """Return the engine, for checkpoints and sizes."""
        self._check_open()
        return self._engine

    def close(self) -> None:
        """Close the engine. May be called twice."""
        if os.getpid() != self._owner:
            return  # the engine's threads and files are the other process's
        with self._lock, self._flush_lock:
            if not self._closed:
                self._closed = True
                self._moved_on.notify_all()
                self._slabs.clear()
                self._live = []
                try:
                    self._engine.close()
                except BaseException:
                    self._closed = False  # interrupted: it may be called again
                    raise

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.counters.failures += 1
        if owned(self._lock):  # else who waits for the end of an epoch looks soon
            self._moved_on.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError("the database is closed")
        if os.getpid() != self._owner:
            raise DatabaseClosedError(f"the database was opened by process {self._owner}; a fork can't use it")

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError` if an earlier write failed, `DatabaseClosedError` after the close.

        `ReadOnlyDatabaseError` if the database was opened to be read.
        """
        self._check_open()
        if self._read_only:
            raise ReadOnlyDatabaseError("the database was opened to be read; open it without read_only to write")
        if self._failure is not None:
            raise ShardReadOnlyError(
                f"shard {self.number} takes no writes since one failed ({self.failure}); "
                "remove the cause, then close and open the database"
            ) from self._failure


def check_local(archived: Iterable[tuple[int, int]]) -> None:
    """Raise `GenerationError` if a delete reaches any archived generation; takes what `Shard.archived_in` gives."""
    found = sorted(archived)
    if found:
        numbers = ", ".join(map(str, dict(found)))
        behind = time_of(max(end for _, end in found)) + 1
        raise GenerationError(
            f"generation {numbers} lies in an export, from which nothing can be deleted: "
            f"drop it, or begin at {behind} (microseconds since the epoch)"
        )


def _fill(timestamps: Any, now: int) -> Any:
    """Put the time of the commit where a message has none."""
    if isinstance(timestamps, Constant):
        return Constant(now, len(timestamps)) if timestamps.value is None else timestamps
    if isinstance(timestamps, np.ndarray) and timestamps.dtype != object:
        return timestamps  # numbers, so none is missing
    values = to_list(timestamps)
    return [now if value is None else value for value in values] if None in values else values
