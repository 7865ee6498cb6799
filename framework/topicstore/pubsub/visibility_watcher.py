"""Waiting until committed messages become visible: for the end of epochs and of flushes under way.

It is done by a thread that is started when there is something to wait for, so that readers neither block nor poll.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from topicstore.contract.errors import DatabaseClosedError, TopicstoreError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.closing import do_all
from topicstore.shard.shard import Shard

__all__ = ["VisibilityWatcher"]

_AGAIN = 1.0
"""Seconds after which waiting that failed is tried again."""


class VisibilityWatcher:
    """Wakes readers that wait until a position of a shard is visible."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = ProcessLock()
        """Guards the attributes below."""
        self._waiting: dict[int, tuple[int, set[Callable[[int], object]]]] = {}
        """By shard, the highest position that is waited for, and the functions to call."""
        self._task = BackgroundTask("visibility", lambda _: self._work())

    def add(self, wake: Callable[[int], object], shard: int, position: int) -> None:
        """Call ``wake`` with the shard's number when everything up to a position of it is visible."""
        self._wait_for(shard, position, {wake})
        self._task.wake()

    @property
    def failure(self) -> str | None:
        """Why waiting failed the last time, which is tried again; None if it did not."""
        return self._task.failure

    def stop(self) -> None:
        """Stop waiting. `join` waits for the thread, which closing the shards wakes."""
        self._task.stop()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._task.join()

    def _work(self) -> None:
        """Wait for each shard that is waited for. The task reports errors, and they are tried again."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self._task.interval = None
        do_all((partial(self._serve, shard, *waits) for shard, waits in waiting.items()), "failed")

    def _serve(self, shard: int, position: int, wakes: set[Callable[[int], object]]) -> None:
        """Wake all when a position is visible; those that could not be woken go on waiting."""

        def serve(wake: Callable[[int], object]) -> None:
            wake(shard)
            wakes.remove(wake)

        try:
            if not self._task.stopping.is_set() and self._comes(shard, position):
                do_all([partial(serve, wake) for wake in wakes], "could not be woken")
        except BaseException:
            self._wait_for(shard, position, wakes)
            self._task.interval = _AGAIN
            raise

    def _comes(self, shard: int, position: int) -> bool:
        """Return True when a position is visible, False if it never will be because the shard takes no writes."""
        found = self._shards[shard]
        try:
            found.reader.await_visible(position)
        except TopicstoreError as failure:
            if found.writer.failure is None and not isinstance(failure, DatabaseClosedError):
                raise
            return False
        return True

    def _wait_for(self, shard: int, position: int, wakes: set[Callable[[int], object]]) -> None:
        with self._lock:
            highest, others = self._waiting.get(shard, (0, set()))
            self._waiting[shard] = max(highest, position), others | wakes
