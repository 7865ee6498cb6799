"""`Connections`: the connected sessions, and the takeover of a session by a newer connection.

There is at most one `Session` object for a client id. When the client connects again, here or in another process that
opened the database after this one crashed, the older object ends, and its owner is notified (MQTT 5, section 3.1.4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from topicstore.contract.errors import SessionTakenOverError

from .entrance import Entrance
from .live_session import LiveSession
from .model import Ended
from .session import Session

__all__ = ["Connections"]


class Connections:
    """The connected sessions of one open database, by client id.

    Changed under the dispatcher's lock. Look-ups need no lock, because changes of the dictionaries are atomic.
    """

    def __init__(self, entrance: Entrance, ended: Callable[[LiveSession], None]) -> None:
        """Create without sessions. ``ended`` is called with each session that has ended."""
        self._entrance = entrance
        self._ended = ended
        self.live: dict[str, LiveSession] = {}
        """The internal objects of the sessions."""
        self.sessions: dict[str, Session] = {}
        """The public objects of the sessions."""

    def add(self, live: LiveSession, session: Session) -> None:
        """Add a session that was opened."""
        self.live[live.client_id] = live
        self.sessions[live.client_id] = session

    def stuck_since(self, client_id: str) -> int | None:
        """Return the time since which a session has been held back or its window full; None if it is neither."""
        live = self.live.get(client_id)
        if live is None:
            return None
        return live.stuck_since if live.held_since is None else live.held_since

    def over(self, live: LiveSession, why: Ended, *, notify: bool) -> None:
        """End a session object, and remove it. ``notify``: call ``on_end``, because the owner didn't end the session.

        This thread calls ``on_end`` after it has released the lock.
        """
        session = None
        if self.live.get(live.client_id) is live:
            del self.live[live.client_id]
            session = self.sessions.pop(live.client_id)
        if live.ended is None:
            live.end(why)
            self._ended(live)
            if notify and session is not None and session.on_end is not None:
                call = partial(session.on_end, session, why)
                self._entrance.afterwards(f"on_end of session {live.client_id!r}", call)

    def overtaken(self, live: LiveSession) -> SessionTakenOverError:
        """End the object of a session that was opened elsewhere, and return the error to raise."""
        self.over(live, Ended.TAKEN_OVER, notify=True)
        return SessionTakenOverError(f"session {live.client_id!r} is over: {Ended.TAKEN_OVER.value}")
