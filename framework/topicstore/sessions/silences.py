"""`Silences`: which clients with a keep-alive have been silent for too long (MQTT 5, section 3.1.2.10).

A session is looked at when its client may have been silent for long enough, and again as long after it was last heard
of. So hearing of a client costs nothing here. A session that has ended is forgotten at once, however long its
keep-alive is.
"""

from __future__ import annotations

import heapq
import itertools

from .live_session import LiveSession
from .session_clock import microseconds

__all__ = ["Silences"]

_SILENCE = 1.5
"""Keep-alives after which a silent client counts as lost (MQTT 5, section 3.1.2.10)."""
_FEW = 64
"""Number of times of ended sessions from which on they may be removed together."""


class Silences:
    """The sessions with a keep-alive. Used under the dispatcher's lock."""

    def __init__(self) -> None:
        self._times: list[tuple[int, int]] = []
        """When to look at which session, by its number, as a heap. Those of ended sessions are removed some time."""
        self._sessions: dict[int, LiveSession] = {}
        self._numbers: dict[LiveSession, int] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        """Return how many sessions are watched."""
        return len(self._sessions)

    def watch(self, session: LiveSession, at: int | None = None) -> None:
        """Look at a session at a time; by default when its client would have been silent for too long."""
        self.forget(session)
        number = next(self._order)
        self._sessions[number] = session
        self._numbers[session] = number
        heapq.heappush(self._times, (_ends(session) if at is None else at, number))

    def forget(self, session: LiveSession) -> None:
        """Watch a session no longer."""
        number = self._numbers.pop(session, None)
        if number is not None:
            del self._sessions[number]
            if len(self._times) > 2 * len(self._sessions) + _FEW:
                self._times = [time for time in self._times if time[1] in self._sessions]
                heapq.heapify(self._times)

    def next_time(self) -> int | None:
        """Return when to look at the next session; None if none is watched."""
        while self._times and self._times[0][1] not in self._sessions:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None

    def silent(self, now: int) -> LiveSession | None:
        """Return a session whose client has been silent for too long, and watch it no longer; None if there is none."""
        while (time := self.next_time()) is not None and time <= now:
            session = self._sessions[self._times[0][1]]
            if _ends(session) <= now:
                self.forget(session)
                return session
            self.watch(session)
        return None


def _ends(session: LiveSession) -> int:
    return session.seen + microseconds(session.keep_alive * _SILENCE)
