"""Waiting for what is committed and can't be seen yet: epochs that are being written, flushes under way.

A thread does it, started when there is something to wait for, so that no reader is held up and
nobody has to look again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topicstore.contract.errors import TopicstoreError
from topicstore.shard.shard import Shard

if TYPE_CHECKING:
    from .feed import Feed

__all__ = ["VisibilityWatcher"]


class VisibilityWatcher:
    """Wakes feeds when a position of a shard can be seen."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._waiting: dict[int, tuple[int, set[Feed]]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, feed: Feed, shard: int, position: int) -> None:
        """Wake a feed when everything up to a position of a shard can be seen."""
        with self._changed:
            highest, feeds = self._waiting.get(shard, (0, set()))
            feeds.add(feed)
            self._waiting[shard] = max(highest, position), feeds
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="topicstore-epochs", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Wait for nothing more; `join` waits for the thread, which the shards' close lets go."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                shard = next(iter(self._waiting))
                position, feeds = self._waiting.pop(shard)
            try:
                self._shards[shard].await_visible(position)
            except TopicstoreError:
                continue  # the shard takes no writes any more, and says why: nothing will come to be seen
            while feeds:
                feeds.pop().wake(shard)
