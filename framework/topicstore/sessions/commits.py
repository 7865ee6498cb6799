"""`Commits`: commits changes of several sessions together, with one engine write for each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from topicstore.contract.errors import (
    SessionTakenOverError,
    ShardElsewhereError,
    ShardMovedError,
    StateConflictError,
    TopicstoreError,
)
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.contract.state import StateWrite

from .model import Ended
from .session import PendingDelivery, Session
from .session_store import SessionState

__all__ = ["Commits"]

_ENDS: tuple[tuple[type[TopicstoreError], Ended], ...] = (
    (ShardMovedError, Ended.MOVED),
    (ShardElsewhereError, Ended.MOVED),
    (StorageUnavailableError, Ended.UNCERTAIN),
)
"""The ends of sessions by the error of a write."""
_Errors = dict[Session, TopicstoreError]


class Commits:
    """Writes sessions. The caller holds their locks and the sessions' mutex, which is released during each write.

    Every write of a session is conditional on its guard, a compare-and-set of the session's record. ``overtaken`` ends
    a session whose record has changed because it was opened elsewhere, and returns the error to raise. ``over`` ends a
    session for another reason.

    If a cluster shares the database, a session also ends when a write finds that its shard has moved, or when the log
    store doesn't answer. The change may then be stored later, so the object may differ from the stored session, which
    the next opening reads.
    """

    def __init__(
        self,
        states: SessionState,
        overtaken: Callable[[Session], SessionTakenOverError],
        over: Callable[..., object],
    ) -> None:
        self._states = states
        self.overtaken = overtaken
        self._over = over

    def write(self, session: Session, writes: Sequence[StateWrite]) -> None:
        """Commit writes of a session, including its guard or a new session record. Raises the error of the commit."""
        for failure in self.together({session: writes}).values():
            raise failure

    def together(self, changes: Mapping[Session, Sequence[StateWrite]]) -> _Errors:
        """Commit writes of sessions, each including its guard or a new session record; return the errors by session.

        Writes of sessions that are kept in memory count as committed. A session without a write ends if its shard has
        moved, because messages before its place may have been removed unread on behalf of the shard's new owner.

        A session that was opened elsewhere doesn't hold up the others, even if another call, for a QoS 2 exchange,
        detects it during the commit. If the process dies in between, the writes of some shards are committed, and those
        of other shards are not.
        """
        by_shard: dict[int, list[Session]] = {}
        for session in changes:
            if session.epoch and not (session.in_flight.stored and changes[session]):  # no epoch without a cluster
                self._end_if_moved(session)
            if session.in_flight.stored and changes[session]:
                by_shard.setdefault(self._states.shard_of(session.client_id), []).append(session)
        errors: _Errors = {}
        while by_shard:
            failures = self._states.commit(
                {shard: [write for one in some for write in changes[one]] for shard, some in by_shard.items()}
            )
            by_shard = {  # after a conflict, the writes of all sessions but its cause are committed again
                shard: left
                for shard, failure in failures.items()
                if (left := self._left(by_shard[shard], failure, errors))
            }
        for session in changes:
            if session.ended is not None and (over := session.over()) is not None:
                errors.setdefault(session, over)
        return errors

    def taken_over(self, sessions: Iterable[Session]) -> _Errors:
        """End the sessions whose stored record was replaced by another opening; return their errors."""
        checked = [session for session in sessions if session.stored]
        current = self._states.all_current([session.stored_session for session in checked])
        return {session: self.overtaken(session) for session, same in zip(checked, current, strict=True) if not same}

    def commit(self, deliveries: list[PendingDelivery]) -> list[TopicstoreError]:
        """Commit the deliveries of sessions; return the errors, except those of sessions that have ended by them."""
        errors = self.together({delivery.session: delivery.writes for delivery in deliveries})
        for delivery in deliveries:
            failure = errors.get(delivery.session)
            if delivery.session.ended is not None:  # another opening has taken the session over
                continue
            if failure is None:
                delivery.session.apply(delivery)
            else:
                delivery.session.fail(delivery, failure)
        return list(dict.fromkeys(errors.values()))

    def commit_one(self, delivery: PendingDelivery) -> None:
        """Commit the delivery of one session. Raises the error of the commit."""
        for failure in self.commit([delivery]):
            raise failure

    def checkpoint(self, sessions: Iterable[Session]) -> list[TopicstoreError]:
        """Commit the acknowledgements of some sessions; return the errors."""
        asked = list(sessions)
        try:
            for session in asked:
                session.clean()  # cleared first, so that a later acknowledgement marks the session again
            deliveries = [delivery for session in asked if (delivery := session.prepare_last()) is not None]
            failures = self.commit(deliveries)
        except BaseException:
            for session in asked:
                session.touched()
            raise
        for session in asked:
            if session.ended is None and session.failure is None:
                session.ask()  # the commit may include a PUBREC whose thread has not yet requested a turn
            elif session.ended is None:
                session.touched()
        return failures

    def lose(self, sessions: Iterable[Session], failure: TopicstoreError) -> None:
        """End sessions whose write has failed because their shard has moved, or because the log store didn't answer."""
        for kind, why in _ENDS:
            if isinstance(failure, kind):
                for session in sessions:
                    self._over(session, why, notify=True)

    def _end_if_moved(self, session: Session) -> None:
        shard = self._states.shard_of(session.client_id)
        if session.ended is None and session.epoch != self._states.epoch(shard):
            self._over(session, Ended.MOVED, notify=True)

    def _left(self, sessions: list[Session], failure: TopicstoreError, errors: _Errors) -> list[Session]:
        """Add the errors of sessions whose write failed to ``errors``; return the sessions to commit once more."""
        self.lose(sessions, failure)
        overtaken = self.taken_over(sessions) if isinstance(failure, StateConflictError) else {}
        if not overtaken:
            errors.update(dict.fromkeys(sessions, failure))
            return []
        for error in overtaken.values():
            error.__cause__ = failure
        errors.update(overtaken)
        return [session for session in sessions if session not in overtaken]
