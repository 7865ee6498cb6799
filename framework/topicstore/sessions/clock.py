"""The session clocks, by which sessions expire and wills are due. They don't jump, and continue after restarts.

A database of one process has one session clock; a database that sites share has one for each shard. A clock starts at
the wall clock's time. While a process has the database open, it advances by the monotonic clock. From one process to
the next it advances by the wall clock's progress, or not at all if the wall clock went back. Stored times are times of
these clocks, and stay valid when the wall clock is set. An opening continues the clock from its last *note*, a pair of
times by the session clock and by the wall clock. A note is a `_Moment` in the state (`topicstore.sessions.records`) of
the shard, or of shard 0 for all shards. Without a note the two clocks are equal.

A note is written when a tick finds that the wall clock was set, and also at intervals. So a wall clock that is
wrong at the next opening can't set this clock back far. A jump that no tick noticed before a crash, or that occurs
while no process is running, can't be distinguished from elapsed time.

On a site, the wall clock is only compared with the site's own notes. After a note of another site, the clock of a shard
advances by the time, on the monotonic clock, since this site has applied the note. So a new owner whose wall clock is
wrong ends no session. If the site has been restarted meanwhile, the time before its start doesn't count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.runtime.clocks import SteadyClock
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import Applied, ShardState
from topicstore.storage.storage import Storage

from .records import CLOCK, VERSION, decode, decoder, put

__all__ = ["DECODERS", "SessionClock", "SessionClocks", "microseconds"]

_TOLERANCE = 1_000_000
"""Microseconds by which the wall clock may change without a new record; ticks have the same precision."""
_NOTED_EVERY = 3_600_000_000
"""Microseconds after which the record is renewed even if the wall clock was not set."""
_SITE_NOTES_EVERY = 60_000_000
"""The same on a site of a cluster. A new owner that began to run since loses so much time at most."""


class _Moment(msgspec.Struct, frozen=True, array_like=True):
    """The time by both clocks, read together. Fields are only ever appended."""

    version: int
    wall: int = 0
    sessions: int = 0
    site: str = ""
    """The site that has read the clocks; empty for a database of one process."""


DECODERS: Decoders = {CLOCK: decoder(_Moment)}
"""Decoder of the state that holds the time by both clocks."""


class SessionClock:
    """A clock of sessions' expiry and of wills, in microseconds, that continues after restarts and ignores clock jumps.

    Changes need the sessions' mutex; reading the time needs no lock.

    steady: a clock that started at the wall clock's time when the database was opened, and advances monotonically.
    state:  the state of the shard that stores the clock's notes.
    site:   this process's site of the cluster that shares the database; empty without a cluster.
    """

    def __init__(self, steady: SteadyClock, state: ShardState, site: str) -> None:
        self._steady = steady
        self._state = state
        self.site = site
        """This process's site of the cluster that shares the database; empty without a cluster."""
        self._applied: Applied | None = None
        """The last applied write of a note, as of the last reading of the note. Only used on a site."""
        self._made: _Moment | None = None
        """The last note that this object has made, committed or not."""
        self._behind_steady = 0
        """The time of ``steady`` minus this clock's, in microseconds."""
        self._behind_wall = 0
        """The wall clock's time minus this clock's, in microseconds, at the last note or opening."""
        self.noted = False
        """Whether there is a note."""
        self._note_at = 0
        if not site:
            self._read()

    def __call__(self) -> int:
        """Return the current time, in microseconds."""
        last_applied = self._state.last_applied
        if last_applied is not None and self._applied != last_applied(CLOCK):
            self._read()
        return self._steady() - self._behind_steady

    def wall(self, time: int) -> int:
        """Convert a time of this clock to the wall clock, in microseconds since the epoch."""
        self()  # reads a note that another site has stored
        return time + self._behind_wall

    def _read(self) -> None:
        """Continue from the stored note, unless this object has made it."""
        last_applied = self._state.last_applied
        applied = None if last_applied is None else last_applied(CLOCK)  # read first, so that no later note is missed
        stored, present = self._state.get(CLOCK), self._steady()
        note = None if stored is None else decode(CLOCK, stored, _Moment)
        if note is not None and note == self._made:
            self._applied = applied
            return
        note, self.noted = note or _Moment(VERSION, site=self.site), note is not None
        if note.site == self.site:
            self._behind_steady = self._behind_wall = present - note.sessions - max(present - note.wall, 0)
        elif applied is not None:
            self._behind_steady = self._steady.at(applied.time) - note.sessions
            self._behind_wall = note.wall - note.sessions
        self._note_at = 0
        self._applied = applied

    def due(self) -> _Moment | None:
        """Return the note to commit; None if the stored one is up to date."""
        now, behind = self(), self._behind_steady + self._steady.behind()
        if now >= self._note_at or abs(behind - self._behind_wall) >= _TOLERANCE:
            self._made = _Moment(VERSION, now + behind, now, self.site)
            return self._made
        return None

    def committed(self, note: _Moment) -> None:
        """Record that a note is committed."""
        self.noted = True
        self._behind_wall = note.wall - note.sessions
        self._note_at = note.sessions + (_SITE_NOTES_EVERY if self.site else _NOTED_EVERY)


class SessionClocks:
    """The session clocks of one open database."""

    def __init__(self, storage: Storage) -> None:
        site = "" if storage.site is None else storage.site.name
        states = [storage.state(shard) for shard in range(len(storage.shards) if site else 1)]
        self._clocks = [SessionClock(storage.steady, state, site) for state in states]

    def of(self, shard: int) -> SessionClock:
        """Return the clock of a shard's sessions."""
        return self._clocks[shard] if len(self._clocks) > 1 else self._clocks[0]

    def note(
        self,
        shards: Collection[int],
        commit: Callable[[Mapping[int, Sequence[StateWrite]]], Mapping[int, TopicstoreError]],
        *,
        first: bool = False,
    ) -> Mapping[int, TopicstoreError]:
        """Commit the due notes of these shards, which this process owns; return the errors by shard.

        On a site, a note is due only for shards that have one or, with ``first``, for shards that have none. ``commit``
        commits writes of several shards.
        """
        notes = dict(self._due(shards, first=first))
        if not notes:
            return {}
        failures = commit({shard: [put(CLOCK, note)] for shard, note in notes.items()})
        for shard, note in notes.items():
            if shard not in failures:
                self._clocks[shard].committed(note)
        return failures

    def _due(self, shards: Collection[int], *, first: bool) -> Iterator[tuple[int, _Moment]]:
        for shard, clock in enumerate(self._clocks):
            note = clock.due() if shard in shards else None
            wanted = clock.noted is not first if clock.site else not first
            if wanted and note is not None:
                yield shard, note


def microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds, the unit of records."""
    return round(seconds * 1e6)
