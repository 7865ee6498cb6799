"""Removing retained messages that have expired, in the background, when something is stored.

All retained messages are read to find those that have expired, so this is done when the earliest known end of one has
passed, and takes at most a fiftieth of the time. For those that were there at the opening, it isn't known before the
first look, which follows the first store.

A wrong clock removes nothing early: a message must have expired by the wall clock, and by the clock that doesn't count
its jumps since the opening.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from topicstore.background import BackgroundTask
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.forking import ProcessLock
from topicstore.storage.storage import Storage

from .retained import FOREVER, any_kept, remove_expired_until

__all__ = ["EarliestEnd", "RetainedExpiry"]

_PAUSE = 10_000_000
"""Microseconds between two looks at the least."""
_SHARE = 50
"""A look is followed by a pause of so many times its length."""
_SECOND = 1_000_000


class EarliestEnd:
    """The time at which the next retained message expires, as far as is known. Kept with a database."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards `time`, which can be read without it."""
        self.time: int | None = None
        """In microseconds since the epoch; None: it isn't known."""

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
        self.lower(min((now + one * _SECOND for one in intervals if one is not None), default=FOREVER))

    def lower(self, time: int) -> None:
        """Note that a message expires at a time."""
        with self._lock:
            if self.time is not None:
                self.time = min(self.time, time)

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
        """The monotonic time of the next look. Set by any thread; a look too many does no harm."""
        self._until = 0
        """The time of the store that woke the task. Set like `_again`."""
        self.task = BackgroundTask("removal of expired retained messages", lambda _: self._work())
        storage.on_close(self.stop)
        storage.after_store.append(self.stored)

    def stored(self, _messages: int) -> None:
        """Wake the background task after a store, if there may be something to remove. Cheap."""
        storage = self._storage()
        if self._earliest.time == FOREVER or storage is None or self._monotonic() < self._again:
            return
        self._earliest.look(storage)
        time = self._earliest.time
        if time is None or time <= _now(storage):
            self._again, self._until = self._monotonic() + _PAUSE, _now(storage)
            self.task.wake()

    def stop(self) -> None:
        """Stop removing, and return when it has ended. May be called twice."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        storage = self._storage()
        if storage is None:  # the database has no references any more, and is about to be closed
            return
        began = self._monotonic()
        self._earliest.forget(FOREVER)  # before looking: messages that come meanwhile lower it
        try:
            found = remove_expired_until(storage, self._until, self.task.stopping.is_set)
        except BaseException:
            self._earliest.forget(None)
            raise
        finally:
            self._again = self._monotonic() + max(_PAUSE, _SHARE * (self._monotonic() - began))
        self._earliest.lower(found.earliest)


def _now(storage: Storage) -> int:
    return min(storage.clock(), storage.steady())


def _may_have_some(storage: Storage) -> bool:
    try:
        return any_kept(storage)
    except TopicstoreError:  # the task meets it again, and tells it
        return True
