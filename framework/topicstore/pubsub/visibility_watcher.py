"""`VisibilityWatcher`: waits until committed messages are visible, after the end of an epoch or of an fsync under way.

A background thread, started when the first reader waits, does the waiting, so that readers neither block nor poll.
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
"""Seconds after which a failed wait is repeated."""


class VisibilityWatcher:
    """Calls functions of readers when a position of a shard is visible."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = ProcessLock()
        """Guards the attributes below."""
        self._waiting: dict[int, tuple[int, set[Callable[[int], object]]]] = {}
        """By shard, the highest position to wait for, and the functions to call."""
        self._task = BackgroundTask("visibility", lambda _: self._work())

    def add(self, wake: Callable[[int], object], shard: int, position: int) -> None:
        """Call ``wake`` with the shard's number when all its messages up to a position are visible."""
        self._wait_for(shard, position, {wake})
        self._task.wake()

    @property
    def failure(self) -> str | None:
        """The error of the last wait, which will be repeated; None if the wait succeeded."""
        return self._task.failure

    def stop(self) -> None:
        """Stop waiting. Closing the shards wakes the thread, and `join` waits for its end."""
        self._task.stop()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._task.join()

    def _work(self) -> None:
        """Wait for the positions of all shards. The task reports errors, and failed waits are repeated."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self._task.interval = None
        do_all((partial(self._serve, shard, *waits) for shard, waits in waiting.items()), "failed")

    def _serve(self, shard: int, position: int, wakes: set[Callable[[int], object]]) -> None:
        """Call all functions when a position is visible; functions that could not be called are kept."""

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
        """Wait until a position is visible; return False if that can't happen, because the shard takes no writes."""
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
