"""`Opening`: opens sessions, one or many, with one commit for each shard; `Connect`: the parameters of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter

import attrs
import msgspec

from topicstore.contract.arguments import Length, check_count, check_length, check_within
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import (
    InvalidArgumentError,
    InvalidMessageError,
    ShardElsewhereError,
    StateConflictError,
    TopicstoreError,
)
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import check_utf8
from topicstore.runtime.closing import do_all
from topicstore.shard.state import FrameworkWrite

from .clock import microseconds
from .delivery_batch import Allow
from .disconnect import Leaving, check_four_bytes, interval_of
from .in_flight import MAX_PACKET_ID, InFlight
from .model import Ended, Overlapping, Will
from .records import NEVER, VERSION, Keys, SessionRecord
from .registry import SessionRegistry
from .session import Session, SessionCalls
from .session_expiry import Timers
from .session_store import StoredSession, encode_session, will_key
from .subscribe import begin_resuming, resume
from .wills import Wills

__all__ = ["Connect", "Opening", "checked"]

_TWO_BYTES = 0xFFFF
"""The largest keep alive in seconds, and the largest payload of a will (MQTT 5, sections 3.1.2.10 and 3.1.3.4)."""

OnEnd = Callable[[Session, Ended], None] | None
_Outcome = dict[int, Session | TopicstoreError]
"""By row, the opened session or the error."""


class Connect(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of `Sessions.open` for one row of `Sessions.open_many`."""

    client_id: str
    clean_start: bool = False
    expiry_interval: Length | None = 0.0
    """A timedelta or seconds; None or 0xFFFFFFFF: the session never expires."""
    receive_maximum: int = MAX_PACKET_ID
    keep_alive: Length = 0
    """A timedelta or seconds; 0: no limit."""
    will: Will | None = None
    allow: Allow | None = None
    overlapping: Overlapping = "each"
    in_memory: bool = False
    batch_size: int | None = None
    user: str = ""
    """The user that a new session counts for; see `Sessions.bounds`."""


@attrs.frozen
class _Row:
    """One session that is being opened."""

    number: int
    how: Connect
    before: StoredSession | None
    """The session to resume; None for a new session."""
    after: StoredSession
    """The opened session; one that is kept in memory has no stored bytes."""


class Opening:
    """Opens sessions. Used under the sessions' mutex."""

    def __init__(
        self,
        registry: SessionRegistry,
        timers: Timers,
        wills: Wills,
        leaving: Leaving,
        calls: SessionCalls,
    ) -> None:
        self._registry = registry
        self._states = registry.states
        self._timers = timers
        self._wills = wills
        self._leaving = leaving
        self._calls = calls

    def open(self, connects: Sequence[tuple[int, Connect]], on_end: OnEnd, *, resume: bool) -> _Outcome:
        """Open a session for each pair of row number and parameters, which `checked` has returned; return the results.

        Results are by row number. If a client id occurs in several rows, the session of the later row takes over that
        of the earlier. ``resume``: whether the stored subscriptions are loaded before the call returns.
        """
        outcome: _Outcome = {}
        left = list(connects)
        while left:
            now: list[tuple[int, Connect]] = []
            again: list[tuple[int, Connect]] = []
            clients: set[str] = set()
            for number, how in left:
                (again if how.client_id in clients else now).append((number, how))
                clients.add(how.client_id)
            self._open_once(now, on_end, outcome, resume=resume)
            left = again
        return outcome

    def open_all(self, connects: Sequence[tuple[int, Connect]], on_end: OnEnd) -> list[Session]:
        """Open all of the sessions, or end the connections of the opened ones and raise the first error."""
        outcome = sorted(self.open(connects, on_end, resume=True).items(), key=itemgetter(0))
        opened = [session for _, session in outcome if isinstance(session, Session)]
        for _, failure in outcome:
            if isinstance(failure, TopicstoreError):
                self._abandon([session for session in opened if session.ended is None])
                raise failure
        return opened

    def _abandon(self, sessions: Sequence[Session]) -> None:
        """End connections as if they were lost or, if that can't be committed, leave them stored as open."""
        for session in self._leaving.end(sessions, Ended.LOST, send_will=True):
            self._registry.over(session, Ended.LOST, notify=False)

    def take_over(self, sessions: Sequence[Session], why: Ended) -> None:
        """Commit the uncommitted changes of older session objects, and end them."""
        try:
            self._registry.commits.checkpoint(sessions)
        finally:
            over = self._registry.over
            do_all(
                [partial(over, session, why, notify=True) for session in sessions], "could not be notified of their end"
            )

    def expire(self, found: StoredSession) -> None:
        """End a session now, and its connection if it has one."""
        session = self._registry.connected.get(found.client_id)
        if session is not None:
            self.take_over([session], Ended.EXPIRED)
        if session is None or session.stored:
            self._timers.remove(found)

    def _open_once(
        self, connects: Sequence[tuple[int, Connect]], on_end: OnEnd, outcome: _Outcome, *, resume: bool
    ) -> None:
        connected = self._registry.connected
        self._timers.follow_shards()
        connects = self._here(connects, outcome)
        older = [connected[how.client_id] for _, how in connects if how.client_id in connected]
        if older:
            self.take_over(older, Ended.TAKEN_OVER)
        by_shard: defaultdict[int, list[_Row]] = defaultdict(list)
        in_memory: list[_Row] = []
        found = self._find([how.client_id for _, how in connects])
        for number, how in connects:
            try:
                row = self._prepare(number, how, found[how.client_id]())
            except TopicstoreError as error:
                outcome[number] = error
            else:
                (in_memory if how.in_memory else by_shard[self._states.shard_of(how.client_id)]).append(row)
        written = self._write_all(by_shard, outcome) + in_memory
        self._registry.dispatcher.listen_locked()  # earlier messages are not for these sessions
        try:
            for row in written:
                try:
                    outcome[row.number] = self._begin(row, on_end, whole=resume)
                except TopicstoreError as error:
                    outcome[row.number] = error
        finally:  # a session that is wrongly stored as open would never expire
            uncertain = [how for number, how in connects if isinstance(outcome.get(number), StorageUnavailableError)]
            self._registry.left_open.update(how.client_id for how in uncertain)
            self._timers.recover_later(row.how.client_id for row in written if row.how.client_id not in connected)

    def _here(self, connects: Sequence[tuple[int, Connect]], outcome: _Outcome) -> list[tuple[int, Connect]]:
        """Return the rows whose shards this site owns; the outcome of the others is `ShardElsewhereError`.

        The first opening of a shard notes its session clock, from which later owners continue.
        """
        here: list[tuple[int, Connect]] = []
        for number, how in connects:
            try:
                self._registry.check_owned(how.client_id)
            except ShardElsewhereError as elsewhere:
                outcome[number] = elsewhere
            else:
                here.append((number, how))
        shards = {self._states.shard_of(how.client_id) for _, how in here}
        self._registry.clocks.note(shards, self._states.commit, first=True)
        return here

    def _write_all(self, by_shard: Mapping[int, Sequence[_Row]], outcome: _Outcome) -> list[_Row]:
        """Commit openings; return the committed ones. The others no longer count in the number of stored sessions."""
        written: list[_Row] = []
        try:
            for shard, rows in by_shard.items():
                written += self._write(shard, rows, outcome)
        finally:
            done = {row.number for row in written}
            for row in (row for rows in by_shard.values() for row in rows if row.number not in done):
                if row.before is None:
                    self._states.counts.add(row.how.user, -1)
        return written

    def _find(self, client_ids: Sequence[str]) -> dict[str, Callable[[], StoredSession | None]]:
        """Return, by client id, a function that returns the stored session or raises the error of reading it."""
        try:
            found = self._registry.mutex.released(lambda: self._states.find_all(client_ids))
        except TopicstoreError:  # a damaged record must not prevent the opening of other sessions
            return {client_id: partial(self._states.find, client_id) for client_id in client_ids}
        return {client_id: partial(_same, there) for client_id, there in zip(client_ids, found, strict=True)}

    def _prepare(self, number: int, how: Connect, there: StoredSession | None) -> _Row:
        """Find the session to resume: remove it if it has ended, publish its will if that is due."""
        before, guard = (None, 0) if there is None else (there, there.record.guard)
        if there is not None:
            before = self._resumed(there, clean_start=how.clean_start)
        if before is None and not how.in_memory:
            self._states.counts.check(how.user)
            self._states.counts.add(how.user, 1)  # counted before the checks of the next rows
        now = self._registry.clock_of(how.client_id)()
        record = SessionRecord(
            VERSION,
            guard=max(now, guard + 1),
            created=now if before is None else before.record.created,
            connected=True,
            expiry_interval=interval_of(how.expiry_interval),
            will_delay=NEVER if how.will is None else _delay(how),
            user=how.user if before is None else before.record.user,
        )
        after = StoredSession(how.client_id, b"", record) if how.in_memory else encode_session(how.client_id, record)
        return _Row(number, how, before, after)

    def _resumed(self, found: StoredSession, *, clean_start: bool) -> StoredSession | None:
        record, now = found.record, self._registry.clock_of(found.client_id)()
        expired = NEVER < record.expires <= now or (record.connected and record.expiry_interval == 0)
        if clean_start or expired or record.ending:
            self._timers.remove(found)
            return None
        if NEVER < record.will_due <= now or (record.connected and record.will_delay == 0):
            return self._wills.publish(found)
        return found

    def _write(self, shard: int, rows: Sequence[_Row], outcome: _Outcome) -> Sequence[_Row]:
        """Commit the openings of a shard together; return those that are committed."""
        left = list(rows)
        while left:
            wills = [(row.how.client_id, row.how.will) for row in left if row.how.will is not None]
            writes = [write for row in left for write in self._writes(row)]
            try:
                if wills:
                    messages = [(client_id, will.message) for client_id, will in wills if will]
                    self._registry.mutex.released(partial(self._wills.store, shard, messages, writes))
                else:
                    self._states.write(shard, writes)
            except StateConflictError as conflict:
                now = self._states.find_all([row.how.client_id for row in left])
                same = [row.before == there for row, there in zip(left, now, strict=True)]
                if all(same):
                    outcome.update(dict.fromkeys((row.number for row in left), conflict))
                    return []
                outcome.update({row.number: conflict for row, current in zip(left, same, strict=True) if not current})
                left = [row for row, current in zip(left, same, strict=True) if current]
            except InvalidMessageError as bad:  # a will is invalid
                if bad.index is None:
                    outcome.update(dict.fromkeys((row.number for row in left), bad))
                    return []
                refused = [row for row in left if row.how.will is not None][bad.index]
                outcome[refused.number] = type(bad)(bad.reason, refused.number)
                left.remove(refused)
            except TopicstoreError as failure:
                outcome.update(dict.fromkeys((row.number for row in left), failure))
                return []
            else:
                break
        return left

    def _writes(self, row: _Row) -> list[StateWrite]:
        client_id, before = row.how.client_id, row.before
        writes = self._states.change(client_id, before, row.after)
        if row.how.will is None and before is not None and before.record.will_delay != NEVER:
            writes.append(FrameworkWrite(will_key(Keys(client_id)), None))
        return writes

    def _begin(self, row: _Row, on_end: OnEnd, *, whole: bool) -> Session:
        """Create the object of a session that is stored as open. Only a resumed session reads its state."""
        client_id, present = row.how.client_id, row.before is not None
        in_flight = InFlight(Keys(client_id), stored=not row.how.in_memory)
        if present:
            in_flight = self._states.in_flight(client_id)
            self._registry.catch_up(in_flight.last_positions())
        session = Session(
            self._calls,
            row.after,
            in_flight,
            self._states.incoming(client_id) if present else (),
            self._registry.dispatcher,
            self._registry.filters,
            self._registry.retained,
            present=present,
            on_end=on_end,
            receive_maximum=row.how.receive_maximum,
            keep_alive=check_length("keep_alive", row.how.keep_alive),
            allow=row.how.allow,
            batch_size=row.how.batch_size,
            epoch=self._timers.epochs[self._states.shard_of(client_id)],
            once=row.how.overlapping == "once",
        )
        if present:
            try:
                begin_resuming(self._registry, session)
                if whole:
                    resume(session)
            except BaseException:
                session.end(Ended.LOST)  # closes the cursors loaded so far
                raise
        self._registry.connected[session.client_id] = session
        if session.keep_alive:
            self._registry.keep_alive.watch(session)
        return session


def _check(how: Connect) -> None:
    """Raise `InvalidArgumentError` or `InvalidMessageError` if a field is out of its range."""
    if check_utf8(how.client_id, "client id", InvalidArgumentError) == "":
        raise InvalidArgumentError("a session's client id has at least one character")
    check_within("receive_maximum", how.receive_maximum, 1, MAX_PACKET_ID)
    check_utf8(how.user, "user", InvalidArgumentError)
    if how.batch_size is not None:
        check_count("batch_size", how.batch_size)
    if how.overlapping not in ("each", "once"):
        raise InvalidArgumentError(f'overlapping is "each" or "once", not {how.overlapping!r}')
    interval = interval_of(how.expiry_interval)
    if how.in_memory and (interval or how.will is not None or not how.clean_start):
        raise InvalidArgumentError(
            "a session that is kept in memory ends with its connection: it has an expiry_interval of 0, clean_start "
            "and no will"
        )
    if check_length("keep_alive", how.keep_alive) > _TWO_BYTES:
        raise InvalidArgumentError(f"keep_alive is at most {_TWO_BYTES:,} seconds, not {how.keep_alive!r}")
    if how.will is not None:
        _delay(how)
        MessageBatch.from_messages([how.will.message])
        if len(how.will.message.payload) > _TWO_BYTES:
            raise InvalidMessageError(f"the payload of a will has at most {_TWO_BYTES:,} bytes", 0)


def _same(found: StoredSession | None) -> StoredSession | None:
    return found


def _delay(how: Connect) -> int:
    return NEVER if how.will is None else microseconds(check_four_bytes("a will's delay", how.will.delay))


def checked(
    connects: Iterable[Connect], *, partial: bool
) -> tuple[list[tuple[int, Connect]], dict[int, TopicstoreError]]:
    """Return the rows that can be opened, and the errors of the others; without ``partial``, raise the first one."""
    good: list[tuple[int, Connect]] = []
    refused: dict[int, TopicstoreError] = {}
    for number, how in enumerate(connects):
        try:
            if not isinstance(how, Connect):
                raise InvalidArgumentError(f"row {number}: a {type(how).__name__} is not a Connect")
            _check(how)
        except InvalidMessageError as bad:  # the will is invalid
            refused[number] = type(bad)(bad.reason, number)
        except TopicstoreError as error:
            refused[number] = error
        else:
            good.append((number, how))
        if refused and not partial:
            raise refused[number]
    return good, refused
