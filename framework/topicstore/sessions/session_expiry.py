"""`Timers`: wills, the expiry of sessions, keep alives, checkpoints, and the recovery of sessions left open by a crash.

`Timers.tick` does this work, by the session clock, which never jumps (`topicstore.sessions.clock`), in the intervals of
`Pace`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import attrs

from topicstore.contract.errors import InvalidArgumentError, ShardElsewhereError, ShardMovedError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.runtime.closing import do_all, raise_all

from .model import read_filter
from .records import EXPIRY, NEVER, Timer, is_durable
from .registry import SessionRegistry
from .session_store import StoredSession, encode_session
from .wills import Wills, disconnected

__all__ = [
    "AGAIN",
    "Pace",
    "Timers",
]

_LONGEST = 86_400.0


def _check(_instance: Pace, attribute: attrs.Attribute[float], value: float) -> None:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST:
        raise InvalidArgumentError(f"{attribute.name} is seconds above 0, at most {_LONGEST:,.0f}, not {value!r}")


@attrs.define
class Pace:
    """The intervals of periodic work, in seconds, up to a day. May be set at any time, in any thread; not stored.

    Raises `InvalidArgumentError` for a value out of this range.
    """

    longest_pause: float = attrs.field(default=1.0, validator=_check)
    """The most that `Sessions.tick` returns: the longest time between two ticks."""
    checkpoint_interval: float = attrs.field(default=15.0, validator=_check)
    """The longest time before acknowledgements are committed, if no other write commits them."""
    longest_tick: float = attrs.field(default=_LONGEST, validator=_check)
    """The duration of `Sessions.tick` after which the remaining wills, expired sessions and silent clients are left
    for the next call."""


_COUNT_EVERY = 60_000_000
"""Microseconds after which a site of a cluster counts the stored sessions again."""
_CHUNK = 1_000
"""The most sessions that one tick recovers in each shard after a crash, and the most timers that it fires there."""
AGAIN = 1_000_000
"""Microseconds before a retry after an error."""
_BUSY_PAUSE = 100_000
"""The most microseconds between two ticks while sites wait for each other's answers about shared subscriptions."""


@attrs.define
class _LeftOpen:
    """The sessions of one shard that a crash may have left open, still to be checked."""

    clients: Iterator[str]
    due: int = 0
    """The time of the next step."""
    failed: bool = False
    """Whether the recovery of a session failed, so that all are checked again."""


class Timers:
    """The timers of one open database's sessions. Used under the sessions' mutex."""

    def __init__(self, registry: SessionRegistry, wills: Wills, pace: Pace) -> None:
        self._registry, self._pace = registry, pace
        self._dispatcher = registry.dispatcher
        self._states = registry.states
        self._wills = wills
        shards = range(len(registry.states.states))
        self._left_open: list[_LeftOpen | None] = [None for _ in shards]
        """The sessions left open, by shard; None: all were recovered, or another site owns the shard."""
        self._next_timer: list[int | None] = [None for _ in shards]
        """By shard, the earliest time, by its session clock, at which a stored timer may be due; None: there is no
        timer, or another site owns the shard."""
        self.epochs: tuple[int | None, ...] = tuple(None for _ in shards)
        """By shard, the fencing token under which this site owned it at the last `follow_shards`; None for others."""
        self._passed: list[Timer | None] = [None for _ in shards]
        """By shard, the timer after which the next call of `run` begins; None: with the earliest."""
        self._checkpoint_due: int | None = None
        self._closing = False
        """Whether cursors of ended sessions are left to close."""
        self._count_due = 0
        """The time from which stored sessions are counted again, since other sites store and end sessions, too."""
        self.follow_shards()

    def follow_shards(self) -> None:
        """End the sessions of shards that have left this site, and schedule the timers of shards that have come.

        The caller holds the lock of all sessions.
        """
        epochs = self._registry.epochs()
        if epochs == self.epochs:
            return
        before, self.epochs = self.epochs, epochs
        self._registry.end_moved()
        self._states.counts.forget()
        for shard, (known, epoch) in enumerate(zip(before, epochs, strict=True)):
            if epoch != known:
                mine = epoch is not None
                self._left_open[shard] = _LeftOpen(self._states.left_open(shard)) if mine else None
                self._next_timer[shard] = 0 if mine else None
                self._passed[shard] = None

    def owned(self) -> list[int]:
        """Return the shards that this process owned at the last `follow_shards`."""
        return [shard for shard, epoch in enumerate(self.epochs) if epoch is not None]

    def tick(self, end_silent: Callable[[int, float], object]) -> float:
        """Do all work that is due; return the number of seconds after which to call again.

        ``end_silent`` ends the connections of silent clients, until a time of `time.monotonic`.
        Errors are raised after all work was tried, as by `topicstore.runtime.closing.do_all`.
        """
        until, now = self.deadline(), self._registry.steady()
        if self._registry.shared and now >= self._count_due:
            self._count_due = now + _COUNT_EVERY
            self._states.counts.forget()
        if self._registry.left_open:
            self._recover_uncertain()
        self._dispatcher.hear_locked()
        failed = list(self._dispatcher.failed)
        self._dispatcher.failed.clear()
        steps: list[Callable[[], object]] = [session.try_again for session in failed]
        for shard in range(len(self._next_timer)):
            steps += [partial(_unless_moved, partial(self._recover, shard)), partial(self._run_all, shard, until)]
        steps += [
            partial(end_silent, now, until),
            partial(self._registry.groups.tick, now, self._registry.stuck_since),
            self._commit_members,
            partial(self._checkpoint_in_time, now),
            self._close_piece,
        ]
        do_all(steps, "failed")
        return self._pause(now)

    def _pause(self, now: int) -> float:
        longest = round(self._pace.longest_pause * 1e6)
        if now < self._registry.groups.busy_until:
            longest = min(longest, _BUSY_PAUSE)
        clocks = self._registry.clocks
        times = (self._checkpoint_due, self._registry.keep_alive.next_time())
        waiting = [due - now for due in times if due is not None]
        waiting += [0] if self._closing else []
        stored = enumerate(zip(self._next_timer, self._left_open, strict=True))
        for clock, (due, left) in ((clocks.of(shard), one) for shard, one in stored):
            waiting += [time - clock() for time in (due, None if left is None else left.due) if time is not None]
        return min(max(min(waiting, default=longest), 0), longest) / 1e6

    def _close_piece(self) -> None:
        self._closing = self._dispatcher.close_piece_locked()

    def _commit_members(self) -> None:
        """Commit the sessions of members of shared subscriptions that have answers for the groups."""
        clients = self._registry.groups.uncommitted()
        sessions = [session for one in clients if (session := self._registry.connected.get(one)) is not None]
        if sessions:
            raise_all(self._registry.commits.checkpoint(sessions), "failed")

    def _checkpoint_in_time(self, now: int) -> None:
        if not self._dispatcher.dirty:
            self._checkpoint_due = None
        elif self._checkpoint_due is None:
            self._checkpoint_due = now + round(self._pace.checkpoint_interval * 1e6)
        elif self._checkpoint_due <= now:
            self._checkpoint_due = None
            self._registry.commits.checkpoint(list(self._dispatcher.dirty))

    def deadline(self) -> float:
        """Return the time of `time.monotonic` after which due work is left for the next call."""
        return time.monotonic() + self._pace.longest_tick

    # --- sessions that a crash or a failure left open ---

    def recover_later(self, client_ids: Iterable[str]) -> None:
        """At a later tick, end the connections of sessions that are stored as open but are not connected.

        All sessions that are stored as open in the shards of these client ids are checked, except in shards that other
        sites own.
        """
        for shard in set(map(self._states.shard_of, client_ids)).intersection(self.owned()):
            left = self._left_open[shard]
            if left is None:
                self._left_open[shard] = _LeftOpen(self._states.left_open(shard))
            else:  # the running scan may have passed these sessions
                left.failed = True

    def _recover_uncertain(self) -> None:
        """End as lost, at a later step, the sessions that have ended without a commit, and openings without an answer.

        A commit comes first, which the log orders after theirs: if that has no answer, the next tick tries again.
        """
        clients = list(self._registry.left_open)
        shards = set(map(self._states.shard_of, clients)).intersection(self.owned())
        failures = self._states.commit(dict.fromkeys(shards, ()))
        known = [client_id for client_id in clients if self._states.shard_of(client_id) not in failures]
        self.recover_later(known)
        self._registry.left_open.difference_update(known)

    def _recover(self, shard: int) -> None:
        """End the connections of sessions that were left open, as lost now.

        An error in one session doesn't hold up the others; the session is tried again later.
        """
        left, now = self._left_open[shard], self._registry.clocks.of(shard)()
        if left is None or left.due > now:
            return
        ended = True  # a failed read ends the scan, too; then a new scan checks all sessions
        try:
            clients = list(islice(left.clients, _CHUNK))
            ended = len(clients) < _CHUNK
            writes: list[StateWrite] = []
            recoveries = [partial(self._recover_one, client_id, now, writes) for client_id in clients]
            do_all((*recoveries, partial(self._write, shard, writes)), "could not be recovered")
        except BaseException:
            left.failed = True
            raise
        finally:
            if ended:
                again = _LeftOpen(self._states.left_open(shard), now + AGAIN)
                self._left_open[shard] = again if left.failed else None

    def _write(self, shard: int, writes: Sequence[StateWrite]) -> None:
        if writes:
            self._states.write(shard, writes)

    def _recover_one(self, client_id: str, now: int, writes: list[StateWrite]) -> None:
        """Remove a session, or add the writes that end its connection as lost."""
        found = None if client_id in self._registry.connected else self._states.find(client_id)
        if found is not None and found.record.ending:
            self.remove(found)
        elif found is not None and found.record.connected:
            writes += self.lose(found, now)

    def lose(self, found: StoredSession, now: int) -> Sequence[StateWrite]:
        """Return the writes that end the connection of a session without an open object as lost."""
        record = disconnected(found.record, now, found.record.expiry_interval, will=True)
        after = encode_session(found.client_id, record)
        self.expect(after)
        return self._states.change(found.client_id, found, after)

    # --- stored timers ---

    def expect(self, found: StoredSession) -> None:
        """Schedule the timers of a session that was stored."""
        shard = self._states.shard_of(found.client_id)
        for due in (found.record.expires, found.record.will_due):
            if due != NEVER:
                self._expect_at(shard, due)

    def _expect_at(self, shard: int, due: int) -> None:
        following = self._next_timer[shard]
        self._next_timer[shard] = due if following is None else min(following, due)

    def _run_all(self, shard: int, until: float) -> None:
        raise_all(self.run(shard, until), "failed")

    def run(self, shard: int, until: float) -> list[TopicstoreError]:
        """Fire the due timers of a shard, at least one but none after time ``until``, and schedule the next.

        Returns the errors of timers, which `tick` raises and retries. Raises the errors of reading timers.
        """
        following, now = self._next_timer[shard], self._registry.clocks.of(shard)()
        if following is None or following > now:
            return []
        self._next_timer[shard] = None
        try:
            return self._run(shard, now, until)
        except BaseException:  # the timers can't be read now: try again later
            self._expect_at(shard, now + AGAIN)
            raise

    def _run(self, shard: int, now: int, until: float) -> list[TopicstoreError]:
        """Fire at most `_CHUNK` timers, beginning after the last timer of a previous call that was cut short."""
        failures: list[TopicstoreError] = []
        passed, self._passed[shard] = self._passed[shard], None
        timers = (timer for timer in self._states.timers(shard) if passed is None or timer > passed)
        last = passed
        for fired, timer in enumerate(timers):
            if timer.time > now:
                self._expect_at(shard, timer.time)
                break
            if fired == _CHUNK or (fired and time.monotonic() >= until):
                self._passed[shard] = last  # the next call begins after it: failing timers must not starve others
                if len(failures) < fired:
                    self._expect_at(shard, timer.time)
                break
            last = timer
            try:
                self._fire(shard, timer)
            except (ShardElsewhereError, ShardMovedError):  # the shard's timers are left to its new owner
                return failures
            except TopicstoreError as failure:  # other timers still fire
                failures.append(failure)
        if failures or passed is not None:
            self._expect_at(shard, now + AGAIN)
        return failures

    def _fire(self, shard: int, timer: Timer) -> None:
        found, expiry = self._states.find(self._states.client_of(timer.owner)), timer.kind == EXPIRY
        due = None if found is None else found.record.expires if expiry else found.record.will_due
        if found is None or due != timer.time:
            self._states.forget_timer(shard, timer)
        elif expiry:
            self.remove(found)
        else:
            self._wills.publish(found)

    def remove(self, found: StoredSession) -> None:
        """End a session: publish a pending will, and remove its records, unless it was opened meanwhile."""
        if found.record.will_due != NEVER or (found.record.connected and found.record.will_delay != NEVER):
            found = self._wills.publish(found)
        records = [record for _, record in self._states.subscriptions(found.client_id)]
        ending = self._registry.groups.ending(found, records)
        if ending is not None and self._states.remove(ending):
            self._registry.groups.ended(found.client_id, records)
            for record in records:
                if is_durable(record):
                    self._registry.filters.remove(read_filter(record.topic_filter))


def _unless_moved(work: Callable[[], object]) -> None:
    """Call ``work`` for a shard, which is left to the shard's new owner if the shard moves meanwhile."""
    with suppress(ShardElsewhereError, ShardMovedError):
        work()
