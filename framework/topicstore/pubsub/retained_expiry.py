"""Removing retained messages that have expired, in the background, whether or not anything is stored.

All retained messages are read to find those that have expired, so this is done when the earliest known end of one has
passed, and takes at most a fiftieth of the time. The task sleeps until then, and looks once after the opening if there
are retained messages at all. A store wakes it earlier where the clock has jumped.

A wrong clock removes nothing early: a message must have expired by the wall clock, and by the clock that doesn't count
its jumps since the opening.
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
"""Microseconds between two looks at the least."""
_SHARE = 50
"""A look is followed by a pause of so many times its length."""
_SECOND = 1_000_000
_SHORTEST, _LONGEST = 0.01, 3_600.0
"""Seconds for which the task sleeps at least, and at most where an end is known."""


class EarliestEnd:
    """The time at which the next retained message expires, as far as is known. Kept with a database."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards `time`, which can be read without it."""
        self.time: int | None = None
        """In microseconds since the epoch; None: it isn't known."""
        self.task: BackgroundTask | None = None
        """The task that sleeps until then, and is woken when a message that expires earlier is committed."""

    def look(self, storage: Storage) -> None:
        """Find out whether there is a retained message, if nothing is known. Reads one key of each shard at most."""
        if self.time is None:
            self.forget(FOREVER)  # before looking: messages that come meanwhile lower it
            if _may_have_some(storage):
                self.forget(None)

    def expect(self, batch: MessageBatch, rows: Iterable[int], now: int) -> None:
        """Note messages that were committed as retained ones by ``now``, given as rows of a batch."""
        if isinstance(batch.properties, Constant) and batch.properties.value is None:
            return
        properties = list(to_iterable(batch.properties))
        found = (properties[row] for row in rows)
        intervals = [one.message_expiry_interval for one in found if one is not None]
        lowered = self.lower(min((now + one * _SECOND for one in intervals if one is not None), default=FOREVER))
        if lowered and self.task is not None:
            self.task.wake()

    def lower(self, time: int) -> bool:
        """Note that a message expires at a time; return whether none that is known expires as early."""
        with self._lock:
            lowered = self.time is not None and time < self.time
            if lowered:
                self.time = time
            return lowered

    def forget(self, time: int | None) -> None:
        """Begin again with a time."""
        with self._lock:
            self.time = time


class RetainedExpiry:
    """Removes the expired retained messages of one database."""

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)  # otherwise a database without other references would not be closed
        self._earliest = storage.kept(EarliestEnd)
        self._monotonic = storage.clocks.monotonic
        self._again = 0
        """The monotonic time of the next look. Set by the task."""
        self.task = BackgroundTask("removal of expired retained messages", lambda _: self._work())
        self._earliest.task = self.task
        storage.on_close(self.stop)
        self._job = storage.jobs.add(self._wake_if_due, time=0)
        if storage.mode is None:
            self._wake_if_due()

    def _wake_if_due(self) -> None:
        """Wake the background task, at a store, if there may be something to remove."""
        storage = self._storage()
        if storage is None or self._monotonic() < self._again:
            return
        self._earliest.look(storage)
        if self._earliest.time == FOREVER:
            self._job.time = NEVER  # the task sets it when it is woken for a message that expires
            if self._earliest.time != FOREVER:  # it was woken just before
                self._job.time = self._again
            return
        time = self._earliest.time
        if time is None or time <= _now(storage):
            self.task.wake()

    def stop(self) -> None:
        """Stop removing, and return when it has ended. May be called twice."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        storage = self._storage()
        if storage is None:  # the database has no references any more, and is about to be closed
            return
        time = self._earliest.time
        rested = self._monotonic() >= self._again or self.task.failure is not None
        if rested and (time is None or time <= _now(storage)):
            self._look(storage)
        self._sleep(storage)

    def _look(self, storage: Storage) -> None:
        began = self._monotonic()
        self._earliest.forget(FOREVER)  # before looking: messages that come meanwhile lower it
        try:
            found = remove_expired_until(storage, _now(storage), self.task.stopping.is_set)
        except BaseException:
            self._earliest.forget(None)
            raise
        finally:
            self._again = self._monotonic() + max(_PAUSE, _SHARE * (self._monotonic() - began))
        self._earliest.lower(found.earliest)

    def _sleep(self, storage: Storage) -> None:
        """Have the task wake at the earliest end, though not before the next look is due."""
        time = self._earliest.time
        if time == FOREVER:
            self.task.interval = None
            return
        self._job.time = self._again
        wait = max(0 if time is None else time - _now(storage), self._again - self._monotonic())
        self.task.interval = min(max(wait / _SECOND, _SHORTEST), _LONGEST)


def _now(storage: Storage) -> int:
    return min(storage.clock(), storage.steady())


def _may_have_some(storage: Storage) -> bool:
    try:
        return any_kept(storage)
    except TopicstoreError:  # the task meets it again, and tells it
        return True
