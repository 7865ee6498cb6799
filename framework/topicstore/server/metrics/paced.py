"""Values that are expensive to compute, such as the total lag of sessions, cached in proportion to their cost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError, SessionNotFoundError, TopicstoreError
from topicstore.storage.counting.lag import Lag

__all__ = [
    "CHEAP",
    "LagTotals",
    "Paced",
    "SessionLag",
]

_SHARE = 0.001
"""Largest share of the time that computing one value may take, independent of the number of requests."""
CHEAP = 0.001
"""A value that takes fewer seconds than this is computed while a request waits."""

T = TypeVar("T")


class Paced(Generic[T]):
    """A cached value, which expires after a thousand times the duration of its computation.

    So a value that takes microseconds is always fresh, and a value that takes 10 ms is up to 10 seconds old. `value`
    computes the value only if that is cheap; otherwise the caller of `renew`, about once a second, does. Thread-safe.
    """

    def __init__(self, find_out: Callable[[], T]) -> None:
        self._find_out = find_out
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._value: tuple[T] | None = None
        self._took = self._found_out = self._due = 0.0

    def value(self) -> T:
        """Return the value, computed again if it is due and cheap. Raises the errors of the computation."""
        with self._lock:
            if self._value is None:
                return self._renewed_locked()
            return self._renewed_locked() if self._took < CHEAP and self._is_due() else self._value[0]

    def renew(self) -> None:
        """Compute the value again if it is due. Raises the errors of the computation."""
        with self._lock:
            if self._is_due():
                self._renewed_locked()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def _renewed_locked(self) -> T:
        began = time.monotonic()
        value = self._find_out()
        self._value, self._found_out, self._took = (value,), began, time.monotonic() - began
        self._due = began + self._took / _SHARE
        return value

    @property
    def age(self) -> float:
        """The age of the value in seconds."""
        return time.monotonic() - self._found_out if self._value is not None else 0.0


_LAG_SHARE = 0.005
"""Largest share of the time that the computation may take."""
_PIECE = 0.005
"""Seconds of one step of the computation, which may take longer by the time of one session."""
_WATCHED_SHARE = 0.05
"""The same share while a person watches the value."""
_WATCHED_PIECE = 0.05
"""The same seconds while a person watches the value."""
_WATCHED = 10.0
"""Seconds after `SessionLag.watch` for which a person counts as watching."""

_log = logging.getLogger("topicstore.server.metrics")


@attrs.frozen(kw_only=True)
class LagTotals:
    """Totals of the lag of all sessions, taken one after the other. A shared subscription counts for each member."""

    sessions: int = 0
    """Number of sessions."""
    lagging: int = 0
    """Number of sessions with messages to be delivered."""
    messages: int = 0
    """Messages that are still to be delivered, in total."""
    most_messages: int = 0
    """Messages that are still to be delivered to the session with most of them."""
    most_seconds: float = 0.0
    """The largest lag of a session: seconds by which its next message is older than the newest message."""
    unknown: int = 0
    """Number of sessions whose lag could not be computed."""

    def __add__(self, lag: Lag) -> LagTotals:
        """Add the lag of one more session."""
        return LagTotals(
            sessions=self.sessions + 1,
            lagging=self.lagging + bool(lag.messages),
            messages=self.messages + lag.messages,
            most_messages=max(self.most_messages, lag.messages),
            most_seconds=max(self.most_seconds, lag.seconds),
            unknown=self.unknown,
        )


class SessionLag:
    """Computes the lag of all sessions in repeated rounds, within a small share of the time. Thread-safe."""

    def __init__(self, db: ts.Database) -> None:
        self._db = db
        self._lock = threading.Lock()
        """Held during a step of the computation. Guards the following attributes."""
        self._result_lock = threading.Lock()
        """Guards `_whole` and `_since`, so that readers don't wait for the computation. Acquired after `_lock`."""
        self._left: list[str] = []
        """The remaining clients of the current round."""
        self._counted = LagTotals()
        """The totals of the current round up to this point."""
        self._whole = LagTotals()
        """The totals of the last complete round."""
        self._since = self._began = time.monotonic()
        """The times at which the last complete round and the current round began."""
        self._began_step = self._took = 0.0
        """The time at which the last step began, and its duration in seconds."""
        self._step = 1
        """Number of sessions whose lag is computed in one call."""
        self._watched = 0.0
        """The time until which a person watches the value. Written without a lock."""

    def watch(self) -> None:
        """Compute more often for the next ten seconds, because a person looks at the value."""
        self._watched = time.monotonic() + _WATCHED

    def totals(self) -> tuple[LagTotals, float]:
        """Return the totals of the last complete round, and the seconds since the round began.

        A step of the computation is done first if it is due and cheap; otherwise `renew` does the step.
        """
        if self._took < CHEAP:
            self.renew()
        with self._result_lock:
            return self._whole, time.monotonic() - self._since

    def renew(self) -> None:
        """Do a step of the computation if it is due. Raises `DatabaseClosedError`."""
        with self._lock:
            began = time.monotonic()
            watched = began < self._watched
            share, piece = (_WATCHED_SHARE, _WATCHED_PIECE) if watched else (_LAG_SHARE, _PIECE)
            if began >= self._began_step + self._took / share:
                self._go_on_locked(began, piece)
                self._began_step, self._took = began, time.monotonic() - began

    def _go_on_locked(self, began: float, piece: float) -> None:
        if not self._left:
            self._left = self._db.sessions.clients()[::-1]
            self._counted, self._began = LagTotals(), began
        while self._left and time.monotonic() - began < piece:
            looked = time.monotonic()
            some, self._left = self._left[-self._step :], self._left[: -self._step]
            self._count_locked(some)
            took = time.monotonic() - looked
            self._step = max(1, self._step // 2) if took > piece / 2 else min(self._step * 2, 1_024)
        if not self._left:
            with self._result_lock:
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
            elif not isinstance(failed, SessionNotFoundError):  # an ended session doesn't count
                _log.warning("how far the session of %r is behind can't be found out: %s", clients[0], failed)
                self._counted = attrs.evolve(
                    self._counted, sessions=self._counted.sessions + 1, unknown=self._counted.unknown + 1
                )
            return
        for by_filter in found.values():
            self._counted += sum(by_filter.values(), Lag.none())
