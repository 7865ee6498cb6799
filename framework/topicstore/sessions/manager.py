"""`Sessions`: the durable sessions of one database."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from topicstore.contract.arguments import check_within
from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    SessionNotFoundError,
    TopicstoreError,
)
from topicstore.contract.topics import check_utf8
from topicstore.pubsub.publishing import PublishResult
from topicstore.releasing import release_all
from topicstore.shard.state import FrameworkWrite

from .commits import Commits
from .context import SessionContext
from .database_parts import DatabaseParts, Messages, StateWrites
from .dispatch import Dispatcher
from .durable_filters import DurableFilters
from .inflight import MAX_PACKET_ID
from .live_session import LiveSession
from .model import KEEP, Delivery, Ended, GroupInfo, Keep, Release, SessionInfo, Will
from .records import NEVER, VERSION, Keys, SessionRecord
from .session import Session
from .session_state import Found, SessionState, encode_session, will_key
from .shared.groups import Groups
from .subscribing import resume
from .takeover import Connections
from .timers import Timers, microseconds
from .wills import Wills, disconnected

__all__ = ["Sessions"]

_TOGETHER = 1_000
"""Sessions that are committed together."""


class Sessions:
    """The durable sessions of one open database, as `Database.sessions` gives it.

    A session belongs to a client id. While its client is connected there is a `Session` object;
    otherwise it is only stored. Deliveries are fetched: `wait` tells when there are some, and `deliver`
    returns them for all sessions that have any, committed together. `tick` is to be called as often as
    it asks for: all that depends on time happens there.

    All methods may be called from any thread.
    """

    def __init__(self, parts: DatabaseParts) -> None:
        self.states = SessionState(parts.states, parts.shard_of)
        """Internal, as `dispatcher` is."""
        self.dispatcher: Dispatcher[LiveSession] = Dispatcher(
            parts.hub, len(parts.states), parts.shard_of, parts.clock, parts.steady
        )
        self.shared = Groups(self.states, self.dispatcher)
        """What shared subscriptions may be told: `Groups.slow_after`, `Groups.handover_after`."""
        self._clock = parts.steady
        self._lock = self.dispatcher.lock
        """Guards all that follows; `DurableFilters.wants` takes it when it has to."""
        self._connections = Connections()
        self._commits = Commits(self.states, self._connections.overtaken)
        self._filters = DurableFilters(self.states.all_subscriptions, self._lock)

        def publish(messages: Messages, *, state: StateWrites | None = None) -> PublishResult:
            return parts.publish(messages, state, self._filters.wants)

        self._context = SessionContext(
            dispatcher=self.dispatcher,
            states=self.states,
            filters=self._filters,
            groups=self.shared,
            commits=self._commits,
            publish=publish,
            retained=parts.retained,
            end=self._end_locked,
        )
        self._wills = Wills(self.states, parts.storage, publish)
        self._timers = Timers(self._context, self._connections, self._wills)

    # --- opening ---

    def open(
        self,
        client_id: str,
        *,
        clean_start: bool = False,
        expiry_interval: float | None = 0.0,
        receive_maximum: int = MAX_PACKET_ID,
        keep_alive: float = 0,
        will: Will | None = None,
        on_end: Callable[[Session, Ended], None] | None = None,
    ) -> Session:
        """Open the session of a client, or make one; `Session.present` says which. Committed when it returns.

        clean_start:     end the session there was, and begin a new one.
        expiry_interval: seconds that the session lasts after its connection; 0: as long as that; None: for good.
        receive_maximum: messages of QoS 1 and 2 that may be sent and not acknowledged.
        keep_alive:      seconds; a client that is silent for one and a half times that is lost; 0: it may be.
        will:            what is published when the connection is lost.
        on_end:          called once, when something other than the session's own methods ends it. Be quick.

        An older `Session` of the client is taken over: it is of no more use, wherever it is.

        Raises `InvalidArgumentError`, and what reading and writing state raises.
        """
        _check_opening(client_id, expiry_interval, receive_maximum, keep_alive, will)
        with self._lock:
            self._check_open()
            if client_id in self._connections.live:
                self._take_over_locked(self._connections.live[client_id], Ended.TAKEN_OVER)
            found, guard = self._before_locked(client_id, clean_start=clean_start)
            now = self._clock()
            record = SessionRecord(
                VERSION,
                guard=max(now, guard + 1),
                created=now if found is None else found.record.created,
                connected=True,
                expiry_interval=NEVER if expiry_interval is None else microseconds(expiry_interval),
                will_delay=NEVER if will is None else microseconds(will.delay),
            )
            opened = encode_session(client_id, record)
            self._write_opening_locked(found, opened, will)
            live = LiveSession(
                opened,
                self.states.window(client_id),
                self.states.incoming(client_id),
                self.dispatcher,
                self._filters,
                self._context.retained,
                receive_maximum=receive_maximum,
                keep_alive=keep_alive,
            )
            session = Session(self._context, live, present=found is not None, on_end=on_end)
            if session.present:
                self.dispatcher.listen_locked()  # what came before is not for it
                try:
                    resume(self._context, live)
                except BaseException:
                    live.end(Ended.LOST)  # what it follows by now is left again
                    raise
            self._connections.add(live, session)
            if keep_alive:
                self._timers.watch(live)
            return session

    def _take_over_locked(self, session: LiveSession, why: Ended) -> None:
        """Commit what an older session object knows, and end it."""
        try:
            self._commits.checkpoint([session])
        finally:
            self._connections.over(session, why, told=True)

    def _before_locked(self, client_id: str, *, clean_start: bool) -> tuple[Found | None, int]:
        """Return the session that is to be resumed, if there is one, and the guard of the one there was.

        One that is over, or is to be, is removed. A will is published unless it may be withdrawn.
        """
        found = self.states.find(client_id)
        if found is None:
            return None, 0
        record, now = found.record, self._clock()
        expired = NEVER < record.expires <= now or (record.connected and record.expiry_interval == 0)
        if clean_start or expired or record.ending:
            self._timers.remove(found)
            return None, record.guard
        if NEVER < record.will_due <= now or (record.connected and record.will_delay == 0):
            found = self._wills.publish(found)
        return found, record.guard

    def _write_opening_locked(self, found: Found | None, opened: Found, will: Will | None) -> None:
        writes = self.states.change(opened.client_id, found, opened)
        if will is not None:
            self._wills.store(opened.client_id, will, writes)
            return
        if found is not None and found.record.will_delay != NEVER:
            writes.append(FrameworkWrite(will_key(Keys(opened.client_id)), None))
        self.states.write_for(opened.client_id, writes)

    def get(self, client_id: str) -> Session | None:
        """Return the session of a client that is connected, or None."""
        with self._lock:
            return self._connections.sessions.get(client_id)

    def wants(self, topic: str) -> bool:
        """Say whether a durable subscription of any session, connected or not, matches a topic."""
        return self._filters.wants(topic)

    # --- delivering ---

    def deliver(self, limit_each: int = 1_000) -> list[tuple[Session, list[Delivery | Release]]]:
        """Return what to send now for all sessions that have something: at most about ``limit_each`` messages each.

        What `Session.deliver` says of one holds for all, which are committed together, an engine write a
        shard. What fails is left out, shows in `Session.failure`, and is tried again at the next tick.
        """
        with self._lock:
            self._check_open()
            ready = self.dispatcher.next_ready_locked(_TOGETHER)
            try:
                drafts = [draft for live in ready if (draft := live.draft(limit_each)) is not None]
                self._commits.commit(drafts)
            except BaseException:
                for live in ready:
                    live.rewind()
                raise
            sessions = self._connections.sessions
            taken = [(live, _take_locked(live, limit_each)) for live in ready if live.ended is None]
            return [(sessions[live.client_id], items) for live, items in taken if items]

    def wait(self, timeout: float | None = None) -> bool:
        """Return True as soon as there is something to deliver, False if there is nothing after ``timeout`` seconds.

        Raises `DatabaseClosedError` if the database is closed, also meanwhile.
        """
        return self.dispatcher.wait(timeout)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Do the same in an event loop, which goes on meanwhile."""
        return await self.dispatcher.wait_async(timeout)

    # --- committing ---

    def checkpoint(self) -> None:
        """Commit what was acknowledged in all sessions. `tick` does it every 15 seconds.

        Raises the first error; what could be committed was.
        """
        with self._lock:
            self._check_open()
            failures = self._commits.checkpoint(list(self.dispatcher.dirty))
        if failures:
            raise failures[0]

    # --- ending connections ---

    def _end_locked(
        self, session: LiveSession, why: Ended, *, send_will: bool, expiry_interval: float | Keep | None = KEEP
    ) -> None:
        """Commit everything of a session, and the end of its connection."""
        interval = session.found.record.expiry_interval
        if not isinstance(expiry_interval, Keep):
            _check_seconds("expiry_interval", expiry_interval)
            interval = NEVER if expiry_interval is None else microseconds(expiry_interval)
        now = self._clock()
        after = encode_session(session.client_id, disconnected(session.found.record, now, interval, will=send_will))
        draft = session.last_draft()
        writes = self.states.change(session.client_id, session.found, after)
        if draft is not None:
            writes += draft.writes[1:]  # all but the guard, which the change is
        if not send_will:
            writes.append(FrameworkWrite(will_key(session.keys), None))
        self._commits.write(session, writes)
        self._connections.over(session, why, told=why not in (Ended.DISCONNECTED, Ended.LOST))
        self._timers.expect(after)
        self._timers.run(self.states.shard_of(session.client_id), now)

    def kick(self, client_id: str) -> bool:
        """End the connection of a client's session, as if it were lost; False if it has none.

        One that a crash left open counts. Raises `SessionNotFoundError`.
        """
        with self._lock:
            self._check_open()
            session = self._connections.live.get(client_id)
            if session is not None:
                self._end_locked(session, Ended.KICKED, send_will=True)
                return True
            found, now = self._found_locked(client_id), self._clock()
            if not found.record.connected:
                return False
            self.states.write_for(client_id, self._timers.lose(found, now))
            self._timers.run(self.states.shard_of(client_id), now)
            return True

    def expire(self, client_id: str) -> None:
        """End a client's session now, and its connection if it has one. Raises `SessionNotFoundError`."""
        with self._lock:
            self._check_open()
            found = self._found_locked(client_id)
            session = self._connections.live.get(client_id)
            if session is not None:
                self._take_over_locked(session, Ended.EXPIRED)
            self._timers.remove(found)

    def close(self) -> None:
        """Commit everything and end all connections, as if they were lost. The database's close calls it."""
        with self._lock:
            ends = [partial(self._close_locked, session) for session in self._connections.live.values()]
            release_all((*ends, self.dispatcher.close))

    def _close_locked(self, session: LiveSession) -> None:
        try:
            self._end_locked(session, Ended.CLOSED, send_will=True)
        except TopicstoreError:  # its mark stays, so the next opening deals with it
            self._connections.over(session, Ended.CLOSED, told=True)

    # --- looking ---

    def groups(self) -> list[GroupInfo]:
        """Return the shared subscriptions, sorted by filter, with their members, connected or not."""
        with self._lock:
            self._check_open()
            self.dispatcher.listen_locked()
            return self.shared.list()

    def list(self) -> list[SessionInfo]:
        """Return all sessions as they are stored, sorted by client id, without what they have in flight."""
        with self._lock:
            self._check_open()
            found = [self.states.find(client_id) for client_id in sorted(self.states.clients())]
            return [self._info(one) for one in found if one is not None and not one.record.ending]

    def inspect(self, client_id: str) -> SessionInfo:
        """Return a session as it is stored. Raises `SessionNotFoundError`."""
        with self._lock:
            self._check_open()
            subscriptions = [record for _, record in self.states.subscriptions(client_id)]
            return attrs.evolve(
                self._info(self._found_locked(client_id)),
                subscriptions=tuple((record.topic_filter, record.eras[-1].options) for record in subscriptions),
                in_flight=len(self.states.window(client_id)),
                awaiting_release=len(self.states.incoming(client_id)),
            )

    def _info(self, found: Found) -> SessionInfo:
        record = found.record
        return SessionInfo(
            client_id=found.client_id,
            connected=found.record.connected,
            created=record.created,
            expiry_interval=None if record.expiry_interval == NEVER else record.expiry_interval / 1e6,
            expires=None if record.expires == NEVER else record.expires,
            will_due=None if record.will_due == NEVER else record.will_due,
        )

    def _found_locked(self, client_id: str) -> Found:
        found = self.states.find(client_id)
        if found is None or found.record.ending:
            raise SessionNotFoundError(f"there is no session of client {client_id!r}")
        return found

    # --- time ---

    def tick(self) -> float:
        """Do what is due; return in how many seconds to call again.

        Wills are published, sessions end, silent clients are lost, what was acknowledged is committed, what
        failed is tried again. Never early. What fails is tried again at the next call.

        None of it minds that the clock is set while the database is open: it is trusted at the opening, and time that
        really passes is added. What has to outlive a restart, the expiry of sessions and the delays of wills, is
        stored as such times; so a clock that was set meanwhile counts at the next opening.
        """
        with self._lock:
            self._check_open()
            return self._timers.tick(self._clock())

    def _check_open(self) -> None:
        if self.dispatcher.closed:
            raise DatabaseClosedError("the database is closed")


def _take_locked(session: LiveSession, limit: int) -> list[Delivery | Release]:
    try:
        return session.take(limit)
    except TopicstoreError as failure:  # of reading what is to be sent again
        session.stall(failure)
        return []


def _check_opening(
    client_id: str, expiry_interval: float | None, receive_maximum: int, keep_alive: float, will: Will | None
) -> None:
    if check_utf8(client_id, "client id", InvalidArgumentError) == "":
        raise InvalidArgumentError("a session's client id has at least one character")
    check_within("receive_maximum", receive_maximum, 1, MAX_PACKET_ID)
    _check_seconds("expiry_interval", expiry_interval)
    _check_seconds("keep_alive", keep_alive)
    _check_seconds("a will's delay", 0 if will is None else will.delay)


def _check_seconds(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e10):
        raise InvalidArgumentError(f"{name} is a number of seconds, not {value!r}")
