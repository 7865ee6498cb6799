"""`KeepAlive`: finds the clients that have exceeded their keep alive (MQTT 5, section 3.1.2.10).

A session is checked at the earliest time at which its keep alive may be exceeded. If the client has sent packets since,
the next check follows 1.5 keep alives after the last packet. So a packet from a client causes no work here. A session
that has ended is forgotten at once, however long its keep alive is.
"""

from __future__ import annotations

import heapq
import itertools

from .clock import microseconds
from .session import Session

__all__ = ["KeepAlive"]

_SILENCE = 1.5
"""The factor of the keep alive after which a silent client counts as lost (MQTT 5, section 3.1.2.10)."""
_FEW = 64
"""Smallest number of outdated heap entries that are removed together."""


class KeepAlive:
    """The connected sessions with a keep alive. Used under the sessions' mutex."""

    def __init__(self) -> None:
        self._times: list[tuple[int, int]] = []
        """A heap of the times of the next checks, with session numbers. Entries of ended sessions are removed later."""
        self._sessions: dict[int, Session] = {}
        self._numbers: dict[Session, int] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        """Return the number of watched sessions."""
        return len(self._sessions)

    def watch(self, session: Session, at: int | None = None) -> None:
        """Check a session at time ``at``; by default when its keep alive will be exceeded."""
        self.forget(session)
        number = next(self._order)
        self._sessions[number] = session
        self._numbers[session] = number
        heapq.heappush(self._times, (_ends(session) if at is None else at, number))

    def forget(self, session: Session) -> None:
        """Stop watching a session."""
        number = self._numbers.pop(session, None)
        if number is not None:
            del self._sessions[number]
            if len(self._times) > 2 * len(self._sessions) + _FEW:
                self._times = [time for time in self._times if time[1] in self._sessions]
                heapq.heapify(self._times)

    def next_time(self) -> int | None:
        """Return the time of the next check; None if no session is watched."""
        while self._times and self._times[0][1] not in self._sessions:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None

    def silent(self, now: int) -> Session | None:
        """Return a session whose keep alive is exceeded, and stop watching it; None if there is none."""
        while (time := self.next_time()) is not None and time <= now:
            session = self._sessions[self._times[0][1]]
            if _ends(session) <= now:
                self.forget(session)
                return session
            self.watch(session)
        return None


def _ends(session: Session) -> int:
    return session.seen + microseconds(session.keep_alive * _SILENCE)
