"""`Leaving`: ends connections, of one session or many; uncommitted changes and the end are committed together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

from topicstore.contract.arguments import KEEP, Keep, Length, check_length, seconds
from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.runtime.closing import do_all
from topicstore.shard.state import FrameworkWrite

from .clock import microseconds
from .model import Ended
from .qos2 import Refused, check_sessions
from .records import NEVER
from .registry import SessionRegistry
from .session import Session
from .session_expiry import AGAIN, Timers
from .session_store import StoredSession, encode_session, will_key
from .wills import disconnected

__all__ = ["Leaving", "check_four_bytes", "interval_of"]

_MOST_SECONDS = 0xFFFF_FFFF
"""The largest number of seconds in a four-byte integer of MQTT."""


class Leaving:
    """Ends connections. Used under the sessions' mutex."""

    def __init__(self, registry: SessionRegistry, timers: Timers) -> None:
        self._registry = registry
        self._timers = timers

    def end(
        self,
        sessions: Iterable[Session],
        why: Ended,
        *,
        send_will: bool,
        expiry_interval: Length | Keep | None = KEEP,
    ) -> dict[Session, TopicstoreError]:
        """End connections with one commit for each shard; return the errors of the sessions that could not be ended."""
        errors: dict[Session, TopicstoreError] = {}
        after: dict[Session, StoredSession] = {}
        changes: dict[Session, list[StateWrite]] = {}
        for session in sessions:
            try:
                interval = _interval(session, expiry_interval)
                if not session.stored:
                    after[session] = session.stored_session
                    continue
                now = self._registry.clock_of(session.client_id)()
                record = disconnected(session.stored_session.record, now, interval, will=send_will)
                after[session] = encode_session(session.client_id, record)
                changes[session] = self._writes(session, after[session], send_will=send_will)
            except TopicstoreError as error:
                errors[session] = error
        errors |= self._registry.commits.together(changes)
        ended = [session for session in after if session not in errors]
        stored = [session for session in ended if session.stored]
        for session in stored:
            self._timers.expect(after[session])
        notify = why not in (Ended.DISCONNECTED, Ended.LOST)
        try:
            do_all(
                [partial(self._registry.over, session, why, notify=notify) for session in ended],
                "could not be notified of their end",
            )
        finally:
            until = self._timers.deadline()
            for shard in {self._registry.states.shard_of(session.client_id) for session in stored}:
                self._timers.run(shard, until)
        return errors

    def end_silent(self, now: int, until: float) -> None:
        """End connections whose keep alive is exceeded, until ``until``, a time of `time.monotonic`."""
        keep_alive = self._registry.keep_alive
        while time.monotonic() < until and (session := keep_alive.silent(now)) is not None:
            try:
                for failure in self.end([session], Ended.KEEP_ALIVE, send_will=True).values():
                    raise failure
            except TopicstoreError as failure:
                session.failed(failure)
                if session.ended is None:
                    keep_alive.watch(session, now + AGAIN)

    def end_rows(
        self,
        sessions: Sequence[Session],
        why: Ended,
        *,
        send_will: bool,
        expiry_interval: Length | Keep | None = KEEP,
        partial: bool,
    ) -> list[TopicstoreError | None]:
        """End connections; return errors by row or, without ``partial``, raise the first after all others ended."""
        refused: Refused = {}
        check_sessions(self._registry, sessions, refused, partial=True)
        left = dict.fromkeys(session for row, session in enumerate(sessions) if row not in refused)
        errors = self.end(left, why, send_will=send_will, expiry_interval=expiry_interval)
        results = [refused.get(row) or errors.get(session) for row, session in enumerate(sessions)]
        for failure in () if partial else filter(None, results):
            raise failure
        return results

    def kick(self, client_id: str) -> bool:
        """End a connection as if it were lost, even if a crash left it open; return False if there is none.

        Raises `SessionNotFoundError`.
        """
        session, states = self._registry.connected.get(client_id), self._registry.states
        if session is not None:
            for failure in self.end([session], Ended.KICKED, send_will=True).values():
                raise failure
            return True
        there, now = self._registry.found(client_id), self._registry.clock_of(client_id)()
        if not there.record.connected:
            return False
        states.write_for(client_id, self._timers.lose(there, now))
        self._timers.run(states.shard_of(client_id), self._timers.deadline())
        return True

    def _writes(self, session: Session, after: StoredSession, *, send_will: bool) -> list[StateWrite]:
        delivery = session.prepare_last()
        writes = self._registry.states.change(session.client_id, session.stored_session, after)
        if delivery is not None:
            writes += delivery.writes[1:]  # the first write is the guard, which `change` includes
        if not send_will and session.stored_session.record.will_delay != NEVER:
            writes.append(FrameworkWrite(will_key(session.keys), None))
        return writes


def _interval(session: Session, expiry_interval: Length | Keep | None) -> int:
    """Return the time in microseconds after which a session ends, or `NEVER`. Raises `InvalidArgumentError`."""
    opened = session.stored_session.record.expiry_interval
    if isinstance(expiry_interval, Keep):
        return opened
    interval = interval_of(expiry_interval)
    if interval and not opened:
        raise InvalidArgumentError(
            f"session {session.client_id!r} was opened with an expiry interval of 0, which a DISCONNECT can't raise "
            "(MQTT 5, section 3.14.2.2.2)"
        )
    return interval


def interval_of(expiry_interval: Length | None) -> int:
    """Convert a session expiry interval to microseconds, or `NEVER`, as stored.

    0xFFFFFFFF seconds means that the session never expires (MQTT 5, section 3.1.2.11.2). Raises `InvalidArgumentError`.
    """
    if seconds(expiry_interval) is None:
        return NEVER
    length = check_four_bytes("expiry_interval", expiry_interval)
    return NEVER if length == _MOST_SECONDS else microseconds(length)


def check_four_bytes(name: str, length: object) -> float:
    """Convert a length of time to seconds. Raises `InvalidArgumentError` if MQTT's four bytes can't hold it."""
    found = check_length(name, length)
    if found > _MOST_SECONDS:
        raise InvalidArgumentError(f"{name} is at most {_MOST_SECONDS:,} seconds, not {length!r}")
    return found
