"""Compaction in the background: a thread a database, which works when nobody stores.

Merging costs about as much as storing, and shares the interpreter with it. So it waits until
a database that took in much has been quiet for a moment, and stops between two steps when
something is stored again. Only if the backlog grows very large it works beside the writers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

from topicstore.shard.shard import Shard

__all__ = ["CompactionScheduler"]

WORTH_IT = 65_536
"""Messages stored after which it looks whether there is work."""
URGENT = 32 * WORTH_IT
"""Messages waiting in a shard from which on it doesn't wait for quiet."""
QUIET = 0.5
"""Seconds without a store that count as quiet."""


class CompactionScheduler:
    """Compacts the shards of one database. Its thread is started when there is something to do."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.failure: str | None = None
        """Why it gave up, until the database is opened again; None while it works."""
        self._shards = shards
        self._stored = 0
        self._looked = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._starting = threading.RLock()  # a garbage collection inside may close the database
        self._thread: threading.Thread | None = None
        if self._backlog() >= WORTH_IT:
            self._start()

    def stored(self, messages: int) -> None:
        """So many messages were stored. Cheap."""
        self._stored += messages
        if self._stored - self._looked >= WORTH_IT:
            self._looked = self._stored
            self._start()

    def stop(self) -> None:
        """Return when it has ended, at most a step later. May be called twice."""
        with self._starting:
            self._stopping.set()
            self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        self._wake.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopping.is_set():
                    self._thread = threading.Thread(target=self._run, name="topicstore-compaction", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                if self._stopping.is_set():
                    return
                self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be shown and not end in the thread
            self.failure = str(error) or type(error).__name__
            warnings.warn(f"background compaction has ended: {self.failure}", RuntimeWarning, stacklevel=1)

    def _work(self) -> None:
        """Compact until nothing is worth it, each time that it is quiet."""
        done = False
        while not done and not self._stopping.is_set():
            seen = self._stored
            self._stopping.wait(QUIET)
            if seen == self._stored or self._backlog() >= URGENT:
                done = self._compact(seen)

    def _compact(self, seen: int) -> bool:
        """Compact what is worth it; return whether it came to the end."""
        for shard in self._shards:
            shard.compact(whole=False, stop=lambda shard=shard: self._must_pause(shard, seen))  # type: ignore[misc]
        return seen == self._stored

    def _must_pause(self, shard: Shard, seen: int) -> bool:
        return self._stopping.is_set() or (seen != self._stored and shard.backlog() < URGENT)

    def _backlog(self) -> int:
        return max(shard.backlog() for shard in self._shards)
