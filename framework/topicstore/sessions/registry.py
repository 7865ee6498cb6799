"""`SessionRegistry`: the sessions of one open database, connected and stored, and the parts that they share.

There is at most one `Session` object for a client id. When the client connects again, here or in another process that
opened the database after this one crashed, the older object ends, and ``on_end`` is called (MQTT 5, section 3.1.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from topicstore.contract.errors import (
    InvalidArgumentError,
    SessionNotFoundError,
    SessionTakenOverError,
    TopicstoreError,
)
from topicstore.contract.times import Time, instant
from topicstore.pubsub.publish import Publisher
from topicstore.pubsub.retained_lookup import RetainedMessages
from topicstore.runtime.locks import FairLock, check_not_owned

from .clock import SessionClock, SessionClocks
from .commits import Commits
from .cursors import FilterCursor
from .dispatcher import Dispatcher
from .keep_alive import KeepAlive
from .locks import SessionLocks
from .long_keys import opened
from .model import Ended, SessionCounts, SessionInfo, Skipped, read_filter
from .records import SubscriptionRecord, is_durable
from .session import Session
from .session_store import StoredSession
from .shared.groups import Groups

if TYPE_CHECKING:
    from .interest_notes import InterestNotes
    from .shared.site_groups import SiteGroups

__all__ = ["SessionRegistry"]

_LEFT = (Ended.MOVED, Ended.UNCERTAIN)
"""The ends of sessions that are not committed, so that the sessions stay stored as open."""


class ReplayStarts:
    """Counts the subscriptions that begin in the past; each of them ends a running removal. Thread-safe."""

    def __init__(self) -> None:
        self.lock = FairLock()
        """Held during each step of a removal, and while a subscription is added. It is acquired before all others."""
        self.made = 0
        """The number of subscriptions whose making has ended."""
        self._making: set[object] = set()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Count a subscription that the block makes. Waits for at most one step of a removal."""
        check_not_owned(self.lock)
        one = object()
        try:
            with self.lock:
                self._making.add(one)
            yield
        finally:
            self.made += 1
            self._making.discard(one)

    def none_since(self, made: int) -> bool:
        """Return whether no subscription was made since ``made`` was read, and none is being made now.

        The caller holds `lock`.
        """
        return self.made == made and not self._making


class SessionRegistry:
    """The sessions of one open database, by client id, and the parts that they share.

    Changed under the sessions' mutex. Look-ups of connected sessions need no lock, because changes of the dictionary
    are atomic.
    """

    def __init__(self, publisher: Publisher) -> None:
        storage = publisher.storage()
        self._shards = storage.shards
        self.shared = storage.site is not None
        """Whether a cluster shares the database."""
        self.publisher = publisher
        """Raises `DatabaseClosedError` if the database was closed because nothing else referred to it."""
        self.filters = publisher.filters
        self.retained = RetainedMessages(storage)
        """The retained messages of all topics."""
        self.clocks = SessionClocks(storage)
        """The clocks of the stored times."""
        self.steady = storage.steady
        """The clock of times that are not stored."""
        self.dispatcher: Dispatcher[Session] = Dispatcher(
            publisher.hub, len(storage.shards), storage.shard_map.of, storage.clock, self.steady
        )
        self.mutex = self.dispatcher.mutex
        self.locks = SessionLocks(self.mutex, self.dispatcher)
        self.states = opened(storage, self.mutex.released)
        self.connected: dict[str, Session] = {}
        """The sessions whose clients are connected, among them all that are kept in memory."""
        self.left_open: set[str] = set()
        """The clients of sessions that have ended without a commit, or whose opening had no answer; for `Timers.tick`.
        """
        self.keep_alive = KeepAlive()
        self.commits = Commits(self.states, self.overtaken, self.over)
        self.skipped = Skipped()
        """The messages that were skipped because too many waited for their sessions."""
        self.groups = self._shared_subscriptions()
        self.replays = ReplayStarts()
        """The subscriptions that begin in the past."""
        self.notes = self._interest_notes()
        """The notes for other sites of a cluster; None if no cluster shares the database."""

    def _shared_subscriptions(self) -> Groups | SiteGroups:
        storage = self.publisher.storage()
        if storage.manifest.cluster is None:
            return Groups(self.states, self.dispatcher, self.filters)
        from .shared.site_groups import SiteGroups  # imported only on a site of a cluster

        return SiteGroups(storage, self.states, self.dispatcher, self.filters, self.catch_up, self._refresh)

    def _interest_notes(self) -> InterestNotes | None:
        if not self.shared:
            return None
        from .interest_notes import InterestNotes  # imported only on a site of a cluster

        return InterestNotes(self._shards, self.states, self.dispatcher, self.locks, self.connected)

    def note_begun_in_past(self, sessions: Iterable[Session]) -> dict[Session, TopicstoreError]:
        """Commit notes of subscriptions that begin in the past, and return the errors by session.

        Sites that remove messages read the notes. The caller holds no lock.
        """
        if self.notes is None or not self.publisher.storage().interest.tracks:
            return {}
        shards = {session: self.states.shard_of(session.client_id) for session in sessions}
        failures = self.notes.commit(set(shards.values()), begun_in_past=True)
        return {session: failures[shard] for session, shard in shards.items() if shard in failures}

    def check_may_write(self) -> None:
        """Raise an error if the sessions are closed, or if the database is closed or read-only."""
        self.dispatcher.check_open()
        self.publisher.storage().check_may_write()

    # --- shards ---

    def epochs(self) -> tuple[int | None, ...]:
        """Return, by shard, the fencing token under which this site owns it; None for shards of other sites."""
        return tuple(shard.writer.epoch for shard in self._shards)

    def check_owned(self, client_id: str) -> None:
        """Raise `ShardElsewhereError` if another site owns the shard of a client id."""
        self._shards[self.states.shard_of(client_id)].writer.check_owned()

    def end_moved(self) -> None:
        """End the sessions whose shards have moved; their clients open them again at the new owner."""
        epochs, shard_of = self.epochs(), self.states.shard_of
        for session in list(self.connected.values()) if self.shared else ():
            if session.epoch != epochs[shard_of(session.client_id)]:
                self.over(session, Ended.MOVED, notify=True)

    def catch_up(self, positions: Iterable[tuple[int, int]]) -> None:
        """Wait until these pairs of shard and position can be read here, unless their messages were lost.

        Another site may have delivered messages to a session that this site has not applied yet. Raises
        `StorageUnavailableError`.
        """
        behind = {shard for shard, position in positions if position > self._shards[shard].reader.watermark}
        if behind:
            self._refresh(behind)

    def _refresh(self, shards: Collection[int] | None = None) -> None:
        """Wait until reads see everything that any site has acknowledged, in some shards, or in all and their states.

        Raises `StorageUnavailableError` and `ShardElsewhereError`.
        """
        self.mutex.released(partial(self.publisher.storage().catch_up, shards, states=shards is None))

    def clock_of(self, client_id: str) -> SessionClock:
        """Return the clock by which a client's session expires."""
        return self.clocks.of(self.states.shard_of(client_id))

    # --- finding ---

    def clients(self, connected: bool | None = None) -> list[str]:
        """Return the client ids of all sessions, or only of connected or disconnected ones, sorted. Reads no record.

        Sessions that are being removed are included.
        """
        if connected:
            return sorted(self.connected)
        known = {*self.states.clients(), *self._only_in_memory()}
        return sorted(known.difference(self.connected if connected is False else ()))

    def count(self) -> int:
        """Return the number of sessions. Reads each shard's sessions in one scan."""
        in_memory = self._only_in_memory()
        return len(in_memory) + sum(client_id not in in_memory for client_id in self.states.lasting())

    def _only_in_memory(self) -> set[str]:
        return {client_id for client_id, session in list(self.connected.items()) if not session.stored}

    def counts(self) -> SessionCounts:
        """Return counts of the connected sessions. Takes no lock."""
        sessions = list(self.connected.values())
        return SessionCounts(
            connected=len(sessions),
            paused=sum(session.paused_since is not None for session in sessions),
            subscriptions=sum(len(session.cursors) for session in sessions),
            in_flight=sum(len(session.in_flight) for session in sessions),
            awaiting_pubrel=sum(len(session.incoming) for session in sessions),
            missed=self.dispatcher.missed,
            skipped=self.skipped,
        )

    def find(self, client_id: str) -> StoredSession | None:
        """Return the session of a client, or None."""
        session = self._in_memory(client_id)
        if session is not None:
            return session.stored_session
        found = self.states.find(client_id)
        return None if found is None or found.record.ending else found

    def found(self, client_id: str) -> StoredSession:
        """Return the session of a client. Raises `SessionNotFoundError`."""
        found = self.find(client_id)
        if found is None:
            raise SessionNotFoundError(f"there is no session of client {client_id!r}")
        return found

    def info(self, found: StoredSession) -> SessionInfo:
        """Return the information about a session."""
        info, session = self.states.info(found, self.clock_of(found.client_id).wall), self._in_memory(found.client_id)
        if session is None:
            return info
        cursors = list(session.cursors.values())
        return attrs.evolve(
            info,
            in_memory=True,
            subscriptions=tuple((cursor.topic_filter.text, cursor.options) for cursor in cursors),
            in_flight=len(session.in_flight),
            awaiting_pubrel=len(session.incoming),
        )

    def all_subscriptions(self) -> Iterator[SubscriptionRecord]:
        """Yield the subscriptions of all sessions. Under the sessions' mutex."""
        yield from self.states.all_subscriptions()
        for session in self.connected.values():
            if not session.stored:
                yield from (cursor.record() for cursor in session.cursors.values() if isinstance(cursor, FilterCursor))

    def load_filters(self) -> None:
        """Load the filters of all durable subscriptions, unless they are loaded. Takes the lock of all sessions.

        Does nothing on a site of a cluster, where all messages are stored.
        """
        if not (self.filters.loaded or self.shared):
            self.locks.hold_all(self._load_filters_locked)

    def _load_filters_locked(self) -> None:
        if not self.filters.loaded:
            counts = Counter(record.topic_filter for record in self.all_subscriptions() if is_durable(record))
            self.filters.load((read_filter(text), count) for text, count in counts.items())

    def _in_memory(self, client_id: str) -> Session | None:
        session = self.connected.get(client_id)
        return None if session is None or session.stored else session

    def stuck_since(self, client_id: str) -> int | None:
        """Return the time since which a session is held back, or since which its window is full; else None."""
        session = self.connected.get(client_id)
        if session is None:
            return None
        return session.stuck_since if session.held_since is None else session.held_since

    # --- ending ---

    def over(self, session: Session, why: Ended, *, notify: bool) -> None:
        """End a session object, and remove it. ``notify``: call ``on_end``, because no call of the object ended it.

        This thread calls ``on_end`` after it has released the mutex.
        """
        known = self.connected.get(session.client_id) is session
        if known:
            del self.connected[session.client_id]
        if session.ended is None:
            if why in _LEFT and session.stored:
                self.left_open.add(session.client_id)
            session.end(why)
            self.keep_alive.forget(session)
            if notify and known and session.on_end is not None:
                call = partial(session.on_end, session, why)
                self.mutex.after_release(f"on_end of session {session.client_id!r}", call)

    def overtaken(self, session: Session) -> SessionTakenOverError:
        """End the object of a session that was opened elsewhere, and return the error to raise."""
        self.over(session, Ended.TAKEN_OVER, notify=True)
        return SessionTakenOverError(f"session {session.client_id!r} is over: {Ended.TAKEN_OVER.value}")

    def own(self, sessions: Iterable[Session]) -> list[Session]:
        """Return sessions as a list. Raises `InvalidArgumentError` if one is not of this database."""
        found = list(sessions)
        for session in set(found):
            if not isinstance(session, Session) or session.dispatcher is not self.dispatcher:
                raise InvalidArgumentError(f"{session!r} is not a session of this database")
        return found

    def instant(self, when: Time) -> int:
        """Convert a time, in the forms that `Database.replay` accepts, to microseconds since the epoch."""
        storage = self.publisher.storage()
        return instant(when, storage.clock, allow_ancient=storage.allow_ancient)
