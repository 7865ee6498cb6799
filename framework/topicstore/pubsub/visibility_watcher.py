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


class VisibilityWatcher:
    """Wakes whoever waits until a position of a shard can be seen."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._waiting: dict[int, tuple[int, set[Callable[[int], object]]]] = {}
        self._lock = threading.Lock()
        self._task = BackgroundTask("visibility", lambda _: self._work(), goes_on=True)

    def add(self, wake: Callable[[int], object], shard: int, position: int) -> None:
        """Call ``wake`` with the shard's number when everything up to a position of it can be seen."""
        with self._lock:
            highest, wakes = self._waiting.get(shard, (0, set()))
            wakes.add(wake)
            self._waiting[shard] = max(highest, position), wakes
        self._task.wake()

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
                    return
                shard = next(iter(self._waiting))
                position, wakes = self._waiting.pop(shard)
            try:
                self._shards[shard].await_visible(position)
            except TopicstoreError:
                continue  # the shard takes no writes any more, and says why: nothing will come to be seen
            while wakes:
                wakes.pop()(shard)
