"""`Connections`: the sessions whose clients are connected, and how an older object of one is taken over.

There is one `Session` object for a client id at most. When the client connects anew, here or by another process that
opened the database after this one crashed, the older object is of no more use, and its owner is told.
"""

from __future__ import annotations

from topicstore.contract.errors import SessionTakenOverError

from .live_session import LiveSession
from .model import Ended
from .session import Session

__all__ = ["Connections"]


class Connections:
    """The connected sessions of one open database, by client id. Used under the dispatcher's lock."""

    def __init__(self) -> None:
        self.live: dict[str, LiveSession] = {}
        """What is inside of them."""
        self.sessions: dict[str, Session] = {}
        """What programs hold."""

    def add(self, live: LiveSession, session: Session) -> None:
        """A session was opened."""
        self.live[live.client_id] = live
        self.sessions[live.client_id] = session

    def stuck_since(self, client_id: str) -> int | None:
        """Return since when a session's window has been full; None if it is not, or the session is not connected."""
        live = self.live.get(client_id)
        return None if live is None else live.stuck_since

    def over(self, live: LiveSession, why: Ended, *, told: bool) -> None:
        """A session object is of no more use; tell its owner, if that didn't end it."""
        session = None
        if self.live.get(live.client_id) is live:
            del self.live[live.client_id]
            session = self.sessions.pop(live.client_id)
        if live.ended is None:
            live.end(why)
            if told and session is not None and session.on_end is not None:
                session.on_end(session, why)

    def overtaken(self, live: LiveSession) -> SessionTakenOverError:
        """Somebody else opened a session: end this object, and return what to raise."""
        self.over(live, Ended.TAKEN_OVER, told=True)
        return SessionTakenOverError(f"session {live.client_id!r} is over: {Ended.TAKEN_OVER.value}")
