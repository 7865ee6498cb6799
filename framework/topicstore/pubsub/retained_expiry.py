"""The removal of expired retained messages, by a background task.

To find expired messages, the task reads all retained messages. So it runs only when the earliest known expiry time has
passed, and uses at most a fiftieth of the time. Until then the task sleeps. After the opening it runs once if there are
retained messages. If the clock jumps, a store wakes the task earlier. On a site of a cluster, it also runs within a
minute after the site has taken a shard over, and while an expired message hides one of another shard.

A wrong clock removes no message early: a message must have expired by the wall clock, and also by a clock that has
excluded the jumps of the wall clock since the opening.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.background import BackgroundTask
from topicstore.storage.background_jobs import NEVER
from topicstore.storage.storage import Storage

from .retained import FOREVER, any_kept, remove_expired_until

__all__ = ["EarliestEnd", "RetainedExpiry"]

_PAUSE = 1_000_000
"""Shortest time between two runs in microseconds."""
_SHARE = 50
"""The pause after a run, as a multiple of the run's duration."""
_SECOND = 1_000_000
_SHORTEST, _LONGEST = 0.01, 3_600.0
"""Shortest and longest sleep of the task in seconds, if an expiry time is known."""
_SHARED_INTERVAL = 60.0
"""Longest sleep in seconds on a site of a cluster, to which a shard may come with retained messages of its own."""


class EarliestEnd:
    """The earliest known time at which a retained message expires. One object for each open database."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards `time`, which may be read without it."""
        self.time: int | None = None
        """In microseconds since the epoch; None: unknown; `FOREVER`: no retained message expires."""
        self.task: BackgroundTask | None = None
        """The task that sleeps until `time`; woken when a message that expires earlier is committed."""

    def look(self, storage: Storage) -> None:
        """If the time is unknown, check whether there are retained messages. Reads at most one key of each shard."""
        if self.time is None:
            self.forget(FOREVER)  # set before the check, so that messages committed meanwhile lower the time
            if _may_have_some(storage):
                self.forget(None)

    def expect(self, batch: MessageBatch, rows: Iterable[int], now: int) -> None:
        """Lower the time for the retained messages in these rows of a batch, which were committed before ``now``."""
        if isinstance(batch.properties, Constant) and batch.properties.value is None:
            return
        properties = list(to_iterable(batch.properties))
        found = (properties[row] for row in rows)
        intervals = [one.message_expiry_interval for one in found if one is not None]
        lowered = self.lower(min((now + one * _SECOND for one in intervals if one is not None), default=FOREVER))
        if lowered and self.task is not None:
            self.task.wake()

    def lower(self, time: int) -> bool:
        """Lower the known time to ``time`` if that is earlier; return whether it was."""
        with self._lock:
            lowered = self.time is not None and time < self.time
            if lowered:
                self.time = time
            return lowered

    def forget(self, time: int | None) -> None:
        """Set the time, even to a later one or to None."""
        with self._lock:
            self.time = time


class RetainedExpiry:
    """Removes the expired retained messages of one database."""

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)  # weak, so that a database without other references closes itself
        self._earliest = storage.kept(EarliestEnd)
        self._monotonic = storage.clocks.monotonic
        self._again = 0
        """The earliest monotonic time of the next run. Set by the task."""
        self._looked_at: tuple[int | None, ...] = ()
        """By shard, the fencing token under which this site owned it at the last run; empty if a run is due anyway.
        Set by the task."""
        self.task = BackgroundTask("removal of expired retained messages", lambda _: self._work())
        self._earliest.task = self.task
        storage.on_close(self.stop)
        self._job = storage.jobs.add(self._wake_if_due, time=0)
        if storage.mode is None:
            self._wake_if_due()

    def _wake_if_due(self) -> None:
        """Wake the background task, at a store, if a retained message may have expired."""
        storage = self._storage()
        if storage is None or self._monotonic() < self._again:
            return
        self._earliest.look(storage)
        if self._earliest.time == FOREVER:
            self._job.time = NEVER  # the task sets the time when it is woken for an expiring message
            if self._earliest.time != FOREVER:  # another thread has lowered the time since the check
                self._job.time = self._again
            return
        time = self._earliest.time
        if time is None or time <= _now(storage):
            self.task.wake()

    def stop(self) -> None:
        """Stop the task, and wait until it has ended. Idempotent."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        storage = self._storage()
        if storage is None:  # the database has no references left, and is about to close itself
            return
        time = self._earliest.time
        if storage.site is not None and self._looked_at != _periods(storage):
            time = None
        rested = self._monotonic() >= self._again or self.task.failure is not None
        if rested and (time is None or time <= _now(storage)):
            self._look(storage)
        self._sleep(storage)

    def _look(self, storage: Storage) -> None:
        began = self._monotonic()
        self._earliest.forget(FOREVER)  # set before reading, so that messages committed meanwhile lower the time
        periods = _periods(storage)
        try:
            found = remove_expired_until(storage, _now(storage), self.task.stopping.is_set)
        except BaseException:
            self._earliest.forget(None)
            raise
        finally:
            self._again = self._monotonic() + max(_PAUSE, _SHARE * (self._monotonic() - began))
        self._looked_at = () if found.hiding else periods
        self._earliest.lower(found.earliest)

    def _sleep(self, storage: Storage) -> None:
        """Set the task to wake at the earliest known expiry time, but not before the pause is over."""
        time, longest = self._earliest.time, _LONGEST if storage.site is None else _SHARED_INTERVAL
        if time == FOREVER:
            self.task.interval = None if storage.site is None else longest
            return
        self._job.time = self._again
        wait = max(0 if time is None else time - _now(storage), self._again - self._monotonic())
        self.task.interval = min(max(wait / _SECOND, _SHORTEST), longest)


def _now(storage: Storage) -> int:
    return min(storage.clock(), storage.steady())


def _periods(storage: Storage) -> tuple[int | None, ...]:
    return tuple(shard.writer.epoch for shard in storage.shards)


def _may_have_some(storage: Storage) -> bool:
    try:
        return any_kept(storage)
    except TopicstoreError:  # the task will meet the error, too, and report it
        return True
