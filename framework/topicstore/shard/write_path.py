"""Storing a batch in a shard: assigning positions and times, making keys and values, and committing them.

The caller holds the log's lock during all three steps, for all shards of its batch. It calls `WritePath.prepare` for
all shards, then `WritePath.encode` for all, then `WritePath.commit` for all, so that nothing of a batch is stored if
one shard refuses a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import attrs
import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Column, Constant, to_integers, to_iterable, to_list
from topicstore.contract.engine import WriteBatch
from topicstore.contract.errors import LateMessageError, TimestampAheadError
from topicstore.contract.positions import Times, commit_positions, late_rows, message_positions, span_text, time_of
from topicstore.contract.state import StateWrite
from topicstore.runtime.locks import check_not_owned
from topicstore.runtime.warning import warn_caller

from .damaged_slab import DamagedSlab
from .generations import Generations
from .records import Tail
from .state import stage
from .writer import CommitLog, Ticket, displacement_of, load_displacement, put_displacement
from .zones import Zone, fill, put_zone

__all__ = ["Prepared", "WritePath"]

_SET_BACK = 1_000_000
"""Microseconds by which the clock must be behind the last position to be told: less is common when it is adjusted."""
_MANY = 64
"""The number of messages from which an array of their times is made once and shared."""


@attrs.frozen
class Prepared:
    """A batch that is ready to be committed."""

    batch: MessageBatch
    """The messages, with positions and times."""
    tail: Tail
    write: WriteBatch
    lifted: int


class WritePath:
    """The write operations of one shard."""

    def __init__(self, log: CommitLog, generations: Generations) -> None:
        self._log = log
        self._generations = generations
        self.displacement = 0
        """The most microseconds by which the time of a position is later than its message's own; 0 as long as positions
        go by the time of storing. Guarded by the log's lock; reading it needs no lock."""
        self.open_again_locked()
        self._behind = False
        """Whether the clock was behind the positions at the last store. Guarded by the log's lock."""
        if not log.read_only and self.ahead() > 0:
            self._behind = True
            self._warn_of_clock()

    def open_again_locked(self) -> None:
        """Read again what is stored of the state in memory, which is ahead of it if a write failed."""
        self.displacement = load_displacement(self._log.engine)

    def _warn_of_clock(self) -> None:
        warn_caller(
            f"shard {self._log.number}: its last position lies {span_text(self.ahead())} in the future; "
            "messages committed until then get positions right after it",
            UserWarning,
        )

    def _tell_if_ahead(self) -> None:
        """Warn when the clock is found to have been set back, once until it has caught up."""
        before, self._behind = self._behind, self.ahead() >= _SET_BACK
        if self._behind and not before:
            with suppress(UserWarning):  # where warnings are errors, messages are stored nevertheless
                self._warn_of_clock()

    def ahead(self) -> int:
        """Return the number of microseconds by which the last position lies in the future; 0 if it doesn't."""
        # Without this allowance every batch would seem to lie in the future because of its own counters.
        return max(0, time_of(self._log.tail.last_position) - self._log.policy.now() - 1_000)

    def prepare(self, batch: MessageBatch, state: Sequence[StateWrite]) -> Prepared:
        """Check a batch and its state, and assign positions; nothing is changed yet."""
        log = self._log
        log.check_writable()
        slab = self._generations.slabs[self._generations.current]
        if len(batch) and isinstance(slab, DamagedSlab):
            raise slab.error
        write = WriteBatch()
        stage(state, log.engine, write)
        placed, tail = self._place(batch, write)
        return Prepared(placed, tail, write, tail.lifted - log.tail.lifted)

    def encode(self, prepared: Prepared) -> Prepared:
        """Add the stored form of the messages to the batch's write; nothing is committed yet.

        Any exception closes the shard to writes, because the layout's memory may be half changed.
        """
        if not len(prepared.batch):
            return prepared
        write = prepared.write
        before = write.size
        try:
            self._generations.slabs[self._generations.current].store(prepared.batch, write)
            live_bytes = prepared.tail.live_bytes + write.size - before
            tail = msgspec.structs.replace(prepared.tail, live_bytes=live_bytes)
        except BaseException as error:
            self._log.fail(error)
            raise
        return Prepared(prepared.batch, tail, write, prepared.lifted)

    def commit(self, prepared: Prepared) -> Ticket:
        """Commit messages and state in one engine write; return the ticket for `CommitLog.settle`."""
        log, rows = self._log, len(prepared.batch)
        if rows:
            slab = self._generations.slabs[self._generations.current]
            ticket = log.commit_locked(prepared.write, prepared.tail, slab.committed, prepared.batch)
        else:
            ticket = log.commit_locked(prepared.write, prepared.tail)
        log.counters.batches += 1
        log.counters.messages += rows
        log.counters.payload_bytes += prepared.batch.payload_bytes()
        return ticket

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state writes without messages."""
        log = self._log
        check_not_owned(log.lock)
        with log.lock:
            log.check_writable()
            write = WriteBatch()
            stage(writes, log.engine, write)
            ticket = log.commit_locked(write, log.tail)
            log.counters.state_writes += 1
        log.settle(ticket)

    def store_again(self, batch: MessageBatch, end: Tail) -> None:
        """Store messages at the positions that they have, and continue after ``end``."""
        log = self._log
        with log.lock:
            log.check_writable()
            write = WriteBatch()
            tail = msgspec.structs.replace(
                log.tail,
                last_position=max(log.tail.last_position, end.last_position),
                last_time=max(log.tail.last_time, end.last_time),
                messages=log.tail.messages + len(batch),
                zone=self._zone(batch, write) if len(batch) else log.tail.zone,
            )
            if len(batch) and log.policy.timestamps == "message":
                self._displace(batch, write)
            ticket = self.commit(self.encode(Prepared(batch, tail, write, 0)))
        log.settle(ticket)

    # --- positions and times ---

    def _place(self, batch: MessageBatch, write: WriteBatch) -> tuple[MessageBatch, Tail]:
        """Assign positions and times to a batch; return it and the tail after it."""
        policy, tail, rows = self._log.policy, self._log.tail, len(batch)
        now = policy.now()
        if not rows:
            return batch, tail
        timestamps = _fill(batch.timestamps, now)
        lifted = 0
        last_time = tail.last_time
        if policy.timestamps == "commit":
            self._tell_if_ahead()
            positions = commit_positions(tail.last_position, now, rows)
        else:
            times, lifted = self._times(batch.timestamps, timestamps, now)
            positions = message_positions(tail.last_position, times)
            last_time = max(last_time, int(times.max()))
        if isinstance(timestamps, list) and rows >= _MANY:
            timestamps = to_integers(timestamps)
        placed = batch.placed(positions, timestamps, self._log.number)
        if policy.timestamps == "message":
            self._displace(placed, write)
        return placed, msgspec.structs.replace(
            tail,
            last_position=int(positions[-1]),
            last_time=last_time,
            lifted=tail.lifted + lifted,
            messages=tail.messages + rows,
            zone=self._zone(placed, write),
        )

    def _displace(self, placed: MessageBatch, write: WriteBatch) -> None:
        """Add to the write how much later positions are than their messages' own times, if it is more than before."""
        displaced = displacement_of(placed)
        if displaced > self.displacement:
            self.displacement = displaced  # if the write fails, it is too much until the shard is opened again
            put_displacement(write, displaced)

    def _zone(self, placed: MessageBatch, write: WriteBatch) -> Zone:
        """Add a batch's messages to the zone that is being filled, and the records of full zones to the write."""
        tail = self._log.tail
        full, zone = fill(tail.zone or Zone(tail.last_position + 1), placed.positions, placed.timestamps)
        for record in full:
            put_zone(write, self._generations.current, record)
        return zone

    def _times(self, given: Column, filled: Column, now: int) -> tuple[Times, int]:
        """Return the times from which positions are made, and the number of late ones.

        A message without a time is never late: it follows what came before it.
        """
        if isinstance(filled, np.ndarray):
            times = filled.astype(np.int64)
        else:
            times = np.fromiter(to_iterable(filled), np.int64, len(filled))
        self._refuse_ahead(times, now)
        last_time = self._log.tail.last_time
        newest = np.maximum.accumulate(np.maximum(times, last_time))
        if isinstance(given, Constant):
            times = newest if given.value is None else times
        elif given is not filled:  # some were filled in
            absent = np.fromiter((value is None for value in to_iterable(given)), np.bool_, len(times))
            times = np.where(absent, newest, times)
        late = np.flatnonzero(late_rows(last_time, times))
        if len(late) and self._log.policy.late == "raise":
            first = int(late[0])
            raise LateMessageError(
                f"its time lies {span_text(int(newest[first]) - int(times[first]))} before that of a message "
                f"stored before it in shard {self._log.number}",
                first,
            )
        return times, len(late)

    def _refuse_ahead(self, times: Times, now: int) -> None:
        most = self._log.policy.max_skew
        ahead = np.flatnonzero(times > now + int(most * 1e6))
        if len(ahead):
            first = int(ahead[0])
            raise TimestampAheadError(
                f"its time lies {span_text(int(times[first]) - now)} ahead of the clock; {most:g} s are allowed",
                first,
            )


def _fill(timestamps: Any, now: int) -> Any:
    """Give messages without a time that of the commit."""
    if isinstance(timestamps, Constant):
        return Constant(now, len(timestamps)) if timestamps.value is None else timestamps
    if isinstance(timestamps, np.ndarray) and timestamps.dtype != object:
        return timestamps  # numbers, so none is missing
    values = to_list(timestamps)
    return [now if value is None else value for value in values] if None in values else values
