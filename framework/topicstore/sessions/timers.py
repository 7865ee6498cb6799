"""`Timers`: what is due: wills, the expiry of sessions, silent clients, checkpoints, and what a crash left open.

Nothing happens by itself: all of it is done by `Timers.tick`, at the time that it is given, which never jumps
(`topicstore.clocks.SteadyClock`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.state import StateWrite

from .context import SessionContext
from .durable_filters import is_durable
from .live_session import LiveSession
from .model import Ended
from .records import EXPIRY, NEVER, Timer
from .session_state import Found, encode_session
from .takeover import Connections
from .wills import Wills, disconnected

__all__ = ["Timers", "microseconds"]

CHECKPOINT_INTERVAL = 15_000_000
"""Microseconds after which what was acknowledged is committed."""
_CHUNK = 1_000
"""Sessions left open by a crash that one tick deals with, a shard."""
_SILENCE = 1.5
"""Keep-alives after which a silent client counts as lost (MQTT 5, section 3.1.2.10)."""
_LONGEST_PAUSE = 1_000_000
"""Microseconds between ticks at most."""


class _Silence(NamedTuple):
    """When to look whether a client was heard of."""

    deadline: int
    order: int
    """Another number for each, so that sessions are not compared."""
    session: LiveSession


class Timers:
    """The timers of one open database's sessions. Used under the dispatcher's lock."""

    def __init__(self, context: SessionContext, connections: Connections, wills: Wills) -> None:
        self._context = context
        self._dispatcher = context.dispatcher
        self._states = context.states
        self._connections = connections
        self._wills = wills
        shards = range(len(context.states.states))
        self._left_open: list[Iterator[str] | None] = [context.states.left_open(shard) for shard in shards]
        """By shard, clients whose sessions a crash may have left open; None: all were looked at."""
        self._next_timer: list[int | None] = [0 for _ in shards]
        """By shard, when its earliest stored timer is due at the earliest; None: there is none."""
        self._silences: list[_Silence] = []
        """When to look whether a client kept silent for too long: a heap."""
        self._order = itertools.count()
        self._checkpoint_due: int | None = None

    def tick(self, now: int) -> float:
        """Do what is due at ``now``, microseconds since the epoch; return in how many seconds to call again."""
        failed = list(self._dispatcher.failed)
        self._dispatcher.failed.clear()
        for session in failed:
            session.try_again()
        for shard in range(len(self._next_timer)):
            self._recover(shard, now)
            self.run(shard, now)
        self._end_silent(now)
        self._context.groups.tick(now, self._connections.stuck_since)
        self._checkpoint_in_time(now)
        return self._pause(now)

    def _pause(self, now: int) -> float:
        waiting = [time for time in (*self._next_timer, self._checkpoint_due) if time is not None]
        waiting += [silence.deadline for silence in self._silences[:1]]
        if any(left is not None for left in self._left_open):
            return 0.0
        return min(max(min(waiting, default=now + _LONGEST_PAUSE) - now, 0), _LONGEST_PAUSE) / 1e6

    def _checkpoint_in_time(self, now: int) -> None:
        if not self._dispatcher.dirty:
            self._checkpoint_due = None
        elif self._checkpoint_due is None:
            self._checkpoint_due = now + CHECKPOINT_INTERVAL
        elif self._checkpoint_due <= now:
            self._checkpoint_due = None
            self._context.commits.checkpoint(list(self._dispatcher.dirty))

    # --- silent clients ---

    def watch(self, session: LiveSession) -> None:
        """Look after a client that has a keep-alive."""
        deadline = session.seen + microseconds(session.keep_alive * _SILENCE)
        heapq.heappush(self._silences, _Silence(deadline, next(self._order), session))

    def _end_silent(self, now: int) -> None:
        while self._silences and self._silences[0].deadline <= now:
            session = heapq.heappop(self._silences).session
            if session.ended is not None:
                continue
            if session.seen + microseconds(session.keep_alive * _SILENCE) <= now:
                try:
                    self._context.end(session, Ended.KEEP_ALIVE, send_will=True)
                except TopicstoreError as failure:
                    session.failed(failure)
                    if session.ended is not None:
                        continue
                    heapq.heappush(self._silences, _Silence(now + _LONGEST_PAUSE, next(self._order), session))
            else:
                self.watch(session)

    # --- what a crash left open ---

    def _recover(self, shard: int, now: int) -> None:
        """Deal with sessions that a crash left open: their connections are lost, as of now."""
        left = self._left_open[shard]
        if left is None:
            return
        clients = list(islice(left, _CHUNK))
        writes: list[StateWrite] = []
        for client_id in clients:
            found = None if client_id in self._connections.live else self._states.find(client_id)
            if found is not None and found.record.ending:
                self.remove(found)
            elif found is not None and found.record.connected:
                writes += self.lose(found, now)
        if writes:
            self._states.write(shard, writes)
        if len(clients) < _CHUNK:
            self._left_open[shard] = None

    def lose(self, found: Found, now: int) -> Sequence[StateWrite]:
        """Return the writes by which the connection of a session that nobody has open is lost."""
        record = disconnected(found.record, now, found.record.expiry_interval, will=True)
        after = encode_session(found.client_id, record)
        self.expect(after)
        return self._states.change(found.client_id, found, after)

    # --- stored timers ---

    def expect(self, found: Found) -> None:
        """A session was stored as this, with its timers."""
        shard = self._states.shard_of(found.client_id)
        for time in (found.record.expires, found.record.will_due):
            if time != NEVER:
                self._expect_at(shard, time)

    def _expect_at(self, shard: int, time: int) -> None:
        following = self._next_timer[shard]
        self._next_timer[shard] = time if following is None else min(following, time)

    def run(self, shard: int, now: int) -> None:
        """Fire the stored timers of a shard that are due, and find the next."""
        following = self._next_timer[shard]
        if following is None or following > now:
            return
        self._next_timer[shard] = None
        failed = False
        timers = self._states.timers(shard)
        for timer in islice(timers, _CHUNK):
            if timer.time > now:
                self._expect_at(shard, timer.time)
                break
            try:
                self._fire(timer)
            except TopicstoreError:
                failed = True  # the others go on
        else:
            for timer in timers:
                self._expect_at(shard, timer.time)
                break
        if failed:
            self._expect_at(shard, now + _LONGEST_PAUSE)

    def _fire(self, timer: Timer) -> None:
        found, expiry = self._states.find(timer.client_id), timer.kind == EXPIRY
        due = None if found is None else found.record.expires if expiry else found.record.will_due
        if found is None or due != timer.time:
            self._states.forget_timer(timer)
        elif expiry:
            self.remove(found)
        else:
            self._wills.publish(found)

    def remove(self, found: Found) -> None:
        """End a session: publish a will that is pending, and remove all it kept, unless it was opened meanwhile."""
        if found.record.will_due != NEVER or (found.record.connected and found.record.will_delay != NEVER):
            found = self._wills.publish(found)
        records = [record for _, record in self._states.subscriptions(found.client_id)]
        ending = self._context.groups.ending(found, records)
        if ending is not None and self._states.remove(ending):
            self._context.groups.ended(found.client_id, records)
            for record in records:
                if is_durable(record):
                    self._context.filters.remove_locked(record.topic_filter)


def microseconds(seconds: float) -> int:
    """Return seconds as the microseconds that records have."""
    return round(seconds * 1e6)
