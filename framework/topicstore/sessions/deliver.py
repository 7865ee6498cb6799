"""`Deliveries`: prepares, commits and hands out the packets of all sessions, in several steps.

A step (a "piece" in the code) takes a few milliseconds. The sessions' lock is released after each, so that other calls,
such as subscribing, wait for one step and not for the whole delivery. A session has one turn in a call of `deliver`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial
from itertools import islice

import attrs

from topicstore.contract.arguments import check_within
from topicstore.contract.errors import InvalidArgumentError, TopicstoreError

from .delivery_batch import Packet, check_max_bytes, count_of, single
from .model import Publish, PubRel
from .registry import SessionRegistry
from .session import PendingDelivery, Session

__all__ = ["Deliveries"]

_SESSIONS = 1_000
"""Largest number of sessions that have their turn in one call."""
_PIECE = 10_000
"""Cost, in messages, after which a piece is committed."""
_TURN = 10
"""Cost, in messages, of the turn of a session without messages."""

_MOST = (1 << 63) - 1

Packets = list[Packet]


@attrs.define
class _Limits:
    """The limits of one call."""

    each: int
    """The most packets of each session."""
    total: int
    """The most packets that may still be taken, of all sessions."""
    max_bytes: int | None
    """The most bytes of payload of each session; None: no limit."""

    def of(self, session: Session, left: int) -> int:
        """Return the most packets for a session; ``left``: the packets left for all sessions."""
        return min(self.each, left) if session.batch_size is None else min(self.each, left, session.batch_size)


class Deliveries:
    """The deliveries to all sessions of one open database."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry

    def deliver(self, each: int, total: int, max_bytes: int | None) -> list[tuple[Session, Packets]]:
        """Return the packets to send now, by session; see `topicstore.sessions.Sessions.deliver_batches`."""
        check_within("limit_each", each, 1, _MOST)
        check_within("limit", total, 1, _MOST)
        check_max_bytes(max_bytes)
        taken: list[tuple[Session, Packets]] = []
        limits = _Limits(each, total, max_bytes)
        turns: collections.deque[Session] | None = None
        try:
            while turns is None or (turns and limits.total > 0):
                turns = self._registry.locks.step(partial(self._next_piece_locked, turns, limits, taken))
        except BaseException:
            self._registry.mutex.hold(lambda: _put_back_locked(taken))
            raise
        return taken

    def deliver_one(self, session: Session, limit: int, max_bytes: int | None) -> list[Publish | PubRel]:
        """Return the packets of one session to send now; see `topicstore.sessions.Session.deliver`."""
        check_max_bytes(max_bytes)
        return self._registry.locks.hold([session], partial(self._deliver_one_locked, session, limit, max_bytes))

    def _deliver_one_locked(self, session: Session, limit: int, max_bytes: int | None) -> list[Publish | PubRel]:
        session.check()
        self._registry.dispatcher.listen_locked()
        session.retry_now()
        while True:
            try:
                delivery = session.prepare(limit, max_bytes)
                if delivery is not None:
                    self._registry.commits.commit_one(delivery)
                unsent = session.unsent()
                packets = single(session.take(limit, max_bytes))
            except BaseException:
                session.rewind()
                raise
            if packets or session.unsent() == unsent:
                return packets  # in the other case, all messages to send again were deleted: look for newer ones

    def _next_piece_locked(
        self,
        turns: collections.deque[Session] | None,
        limits: _Limits,
        taken: list[tuple[Session, Packets]],
        lock: Callable[[Session], bool],
    ) -> collections.deque[Session]:
        """Run the turns of the next sessions of ``turns`` (None: of the ready queue); return the sessions left."""
        self._registry.check_may_write()
        if turns is None:
            self._registry.dispatcher.listen_locked()
            turns = collections.deque(islice(self._registry.dispatcher.ready, _SESSIONS))
        turns += self._piece_locked(turns, limits, taken, lock)
        return turns

    def _piece_locked(
        self,
        turns: collections.deque[Session],
        limits: _Limits,
        taken: list[tuple[Session, Packets]],
        lock: Callable[[Session], bool],
    ) -> list[Session]:
        """Run the turns of the first sessions of ``turns``, which are removed from it; pass over those not ready now.

        Add the packets to ``taken``; return the sessions for another turn.
        """
        ready = self._registry.dispatcher.ready
        deliveries: list[PendingDelivery] = []
        having: list[Session] = []
        left, effort = limits.total, 0
        try:
            while turns and left > 0 and effort < _PIECE:
                session = turns.popleft()
                if session.ended is not None or session not in ready or not lock(session):
                    continue
                having.append(session)
                most = limits.of(session, left)
                try:
                    delivery = session.prepare(most, limits.max_bytes)
                except InvalidArgumentError as failure:  # the session's `allow` has failed; others are still served
                    delivery = None
                    session.rewind()
                    session.stall(failure)
                if delivery is None:
                    count = min(session.waiting(), most)
                else:
                    count = len(delivery)
                    deliveries.append(delivery)
                left -= count
                effort += max(session.effort, count) + _TURN
            self._registry.commits.commit(deliveries)
        except BaseException:
            for session in having:
                if session.ended is None:
                    session.rewind()
            raise
        return self._take_locked(having, limits, taken)

    def _take_locked(
        self, having: list[Session], limits: _Limits, taken: list[tuple[Session, Packets]]
    ) -> list[Session]:
        """Add the packets of sessions to ``taken``, within the limits; return the sessions for another turn."""
        again: list[Session] = []
        for session in having:
            if session.ended is None:
                unsent = session.unsent()
                try:
                    packets = session.take(limits.of(session, limits.total), limits.max_bytes)
                except TopicstoreError as failure:  # messages to send again can't be read
                    packets = []
                    session.stall(failure)
                if packets:
                    taken.append((session, packets))
                    limits.total -= count_of(packets)
                elif session.unsent() < unsent:  # messages to send again were deleted: look for newer ones
                    again.append(session)
        return again


def _put_back_locked(taken: list[tuple[Session, Packets]]) -> None:
    """Return all taken packets to their sessions, for a later call. Idempotent."""
    while taken:
        session, packets = taken[-1]
        session.put_back(packets)
        taken.pop()
