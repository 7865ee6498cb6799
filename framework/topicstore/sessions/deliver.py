"""`Deliveries`: drafts, commits and hands out the packets of all sessions, in several steps.

A step (a "piece" in the code) takes a few milliseconds. The sessions' lock is released after each, so that other calls,
such as subscribing, wait for one step and not for the whole delivery. A session has one turn in a call of `deliver`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from functools import partial

import attrs

from topicstore.contract.arguments import check_within
from topicstore.contract.errors import InvalidArgumentError, TopicstoreError

from .commits import Commits
from .delivery_batch import Packet, check_max_bytes, count_of
from .dispatcher import Dispatcher
from .live_session import Draft, LiveSession
from .locks import SessionLocks
from .registry import Connections
from .session import Session

__all__ = ["Deliveries"]

_SESSIONS = 1_000
"""Largest number of sessions that have their turn in one call."""
_PIECE = 10_000
"""Cost, in messages, after which a piece is committed."""
_TURN = 10
"""Cost, in messages, of the turn of a session without messages."""

_MOST = (1 << 63) - 1

Packets = list[Packet]


@attrs.frozen
class _Limits:
    """The limits of one call: packets of each session, packets of all sessions, bytes of payload of each session."""

    each: int
    total: int
    max_bytes: int | None

    def of(self, live: LiveSession, left: int) -> int:
        """Return the most packets for a session; ``left``: the packets left for all sessions."""
        return min(self.each, left) if live.batch_size is None else min(self.each, left, live.batch_size)


class Deliveries:
    """The deliveries to all sessions of one open database. ``check`` raises if the database can't be written."""

    def __init__(
        self,
        dispatcher: Dispatcher[LiveSession],
        locks: SessionLocks[LiveSession],
        commits: Commits,
        connections: Connections,
        check: Callable[[], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._locks = locks
        self._commits = commits
        self._connections = connections
        self._check = check

    def deliver(self, each: int, total: int, max_bytes: int | None) -> list[tuple[Session, Packets]]:
        """Return the packets to send now, by session; see `topicstore.sessions.Sessions.deliver_batches`."""
        check_within("limit_each", each, 1, _MOST)
        check_within("limit", total, 1, _MOST)
        check_max_bytes(max_bytes)
        taken: list[tuple[LiveSession, Session, Packets]] = []
        turns: collections.deque[LiveSession] | None = None
        try:
            while turns is None or (turns and total > 0):
                before = len(taken)
                limits = _Limits(each, total, max_bytes)
                turns = self._locks.step(partial(self._next_piece_locked, turns, limits, taken))
                total -= sum(count_of(packets) for _, _, packets in taken[before:])
        except BaseException:
            self._dispatcher.mutex.hold(lambda: _put_back_locked(taken))
            raise
        return [(session, packets) for _, session, packets in taken]

    def _next_piece_locked(
        self,
        turns: collections.deque[LiveSession] | None,
        limits: _Limits,
        taken: list[tuple[LiveSession, Session, Packets]],
        lock: Callable[[LiveSession], bool],
    ) -> collections.deque[LiveSession]:
        """Run the turns of the next sessions of ``turns`` (None: of the ready queue); return the sessions left."""
        self._check()
        if turns is None:
            turns = collections.deque(self._dispatcher.next_ready_locked(_SESSIONS))
        turns += self._piece_locked(self._ready_locked(turns, lock), limits, taken)
        return turns

    def _ready_locked(
        self, turns: collections.deque[LiveSession], lock: Callable[[LiveSession], bool]
    ) -> Iterator[LiveSession]:
        """Lock and yield the sessions of ``turns`` that are still ready."""
        while turns:
            live = turns.popleft()
            if live.ended is None and self._dispatcher.is_ready_locked(live) and lock(live):
                yield live

    def _piece_locked(
        self,
        ready: Iterator[LiveSession],
        limits: _Limits,
        taken: list[tuple[LiveSession, Session, Packets]],
    ) -> list[LiveSession]:
        """Run the turns of some sessions, and add their packets to ``taken``; return the sessions for another turn."""
        drafts: list[Draft] = []
        having: list[LiveSession] = []
        left, effort = limits.total, 0
        try:
            while left > 0 and effort < _PIECE and (live := next(ready, None)) is not None:
                having.append(live)
                draft = _draft(live, limits.of(live, left), limits.max_bytes)
                count = len(draft) if draft is not None else min(live.waiting(), limits.of(live, left))
                if draft is not None:
                    drafts.append(draft)
                left -= count
                effort += max(live.effort, count) + _TURN
            self._commits.commit(drafts)
        except BaseException:
            for live in having:
                if live.ended is None:
                    live.rewind()
            raise
        left = limits.total
        again: list[LiveSession] = []
        for live in having:
            if live.ended is None:
                unsent = live.unsent()
                packets = _take(live, limits.of(live, left), limits.max_bytes)
                if packets:
                    taken.append((live, self._connections.sessions[live.client_id], packets))
                    left -= count_of(packets)
                elif live.unsent() < unsent:  # all messages to be sent again were deleted, and newer ones may wait
                    again.append(live)
        return again


def _put_back_locked(taken: list[tuple[LiveSession, Session, Packets]]) -> None:
    """Return all taken packets to their sessions, for a later call. Idempotent."""
    while taken:
        live, _, packets = taken[-1]
        live.put_back(packets)
        taken.pop()


def _draft(live: LiveSession, limit: int, max_bytes: int | None) -> Draft | None:
    try:
        return live.draft(limit, max_bytes)
    except InvalidArgumentError as failure:  # from `allow`; other sessions are not affected
        live.rewind()
        live.stall(failure)
        return None


def _take(live: LiveSession, limit: int, max_bytes: int | None) -> Packets:
    try:
        return live.take(limit, max_bytes)
    except TopicstoreError as failure:  # from reading messages to send again
        live.stall(failure)
        return []
