"""Storing a batch in a shard: it gets positions and times, the layout makes keys and values of it, both are committed.

The caller holds the log's lock over all three, for all shards of its batch: `WritePath.prepare` for all, then
`WritePath.encode` for all, then `WritePath.commit` for all, so that a message refused by one shard keeps the whole
batch out of all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Column, Constant, to_iterable, to_list
from topicstore.contract.engine import WriteBatch
from topicstore.contract.errors import LateMessageError, TimestampAheadError
from topicstore.contract.positions import Times, commit_positions, late_rows, message_positions, span_text, time_of
from topicstore.contract.state import StateWrite

from .commit_log import CommitLog, Ticket
from .damaged_slab import DamagedSlab
from .generations import Generations
from .records import Tail
from .state import stage

__all__ = ["Prepared", "WritePath"]


@attrs.frozen
class Prepared:
    """A batch that may be committed."""

    batch: MessageBatch
    """With positions and times."""
    tail: Tail
    write: WriteBatch
    lifted: int


class WritePath:
    """How messages and state get into one shard."""

    def __init__(self, log: CommitLog, generations: Generations) -> None:
        self._log = log
        self._generations = generations
        if not log.read_only and self.ahead() > 0:
            warnings.warn(
                f"shard {log.number}: its last position lies {span_text(self.ahead())} in the future; "
                "messages committed until then get positions right after it",
                stacklevel=2,
            )

    def ahead(self) -> int:
        """Return by how many microseconds the last position lies in the future; 0 if it doesn't."""
        # Without this allowance every store would look ahead by its own batch's counters.
        return max(0, time_of(self._log.tail.last_position) - self._log.policy.now() - 1_000)

    def prepare(self, batch: MessageBatch, state: Sequence[StateWrite]) -> Prepared:
        """Check a batch and its state, and give it positions; nothing has changed yet."""
        log = self._log
        log.check_writable()
        slab = self._generations.slabs[self._generations.current]
        if len(batch) and isinstance(slab, DamagedSlab):
            raise slab.error
        write = WriteBatch()
        stage(state, log.engine, write)
        placed, tail = self._place(batch)
        return Prepared(placed, tail, write, tail.lifted - log.tail.lifted)

    def encode(self, prepared: Prepared) -> Prepared:
        """Add to the batch's write what keeps its messages; nothing is committed yet.

        Whatever interrupts it closes the shard to writes: the layout's memory may be half changed.
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
        return attrs.evolve(prepared, tail=tail)

    def commit(self, prepared: Prepared) -> Ticket:
        """Commit messages and state in one engine write; return the ticket for `CommitLog.settle`."""
        log, rows = self._log, len(prepared.batch)
        slab = self._generations.slabs[self._generations.current]
        if rows:
            ticket = log.commit_locked(prepared.write, prepared.tail, slab.committed, prepared.batch)
        else:
            ticket = log.commit_locked(prepared.write, prepared.tail)
        log.counters.batches += 1
        log.counters.messages += rows
        return ticket

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state alone."""
        log = self._log
        with log.lock:
            log.check_writable()
            write = WriteBatch()
            stage(writes, log.engine, write)
            ticket = log.commit_locked(write, log.tail)
        log.settle(ticket)

    # --- positions and times ---

    def _place(self, batch: MessageBatch) -> tuple[MessageBatch, Tail]:
        """Give a batch its positions and times; return it and the tail that follows."""
        policy, tail, rows = self._log.policy, self._log.tail, len(batch)
        now = policy.now()
        if not rows:
            return batch, tail
        timestamps = _fill(batch.timestamps, now)
        lifted = 0
        last_time = tail.last_time
        if policy.timestamps == "commit":
            positions = commit_positions(tail.last_position, now, rows)
        else:
            times, lifted = self._times(batch.timestamps, timestamps, now)
            positions = message_positions(tail.last_position, times)
            last_time = max(last_time, int(times.max()))
        placed = batch.placed(positions, timestamps, self._log.number)
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
    """Put the time of the commit where a message has none."""
    if isinstance(timestamps, Constant):
        return Constant(now, len(timestamps)) if timestamps.value is None else timestamps
    if isinstance(timestamps, np.ndarray) and timestamps.dtype != object:
        return timestamps  # numbers, so none is missing
    values = to_list(timestamps)
    return [now if value is None else value for value in values] if None in values else values
