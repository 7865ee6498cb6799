"""Waiting for what is committed and can't be seen yet: epochs that are being written, flushes under way.

A thread does it, started when there is something to wait for, so that no reader is held up and
nobody has to look again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from topicstore.background import BackgroundTask
from topicstore.contract.errors import TopicstoreError
from topicstore.shard.shard import Shard

__all__ = ["VisibilityWatcher"]

_AGAIN = 1.0
"""Seconds after which waiting that failed is tried again."""


class VisibilityWatcher:
    """Wakes whoever waits until a position of a shard can be seen."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        """Guards what follows."""
        self._waiting: dict[int, tuple[int, set[Callable[[int], object]]]] = {}
        """By shard, the highest position that somebody waits for, and whom to wake."""
        self._task = BackgroundTask("visibility", lambda _: self._work(), goes_on=True)

    def add(self, wake: Callable[[int], object], shard: int, position: int) -> None:
        """Call ``wake`` with the shard's number when everything up to a position of it can be seen."""
        self._wait_for(shard, position, {wake})
        self._task.wake()

    @property
    def failure(self) -> str | None:
        """Why waiting failed the last time, and is tried again; None if it did not."""
        return self._task.failure

    def stop(self) -> None:
        """Wait for nothing more; `join` waits for the thread, which the shards' close lets go."""
        self._task.stop()

    def join(self) -> None:
        """Return when the thread has ended."""
        self._task.join()

    def _work(self) -> None:
        while not self._task.stopping.is_set():
            with self._lock:
                if not self._waiting:
                    self._task.interval = None
                    return
                shard = next(iter(self._waiting))
                position, wakes = self._waiting.pop(shard)
            try:
                self._shards[shard].await_visible(position)
                while wakes:
                    wakes.pop()(shard)
            except TopicstoreError:
                continue  # the shard takes no writes any more, and says why: nothing will come to be seen
            except BaseException:  # told by the task; who waits still does, so it is tried again
                self._wait_for(shard, position, wakes)
                self._task.interval = _AGAIN
                raise

    def _wait_for(self, shard: int, position: int, wakes: set[Callable[[int], object]]) -> None:
        with self._lock:
            highest, others = self._waiting.get(shard, (0, set()))
            self._waiting[shard] = max(highest, position), others | wakes
