"""`Commits`: what several sessions are about to hand out is committed together, an engine write a shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from topicstore.contract.errors import SessionTakenOverError, StateConflictError, TopicstoreError
from topicstore.contract.state import StateWrite

from .live_session import Draft, LiveSession
from .session_state import SessionState

__all__ = ["Commits"]


class Commits:
    """How sessions are written. Used under the dispatcher's lock.

    Every write of a session is conditional on its guard. ``overtaken`` ends a session whose guard is not there any
    more, because somebody else opened it, and returns what to raise.
    """

    def __init__(self, states: SessionState, overtaken: Callable[[LiveSession], SessionTakenOverError]) -> None:
        self._states = states
        self.overtaken = overtaken

    def write(self, session: LiveSession, writes: list[StateWrite]) -> None:
        """Commit writes of a session, its guard or what changes that among them."""
        try:
            self._states.write_for(session.client_id, writes)
        except StateConflictError as conflict:
            raise self.overtaken(session) from conflict

    def commit(self, drafts: list[Draft]) -> list[TopicstoreError]:
        """Commit what sessions are about to hand out; return what failed."""
        by_shard: defaultdict[int, list[Draft]] = defaultdict(list)
        for draft in drafts:
            by_shard[self._states.shard_of(draft.session.client_id)].append(draft)
        return [failure for shard, some in by_shard.items() for failure in self._commit_in(shard, some)]

    def commit_one(self, draft: Draft) -> None:
        """Commit what one session is about to hand out, or raise."""
        for failure in self.commit([draft]):
            raise failure

    def checkpoint(self, sessions: Iterable[LiveSession]) -> list[TopicstoreError]:
        """Commit what was acknowledged in some sessions; return what failed."""
        drafted = {session: session.last_draft() for session in sessions}
        failures = self.commit([draft for draft in drafted.values() if draft is not None])
        for session in drafted:
            if session.ended is None and session.failure is None:
                session.clean()
        return failures

    def _commit_in(self, shard: int, drafts: list[Draft]) -> list[TopicstoreError]:
        writes = [write for draft in drafts for write in draft.writes]
        try:
            if writes:
                self._states.write(shard, writes)
        except StateConflictError as conflict:
            current = [draft for draft in drafts if self._states.current(draft.session.found)]
            if len(current) == len(drafts):
                return _failed(drafts, conflict)
            errors = [self.overtaken(draft.session) for draft in drafts if draft not in current]
            return [*errors, *self._commit_in(shard, current)]
        except TopicstoreError as failure:
            return _failed(drafts, failure)
        for draft in drafts:
            draft.session.settle(draft)
        return []


def _failed(drafts: list[Draft], failure: TopicstoreError) -> list[TopicstoreError]:
    for draft in drafts:
        draft.session.fail(draft, failure)
    return [failure]
