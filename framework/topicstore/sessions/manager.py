"""`Sessions`: the durable sessions of one database."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import attrs
import msgspec

from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    SessionNotFoundError,
    SessionTakenOverError,
    StateConflictError,
    TopicstoreError,
)
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import check_utf8
from topicstore.shard.state import FrameworkWrite

from .dispatch import Dispatcher
from .durable_filters import DurableFilters, is_durable
from .inflight import MAX_PACKET_ID
from .model import KEEP, Delivery, Ended, GroupInfo, Keep, Release, SessionInfo, Will
from .records import EXPIRY, VERSION, Keys, SessionRecord
from .session import Draft, Session
from .session_state import NEVER, Found, SessionState, encode_session
from .shared.groups import Groups
from .sources import Source

if TYPE_CHECKING:
    from topicstore.database import Database

__all__ = ["Sessions"]

CHECKPOINT_INTERVAL = 15_000_000
"""Microseconds after which what was acknowledged is committed."""
_CHUNK = 1_000
"""Sessions left open by a crash that one tick deals with, a shard."""
_SILENCE = 1.5
"""Keep-alives after which a silent client counts as lost (MQTT 5, section 3.1.2.10)."""
_LONGEST_PAUSE = 1_000_000
"""Microseconds between ticks at most."""
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

    def __init__(self, db: Database) -> None:
        self.storage = SessionState(db)
        """Internal, as `dispatcher` and `wanted` are."""
        self.dispatcher: Dispatcher[Session] = Dispatcher(db.hub, len(db.shards), self.storage.shard_of, db.clock)
        self.wanted = DurableFilters(self.storage.all_subscriptions, self.dispatcher.lock)
        self.shared = Groups(self.storage, self.dispatcher)
        """What shared subscriptions may be told: `Groups.slow_after`, `Groups.handover_after`."""
        self._lock = self.dispatcher.lock
        self._live: dict[str, Session] = {}
        self._failing: list[tuple[Session, Sequence[Source]]] = []
        self._left_open: list[Iterator[str] | None] = [self.storage.left_open(shard) for shard in range(len(db.shards))]
        """By shard, clients whose sessions a crash may have left open; None: all were looked at."""
        self._next_timer: list[int | None] = [0] * len(db.shards)
        """By shard, when its earliest stored timer is due at the earliest; None: there is none."""
        self._silences: list[tuple[int, int, Session]] = []
        """When to look whether a client kept silent for too long: a heap."""
        self._order = itertools.count()
        self._checkpoint_due: int | None = None

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
            if client_id in self._live:
                self._take_over(self._live[client_id], Ended.TAKEN_OVER)
            found, guard = self._before(client_id, clean_start=clean_start)
            now = self.storage.clock()
            record = SessionRecord(
                VERSION,
                guard=max(now, guard + 1),
                created=now if found is None else found.record.created,
                connected=True,
                expiry_interval=NEVER if expiry_interval is None else _microseconds(expiry_interval),
                will_delay=NEVER if will is None else _microseconds(will.delay),
            )
            opened = encode_session(client_id, record)
            self._write_opening(found, opened, will)
            session = Session(
                self,
                opened,
                window=self.storage.window(client_id),
                incoming=self.storage.incoming(client_id),
                present=found is not None,
                receive_maximum=receive_maximum,
                keep_alive=keep_alive,
                on_end=on_end,
            )
            if found is not None:
                self.dispatcher.listen()  # what came before is not for it
                session.resume()
            self._live[client_id] = session
            if keep_alive:
                self._watch(session)
            return session

    def _take_over(self, session: Session, why: Ended) -> None:
        """Commit what an older session object knows, and end it."""
        try:
            self.checkpoint_of([session])
        finally:
            self._over(session, why, told=True)

    def _before(self, client_id: str, *, clean_start: bool) -> tuple[Found | None, int]:
        """Return the session that is to be resumed, if there is one, and the guard of the one there was.

        One that is over, or is to be, is removed. A will is published unless it may be withdrawn.
        """
        found = self.storage.find(client_id)
        if found is None:
            return None, 0
        record, now = found.record, self.storage.clock()
        expired = NEVER < record.expires <= now or (record.connected and record.expiry_interval == 0)
        if clean_start or expired or record.ending:
            self._remove(found)
            return None, record.guard
        if NEVER < record.will_due <= now or (record.connected and record.will_delay == 0):
            found = self._publish_will(found)
        return found, record.guard

    def _write_opening(self, found: Found | None, opened: Found, will: Will | None) -> None:
        writes = self.storage.change(opened.client_id, found, opened)
        if will is not None:
            self.storage.write_with_will(opened.client_id, will, writes)
            return
        if found is not None and found.record.will_delay != NEVER:
            writes.append(FrameworkWrite(self.storage.will_key(Keys(opened.client_id)), None))
        self.storage.write_for(opened.client_id, writes)

    def get(self, client_id: str) -> Session | None:
        """Return the session of a client that is connected, or None."""
        with self._lock:
            return self._live.get(client_id)

    def wants(self, topic: str) -> bool:
        """Say whether a durable subscription of any session, connected or not, matches a topic."""
        return self.wanted.wants(topic)

    # --- delivering ---

    def deliver(self, limit_each: int = 1_000) -> list[tuple[Session, list[Delivery | Release]]]:
        """Return what to send now for all sessions that have something: at most about ``limit_each`` messages each.

        What `Session.deliver` says of one holds for all, which are committed together, an engine write a
        shard. What fails is left out, shows in `Session.failure`, and is tried again at the next tick.
        """
        with self._lock:
            self._check_open()
            sessions = self.dispatcher.next_ready(_TOGETHER)
            try:
                drafts = [draft for session in sessions if (draft := session.draft(limit_each)) is not None]
                self._commit(drafts)
            except BaseException:
                for session in sessions:
                    session.rewind()
                raise
            taken = [(session, self._take(session, limit_each)) for session in sessions if session.ended is None]
            return [(session, items) for session, items in taken if items]

    @staticmethod
    def _take(session: Session, limit: int) -> list[Delivery | Release]:
        try:
            return session.take(limit)
        except TopicstoreError as failure:  # of reading what is to be sent again
            session.stall(failure)
            return []

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
            failures = self.checkpoint_of(list(self.dispatcher.dirty))
        if failures:
            raise failures[0]

    def checkpoint_of(self, sessions: Iterable[Session]) -> list[TopicstoreError]:
        """Commit what was acknowledged in some sessions; return what failed. With the lock; internal."""
        drafted = {session: session.last_draft() for session in sessions}
        failures = self._commit([draft for draft in drafted.values() if draft is not None])
        for session in drafted:
            if session.ended is None and session.failure is None:
                session.clean()
        return failures

    def commit_one(self, draft: Draft) -> None:
        """Commit what one session is about to hand out, or raise. With the lock; internal."""
        for failure in self._commit([draft]):
            raise failure

    def commit_for(self, session: Session, writes: list[StateWrite]) -> None:
        """Commit writes of a session that are conditional on its guard. With the lock; internal."""
        try:
            self.storage.write_for(session.client_id, writes)
        except StateConflictError as conflict:
            raise self.overtaken(session) from conflict

    def _commit(self, drafts: list[Draft]) -> list[TopicstoreError]:
        """Commit what sessions are about to hand out, an engine write a shard; return what failed."""
        by_shard: defaultdict[int, list[Draft]] = defaultdict(list)
        for draft in drafts:
            by_shard[self.storage.shard_of(draft.session.client_id)].append(draft)
        return [failure for shard, some in by_shard.items() for failure in self._commit_in(shard, some)]

    def _commit_in(self, shard: int, drafts: list[Draft]) -> list[TopicstoreError]:
        writes = [write for draft in drafts for write in draft.writes]
        try:
            if writes:
                self.storage.write(shard, writes)
        except StateConflictError as conflict:
            held = [draft for draft in drafts if self.storage.current(draft.session.found)]
            if len(held) == len(drafts):
                return self._failed(drafts, conflict)
            errors = [self.overtaken(draft.session) for draft in drafts if draft not in held]
            return [*errors, *self._commit_in(shard, held)]
        except TopicstoreError as failure:
            return self._failed(drafts, failure)
        for draft in drafts:
            draft.session.settle(draft)
        return []

    @staticmethod
    def _failed(drafts: list[Draft], failure: TopicstoreError) -> list[TopicstoreError]:
        for draft in drafts:
            draft.session.fail(draft, failure)
        return [failure]

    def retry(self, session: Session, sources: Iterable[Source]) -> None:
        """Try what failed again at the next tick. With the lock; internal."""
        self._failing.append((session, tuple(sources)))

    def overtaken(self, session: Session) -> SessionTakenOverError:
        """Somebody else opened a session: end this object, and return what to raise. With the lock; internal."""
        self._over(session, Ended.TAKEN_OVER, told=True)
        return SessionTakenOverError(f"session {session.client_id!r} is over: {Ended.TAKEN_OVER.value}")

    # --- ending connections ---

    def end(
        self, session: Session, why: Ended, *, send_will: bool, expiry_interval: float | Keep | None = KEEP
    ) -> None:
        """Commit everything of a session, and the end of its connection. With the lock; internal."""
        interval = session.found.record.expiry_interval
        if not isinstance(expiry_interval, Keep):
            _check_seconds("expiry_interval", expiry_interval)
            interval = NEVER if expiry_interval is None else _microseconds(expiry_interval)
        now = self.storage.clock()
        after = encode_session(session.client_id, _disconnected(session.found.record, now, interval, will=send_will))
        draft = session.last_draft()
        writes = self.storage.change(session.client_id, session.found, after)
        if draft is not None:
            writes += draft.writes[1:]  # all but the guard, which the change is
        if not send_will:
            writes.append(FrameworkWrite(self.storage.will_key(session.keys), None))
        self.commit_for(session, writes)
        self._over(session, why, told=why not in (Ended.DISCONNECTED, Ended.LOST))
        self._expect_timer(after)
        self._run_timers(self.storage.shard_of(session.client_id), now)

    def _over(self, session: Session, why: Ended, *, told: bool) -> None:
        """A session object is of no more use; tell its owner, if that didn't end it."""
        if self._live.get(session.client_id) is session:
            del self._live[session.client_id]
        if session.ended is None:
            session.end(why)
            if told and session.on_end is not None:
                session.on_end(session, why)

    def kick(self, client_id: str) -> bool:
        """End the connection of a client's session, as if it were lost; False if it has none.

        One that a crash left open counts. Raises `SessionNotFoundError`.
        """
        with self._lock:
            self._check_open()
            session = self._live.get(client_id)
            if session is not None:
                self.end(session, Ended.KICKED, send_will=True)
                return True
            found, now = self._found(client_id), self.storage.clock()
            if not found.record.connected:
                return False
            self.storage.write_for(client_id, self._lose(found, now))
            self._run_timers(self.storage.shard_of(client_id), now)
            return True

    def expire(self, client_id: str) -> None:
        """End a client's session now, and its connection if it has one. Raises `SessionNotFoundError`."""
        with self._lock:
            self._check_open()
            found = self._found(client_id)
            session = self._live.get(client_id)
            if session is not None:
                self._take_over(session, Ended.EXPIRED)
            self._remove(found)

    def close(self) -> None:
        """Commit everything and end all connections, as if they were lost. The database's close calls it."""
        with self._lock:
            for session in list(self._live.values()):
                try:
                    self.end(session, Ended.CLOSED, send_will=True)
                except TopicstoreError:  # its mark stays, so the next opening deals with it
                    self._over(session, Ended.CLOSED, told=True)
            self.dispatcher.close()

    # --- looking ---

    def groups(self) -> list[GroupInfo]:
        """Return the shared subscriptions, sorted by filter, with their members, connected or not."""
        with self._lock:
            self._check_open()
            self.dispatcher.listen()
            return self.shared.list()

    def list(self) -> list[SessionInfo]:
        """Return all sessions as they are stored, sorted by client id, without what they have in flight."""
        with self._lock:
            self._check_open()
            found = [self.storage.find(client_id) for client_id in sorted(self.storage.clients())]
            return [self._info(one) for one in found if one is not None and not one.record.ending]

    def inspect(self, client_id: str) -> SessionInfo:
        """Return a session as it is stored. Raises `SessionNotFoundError`."""
        with self._lock:
            self._check_open()
            subscriptions = [record for _, record in self.storage.subscriptions(client_id)]
            return attrs.evolve(
                self._info(self._found(client_id)),
                subscriptions=tuple((record.topic_filter, record.eras[-1].options) for record in subscriptions),
                in_flight=len(self.storage.window(client_id)),
                awaiting_release=len(self.storage.incoming(client_id)),
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

    def _found(self, client_id: str) -> Found:
        found = self.storage.find(client_id)
        if found is None or found.record.ending:
            raise SessionNotFoundError(f"there is no session of client {client_id!r}")
        return found

    # --- time ---

    def tick(self, now: int | None = None) -> float:
        """Do what is due at ``now``, microseconds since the epoch; return in how many seconds to call again.

        Wills are published, sessions end, silent clients are lost, what was acknowledged is committed, what
        failed is tried again. Never early. What fails is tried again at the next call.
        """
        with self._lock:
            self._check_open()
            now = self.storage.clock() if now is None else now
            failing, self._failing = self._failing, []
            for session, sources in failing:
                if session.ended is None:
                    session.try_again(sources)
            for shard in range(len(self._next_timer)):
                self._recover(shard, now)
                self._run_timers(shard, now)
            self._end_silent(now)
            self.shared.tick(now, self._stuck_since)
            self._checkpoint_in_time(now)
            return self._pause(now)

    def _stuck_since(self, client_id: str) -> int | None:
        session = self._live.get(client_id)
        return None if session is None else session.stuck_since

    def _pause(self, now: int) -> float:
        waiting = [time for time in (*self._next_timer, self._checkpoint_due) if time is not None]
        waiting += [time for time, _, _ in self._silences[:1]]
        if any(left is not None for left in self._left_open):
            return 0.0
        return min(max(min(waiting, default=now + _LONGEST_PAUSE) - now, 0), _LONGEST_PAUSE) / 1e6

    def _checkpoint_in_time(self, now: int) -> None:
        if not self.dispatcher.dirty:
            self._checkpoint_due = None
        elif self._checkpoint_due is None:
            self._checkpoint_due = now + CHECKPOINT_INTERVAL
        elif self._checkpoint_due <= now:
            self._checkpoint_due = None
            self.checkpoint_of(list(self.dispatcher.dirty))

    def _watch(self, session: Session) -> None:
        deadline = session.seen + _microseconds(session.keep_alive * _SILENCE)
        heapq.heappush(self._silences, (deadline, next(self._order), session))

    def _end_silent(self, now: int) -> None:
        while self._silences and self._silences[0][0] <= now:
            session = heapq.heappop(self._silences)[2]
            if session.ended is not None:
                continue
            if session.seen + _microseconds(session.keep_alive * _SILENCE) <= now:
                try:
                    self.end(session, Ended.KEEP_ALIVE, send_will=True)
                except TopicstoreError as failure:
                    session.failed(failure)
                    heapq.heappush(self._silences, (now + _LONGEST_PAUSE, next(self._order), session))
            else:
                self._watch(session)

    def _recover(self, shard: int, now: int) -> None:
        """Deal with sessions that a crash left open: their connections are lost, as of now."""
        left = self._left_open[shard]
        if left is None:
            return
        clients = list(islice(left, _CHUNK))
        writes: list[StateWrite] = []
        for client_id in clients:
            found = None if client_id in self._live else self.storage.find(client_id)
            if found is not None and found.record.ending:
                self._remove(found)
            elif found is not None and found.record.connected:
                writes += self._lose(found, now)
        if writes:
            self.storage.write(shard, writes)
        if len(clients) < _CHUNK:
            self._left_open[shard] = None

    def _lose(self, found: Found, now: int) -> Sequence[StateWrite]:
        """Return the writes by which the connection of a session that nobody has open is lost."""
        record = _disconnected(found.record, now, found.record.expiry_interval, will=True)
        after = encode_session(found.client_id, record)
        self._expect_timer(after)
        return self.storage.change(found.client_id, found, after)

    def _expect_timer(self, found: Found) -> None:
        shard = self.storage.shard_of(found.client_id)
        for time in (found.record.expires, found.record.will_due):
            if time != NEVER:
                self._expect(shard, time)

    def _expect(self, shard: int, time: int) -> None:
        following = self._next_timer[shard]
        self._next_timer[shard] = time if following is None else min(following, time)

    def _run_timers(self, shard: int, now: int) -> None:
        """Fire the stored timers that are due, and find the next."""
        following = self._next_timer[shard]
        if following is None or following > now:
            return
        self._next_timer[shard] = None
        failed = False
        timers = self.storage.timers(shard)
        for time, kind, client_id in islice(timers, _CHUNK):
            if time > now:
                self._expect(shard, time)
                break
            try:
                self._fire(time, kind, client_id)
            except TopicstoreError:
                failed = True  # the others go on
        else:
            for time, _, _ in timers:
                self._expect(shard, time)
                break
        if failed:
            self._expect(shard, now + _LONGEST_PAUSE)

    def _fire(self, time: int, kind: bytes, client_id: str) -> None:
        found = self.storage.find(client_id)
        due = None if found is None else found.record.expires if kind == EXPIRY else found.record.will_due
        if found is None or due != time:
            self.storage.forget_timer(time, kind, client_id)
        elif kind == EXPIRY:
            self._remove(found)
        else:
            self._publish_will(found)

    # --- ending sessions ---

    def _publish_will(self, found: Found) -> Found:
        """Publish the will of a session, and note that in the same write; return the session as it is then."""
        after = encode_session(found.client_id, msgspec.structs.replace(found.record, will_due=NEVER, will_delay=NEVER))
        will_key = self.storage.will_key(Keys(found.client_id))
        writes = [*self.storage.change(found.client_id, found, after), FrameworkWrite(will_key, None)]
        will = self.storage.will(found.client_id)
        messages: list[Message] = [] if will is None else [msgspec.structs.replace(will, timestamp=None)]
        self.storage.db.publish(messages, state={self.storage.shard_of(found.client_id): writes})
        return after

    def _remove(self, found: Found) -> None:
        """End a session: publish a will that is pending, and remove all it kept, unless it was opened meanwhile."""
        if found.record.will_due != NEVER or (found.record.connected and found.record.will_delay != NEVER):
            found = self._publish_will(found)
        records = [record for _, record in self.storage.subscriptions(found.client_id)]
        ending = self.shared.ending(found, records)
        if ending is not None and self.storage.remove(ending):
            self.shared.ended(found.client_id, records)
            for record in records:
                if is_durable(record):
                    self.wanted.remove(record.topic_filter)

    def _check_open(self) -> None:
        if self.dispatcher.closed:
            raise DatabaseClosedError("the database is closed")


def _disconnected(record: SessionRecord, now: int, interval: int, *, will: bool) -> SessionRecord:
    """Return a session whose connection ends now. Its will is due after its delay, or with the session's end."""
    due = NEVER
    if will and record.will_delay != NEVER:
        due = now + (record.will_delay if interval == NEVER else min(record.will_delay, interval))
    return msgspec.structs.replace(
        record,
        connected=False,
        expiry_interval=interval,
        expires=NEVER if interval == NEVER else now + interval,
        will_delay=record.will_delay if will else NEVER,
        will_due=due,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _check_opening(
    client_id: str, expiry_interval: float | None, receive_maximum: int, keep_alive: float, will: Will | None
) -> None:
    if check_utf8(client_id, "client id", InvalidArgumentError) == "":
        raise InvalidArgumentError("a session's client id has at least one character")
    if type(receive_maximum) is not int or not 1 <= receive_maximum <= MAX_PACKET_ID:
        raise InvalidArgumentError(f"receive_maximum is a number from 1 to {MAX_PACKET_ID:,}, not {receive_maximum!r}")
    _check_seconds("expiry_interval", expiry_interval)
    _check_seconds("keep_alive", keep_alive)
    _check_seconds("a will's delay", 0 if will is None else will.delay)


def _check_seconds(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e10):
        raise InvalidArgumentError(f"{name} is a number of seconds, not {value!r}")
