"""How far all sessions together are behind, counted a few sessions at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import attrs

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError, SessionNotFoundError, TopicstoreError
from topicstore.storage.counting.lag import Lag

from .paced import CHEAP

__all__ = ["LagTotals", "SessionLag"]

_SHARE = 0.005
"""The most of the time that the counting takes."""
_PIECE = 0.005
"""Seconds that one look at a few sessions is to take, and may exceed by what one session takes."""

_log = logging.getLogger("topicstore.server.metrics")


@attrs.frozen(kw_only=True)
class LagTotals:
    """All sessions together, as they were one after the other. A shared subscription counts for each member."""

    sessions: int = 0
    """How many were looked at."""
    lagging: int = 0
    """How many of them have something to be delivered."""
    messages: int = 0
    """Messages that are still to be delivered to them."""
    most_messages: int = 0
    """Those of the session that has most of them."""
    most_seconds: float = 0.0
    """Seconds by which the next message of the session that is furthest behind is older than the newest message."""
    unknown: int = 0
    """Sessions of which it could not be found out."""

    def __add__(self, lag: Lag) -> LagTotals:
        """Return the totals with those of one more session."""
        return LagTotals(
            sessions=self.sessions + 1,
            lagging=self.lagging + bool(lag.messages),
            messages=self.messages + lag.messages,
            most_messages=max(self.most_messages, lag.messages),
            most_seconds=max(self.most_seconds, lag.seconds),
            unknown=self.unknown,
        )


class SessionLag:
    """Goes over all sessions again and again, as far as that takes a small share of the time. For any thread."""

    def __init__(self, db: ts.Database) -> None:
        self._db = db
        self._lock = threading.Lock()
        """Held while it goes on. Guards the attributes below."""
        self._told = threading.Lock()
        """Guards `_whole` and `_since`, so that nobody who asks waits for the counting. Taken last."""
        self._left: list[str] = []
        """The clients that are still to be looked at in this round."""
        self._counted = LagTotals()
        """The totals of those that were."""
        self._whole = LagTotals()
        """The totals of the last round."""
        self._since = self._began = time.monotonic()
        """When the last round and this one began."""
        self._due = self._took = 0.0
        """When it is to go on, and how many seconds the last piece has taken."""
        self._step = 1
        """How many sessions are looked at together."""

    def totals(self) -> tuple[LagTotals, float]:
        """Return the totals of the last whole round, and how many seconds ago it began.

        First it goes on if it is time, and if that is cheap; otherwise whoever calls `renew` does that.
        """
        if self._took < CHEAP:
            self.renew()
        with self._told:
            return self._whole, time.monotonic() - self._since

    def renew(self) -> None:
        """Go on if it is time. Raises `DatabaseClosedError`."""
        with self._lock:
            began = time.monotonic()
            if began >= self._due:
                self._go_on_locked(began)
                self._took = time.monotonic() - began
                self._due = began + self._took / _SHARE

    def _go_on_locked(self, began: float) -> None:
        if not self._left:
            self._left = self._db.sessions.clients()[::-1]
            self._counted, self._began = LagTotals(), began
        while self._left and time.monotonic() - began < _PIECE:
            looked = time.monotonic()
            some, self._left = self._left[-self._step :], self._left[: -self._step]
            self._count_locked(some)
            took = time.monotonic() - looked
            self._step = max(1, self._step // 2) if took > _PIECE / 2 else min(self._step * 2, 1_024)
        if not self._left:
            with self._told:
                self._whole, self._since = self._counted, self._began

    def _count_locked(self, clients: Sequence[str]) -> None:
        try:
            found = self._db.sessions.lag(*clients)
        except DatabaseClosedError:
            raise
        except TopicstoreError as failed:
            if len(clients) > 1:
                for one in clients:
                    self._count_locked([one])
            elif not isinstance(failed, SessionNotFoundError):  # else it has ended meanwhile
                _log.warning("how far the session of %r is behind can't be found out: %s", clients[0], failed)
                self._counted = attrs.evolve(
                    self._counted, sessions=self._counted.sessions + 1, unknown=self._counted.unknown + 1
                )
            return
        for by_filter in found.values():
            self._counted += sum(by_filter.values(), Lag.none())
