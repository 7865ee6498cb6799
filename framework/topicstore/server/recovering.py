"""`Recovery` opens shards again that refuse writes since a write failed.

A full disk, or a lack of file descriptors, must not stop writes for good. So a thread checks the shards once a second,
and calls `Database.recover` for a database with a failed shard: at once, then after pauses that double up to `_LONGEST`
seconds. An attempt costs a few system calls while the cause persists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError, TopicstoreError
from topicstore.runtime.background import BackgroundTask

__all__ = ["Recovery"]

_LOOK = 1.0
"""Seconds between two checks of the shards."""
_LONGEST = 3.0
"""Most seconds between two attempts. Writes are to work again within five seconds after the cause was removed."""
_REPEAT = 60.0
"""Seconds after which the log repeats an unchanged reason for failed attempts."""

_log = logging.getLogger("topicstore.server")


class _Failing:
    """The attempts to recover one database."""

    def __init__(self) -> None:
        self.tries = 0
        self.due = 0.0
        """The time of the next attempt (`time.monotonic`)."""
        self.logged = ""
        """The reason that was logged last."""
        self.logged_at = float("-inf")


class Recovery:
    """The recovery of all open databases of a server, in a background thread."""

    def __init__(self, storages: Mapping[str, ts.Database]) -> None:
        self._storages = storages
        self._failing: dict[str, _Failing] = {}
        """By storage, the databases with a shard that refuses writes. Used in the thread only."""
        self._task = BackgroundTask("recovery", self._look)
        self._task.interval = _LOOK

    def start(self) -> None:
        """Begin to check the shards."""
        self._task.wake()

    def stop(self) -> None:
        """End the thread, after an attempt in progress. Idempotent."""
        self._task.stop()
        self._task.join()

    def _look(self, _woken: bool) -> None:
        for name, db in self._storages.items():
            now = time.monotonic()
            if any(shard.writer.failure is not None for shard in db.storage.shards):
                failing = self._failing.setdefault(name, _Failing())
                if now >= failing.due:
                    self._try(name, db, failing)
            elif name in self._failing and now >= self._failing[name].due + _REPEAT:
                del self._failing[name]  # a storage that fails again sooner keeps its longer pauses

    def _try(self, name: str, db: ts.Database, failing: _Failing) -> None:
        reasons = [
            f"shard {one.number}: {one.writer.failure}" for one in db.storage.shards if one.writer.failure is not None
        ]
        failing.tries += 1
        try:
            recovered = db.recover()
        except DatabaseClosedError:
            return
        except (TopicstoreError, OSError, ExceptionGroup) as bad:
            self._log_failure(failing, f"storage {name} can't be opened again yet: {bad}", reasons)
        else:
            numbers = ", ".join(map(str, recovered))
            failing.logged = ""
            _log.warning("storage %s was opened again at try %d, shards: %s", name, failing.tries, numbers)
        failing.due = time.monotonic() + min(_LOOK * 2 ** min(failing.tries - 1, 10), _LONGEST)

    def _log_failure(self, failing: _Failing, text: str, reasons: list[str]) -> None:
        """Log why an attempt failed, unless the same text was logged less than `_REPEAT` seconds ago."""
        now = time.monotonic()
        if text != failing.logged or now >= failing.logged_at + _REPEAT:
            failing.logged, failing.logged_at = text, now
            _log.warning("%s (try %d; taking no writes: %s)", text, failing.tries, "; ".join(reasons))
