"""`QueueBounds` keeps the messages that wait for sessions within `Limits.max_queued` and `Limits.max_queued_bytes`.

A thread checks the sessions in turn, within a small share of the time. Dropped messages are logged by client, and
counted by the sessions themselves (`topicstore.sessions.SessionCounts`).
"""

from __future__ import annotations

import logging
import time

import attrs

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError, TopicstoreError
from topicstore.runtime.background import BackgroundTask

from .config.model import Limits
from .logs import RateLimitedLog

__all__ = ["QueueBounds"]

_PAUSE = 1.0
"""Seconds between two rounds through all sessions."""
_SHARE = 0.05
"""Largest share of the time that the checks may take."""
_PIECE, _CLIENTS = 0.02, 32
"""Seconds of one step, and the number of sessions that are checked in one call."""

_log = logging.getLogger("topicstore.server")


class QueueBounds:
    """The bounds of the messages that wait for the sessions of one database, checked in a background thread."""

    def __init__(self, db: ts.Database) -> None:
        self._db = db
        self._limits = Limits()
        self._left: list[str] = []
        """The remaining clients of the current round. Used in the thread only."""
        self._dropped = RateLimitedLog("messages were dropped, because too many waited for a session", _log)
        self._task = BackgroundTask("queue-bounds", self._step)

    def use(self, limits: Limits) -> None:
        """Apply limits from the next check on. Without limits nothing is checked, and no thread is started."""
        self._limits = limits
        if self._bounded:
            self._task.wake()

    @property
    def _bounded(self) -> bool:
        return self._limits.max_queued is not None or self._limits.max_queued_bytes is not None

    def stop(self) -> None:
        """End the thread, after a call in progress. Idempotent."""
        self._task.stop()
        self._task.join()

    def _step(self, _woken: bool) -> None:
        if not self._bounded:
            self._task.interval = None
            return
        began = time.monotonic()
        try:
            self._left = self._left or self._db.sessions.clients()[::-1]
            while self._left and time.monotonic() - began < _PIECE and not self._task.stopping.is_set():
                some, self._left = self._left[-_CLIENTS:], self._left[:-_CLIENTS]
                self._bound(some)
        except DatabaseClosedError:
            self._task.interval = None
            return
        took = time.monotonic() - began
        self._task.interval = max(took / _SHARE, 0.0 if self._left else _PAUSE)

    def _bound(self, clients: list[str]) -> None:
        limits = self._limits
        try:
            found = self._db.sessions.bound_backlogs(
                clients, max_messages=limits.max_queued, max_bytes=limits.max_queued_bytes
            )
        except DatabaseClosedError:
            raise
        except TopicstoreError as failed:
            if len(clients) > 1:
                for one in clients:
                    self._bound([one])
            else:
                _log.warning("what waits for the session of %r can't be bounded: %s", clients[0], failed)
            return
        for client_id, skipped in found.items():
            self._dropped.note(client_id, {"client_id": client_id, **attrs.asdict(skipped)})
