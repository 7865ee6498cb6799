"""`Connections`: the connected sessions, and the takeover of a session by a newer connection.

There is at most one `Session` object for a client id. When the client connects again, here or in another process that
opened the database after this one crashed, the older object ends, and its owner is notified (MQTT 5, section 3.1.4).

`Lookup` finds sessions, stored or kept in memory, and their `SessionInfo`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs

from topicstore.contract.errors import SessionNotFoundError, SessionTakenOverError
from topicstore.pubsub.durable_filters import DurableFilters

from .cursors import FeedSource
from .live_session import LiveSession
from .locks import SessionMutex
from .model import Ended, SessionCounts, SessionInfo
from .records import SubscriptionRecord, is_durable
from .session import Session
from .session_store import Found, SessionState
from .shared_filters import read_filter

__all__ = [
    "Connections",
    "Lookup",
]


class Lookup:
    """Finds the sessions of one open database.

    live: the connected sessions by client id, among them all that are kept in memory.
    wall: converts a time of the sessions' clock to the wall clock.
    """

    def __init__(self, states: SessionState, live: Mapping[str, LiveSession], wall: Callable[[int], int]) -> None:
        self._states = states
        self.live = live
        self._wall = wall

    def clients(self, connected: bool | None = None) -> list[str]:
        """Return the client ids of all sessions, or only of connected or disconnected ones, sorted. Reads no record.

        Sessions that are being removed are included.
        """
        if connected:
            return sorted(self.live)
        known = {*self._states.clients(), *self._only_in_memory()}
        return sorted(known.difference(self.live if connected is False else ()))

    def count(self) -> int:
        """Return the number of sessions. Reads each shard's sessions in one scan."""
        in_memory = self._only_in_memory()
        return len(in_memory) + sum(client_id not in in_memory for client_id in self._states.lasting())

    def _only_in_memory(self) -> set[str]:
        return {client_id for client_id, live in list(self.live.items()) if not live.stored}

    def counts(self, missed: int) -> SessionCounts:
        """Return counts of the connected sessions; ``missed`` is `SessionCounts.missed`."""
        live = list(self.live.values())
        return SessionCounts(
            connected=len(live),
            paused=sum(session.paused_since is not None for session in live),
            subscriptions=sum(len(session.sources) for session in live),
            in_flight=sum(len(session.window) for session in live),
            awaiting_pubrel=sum(len(session.incoming) for session in live),
            missed=missed,
        )

    def find(self, client_id: str) -> Found | None:
        """Return the session of a client, or None."""
        live = self._in_memory(client_id)
        if live is not None:
            return live.found
        found = self._states.find(client_id)
        return None if found is None or found.record.ending else found

    def found(self, client_id: str) -> Found:
        """Return the session of a client. Raises `SessionNotFoundError`."""
        found = self.find(client_id)
        if found is None:
            raise SessionNotFoundError(f"there is no session of client {client_id!r}")
        return found

    def info(self, found: Found) -> SessionInfo:
        """Return the information about a session."""
        info, live = self._states.info(found, self._wall), self._in_memory(found.client_id)
        if live is None:
            return info
        sources = list(live.sources.values())
        return attrs.evolve(
            info,
            in_memory=True,
            subscriptions=tuple((source.topic_filter.text, source.options) for source in sources),
            in_flight=len(live.window),
            awaiting_pubrel=len(live.incoming),
        )

    def all_subscriptions(self) -> Iterator[SubscriptionRecord]:
        """Yield the subscriptions of all sessions. Under the sessions' mutex."""
        yield from self._states.all_subscriptions()
        for live in self.live.values():
            if not live.stored:
                yield from (source.record() for source in live.sources.values() if isinstance(source, FeedSource))

    def load_filters(self, filters: DurableFilters) -> None:
        """Load the filters of all durable subscriptions, unless they are loaded. The caller holds all locks."""
        if not filters.loaded:
            counts = Counter(record.topic_filter for record in self.all_subscriptions() if is_durable(record))
            filters.load((read_filter(text), count) for text, count in counts.items())

    def _in_memory(self, client_id: str) -> LiveSession | None:
        live = self.live.get(client_id)
        return None if live is None or live.stored else live


class Connections:
    """The connected sessions of one open database, by client id.

    Changed under the sessions' mutex. Look-ups need no lock, because changes of the dictionaries are atomic.
    """

    def __init__(self, mutex: SessionMutex, ended: Callable[[LiveSession], None]) -> None:
        """Create without sessions. ``ended`` is called with each session that has ended."""
        self._mutex = mutex
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
                self._mutex.after_release(f"on_end of session {live.client_id!r}", call)

    def overtaken(self, live: LiveSession) -> SessionTakenOverError:
        """End the object of a session that was opened elsewhere, and return the error to raise."""
        self.over(live, Ended.TAKEN_OVER, notify=True)
        return SessionTakenOverError(f"session {live.client_id!r} is over: {Ended.TAKEN_OVER.value}")
