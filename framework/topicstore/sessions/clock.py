"""`SessionClock`: the clock by which sessions expire and wills are due. It doesn't jump, and continues after restarts.

It starts at the wall clock's time. While a process has the database open, it advances by the monotonic clock. From one
process to the next it advances by the wall clock's progress, or not at all if the wall clock went back. Stored times
are times of this clock, and stay valid when the wall clock is set. The next opening only needs one pair of times by
both clocks after that: a `_Moment` in the state of shard 0 (`topicstore.sessions.records`). Without that record the two
clocks are equal.

The record is written when a tick finds that the wall clock was set, and also at intervals. So a wall clock that is
wrong at the next opening can't set this clock back far. A jump that no tick noticed before a crash, or that occurs
while no process is running, can't be distinguished from elapsed time.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from topicstore.contract.errors import ShardElsewhereError
from topicstore.runtime.clocks import SteadyClock
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import ShardState

from .records import CLOCK, VERSION, decode, decoder, put

__all__ = ["DECODERS", "SessionClock", "microseconds"]

_TOLERANCE = 1_000_000
"""Microseconds by which the wall clock may change without a new record; ticks have the same precision."""
_NOTED_EVERY = 3_600_000_000
"""Microseconds after which the record is renewed even if the wall clock was not set."""


class _Moment(msgspec.Struct, frozen=True, array_like=True):
    """The time by both clocks, read together. Fields are only ever appended."""

    version: int
    wall: int = 0
    sessions: int = 0


DECODERS: Decoders = {CLOCK: decoder(_Moment)}
"""Decoder of the state that holds the time by both clocks."""


class SessionClock:
    """The session clock of one open database. Changed under the sessions' mutex; reading the time needs none.

    ``steady`` started at the wall clock's time when the database was opened.
    """

    def __init__(self, steady: SteadyClock, state: ShardState) -> None:
        self._steady = steady
        self._state = state
        stored, present = state.get(CLOCK), steady()
        noted = _Moment(VERSION) if stored is None else decode(CLOCK, stored, _Moment)
        self._behind_steady = present - noted.sessions - max(present - noted.wall, 0)
        self._behind_wall = self._behind_steady
        """The wall clock's time minus this clock's, in microseconds, at the last record or opening."""
        self._note_at = 0

    def __call__(self) -> int:
        """Return the current time, in microseconds."""
        return self._steady() - self._behind_steady

    def wall(self, time: int) -> int:
        """Convert a time of this clock to the wall clock, in microseconds since the epoch."""
        return time + self._behind_wall

    def note(self) -> None:
        """Commit the time by both clocks, if the stored record is outdated. Raises the errors of writing state."""
        now, behind = self(), self._behind_steady + self._steady.behind()
        if now >= self._note_at or abs(behind - self._behind_wall) >= _TOLERANCE:
            with suppress(ShardElsewhereError):  # of a cluster, the owner of shard 0 commits it
                self._state.write([put(CLOCK, _Moment(VERSION, now + behind, now))])
            self._behind_wall = behind
            self._note_at = now + _NOTED_EVERY


def microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds, the unit of records."""
    return round(seconds * 1e6)
