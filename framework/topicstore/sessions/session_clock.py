"""`SessionClock`: the clock by which sessions end and wills are due. It doesn't jump, and goes on across restarts.

It starts at the wall clock's time. While a process has the database open, it advances by the monotonic clock; from one
process to the next, by the time that has passed according to the wall clock, or not at all if that went back. Stored
times are times of this clock, and need no change when the wall clock is set: the next opening only has to know the time
by both clocks at one moment since: `_Moment`, in the state of shard 0 (`topicstore.sessions.records`). Without that
record the two clocks are equal.

The record is written as soon as a tick finds that the wall clock was set, and also at intervals, so that a wall clock
that is wrong when the database is opened again can't set this clock back far. A jump that no tick has noticed before a
crash, or one while no process is running, can't be told from time that passes.
"""

from __future__ import annotations

import msgspec

from topicstore.runtime.clocks import SteadyClock
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import ShardState

from .records import CLOCK, VERSION, decode, decoder, put

__all__ = ["DECODERS", "SessionClock", "microseconds"]

_TOLERANCE = 1_000_000
"""Microseconds by which the wall clock may be set without a record. Ticks are not more precise either."""
_NOTED_EVERY = 3_600_000_000
"""Microseconds after which the clocks are recorded even if none was set."""


class _Moment(msgspec.Struct, frozen=True, array_like=True):
    """The time by both clocks at one moment. Fields are only ever appended."""

    version: int
    wall: int = 0
    sessions: int = 0


DECODERS: Decoders = {CLOCK: decoder(_Moment)}
"""Decoder of the state that holds the time by both clocks."""


class SessionClock:
    """The session clock of one open database. Changed under the dispatcher's lock; reading the time needs none.

    ``steady`` started at the wall clock's time when the database was opened.
    """

    def __init__(self, steady: SteadyClock, state: ShardState) -> None:
        self._steady = steady
        self._state = state
        stored, present = state.get(CLOCK), steady()
        noted = _Moment(VERSION) if stored is None else decode(CLOCK, stored, _Moment)
        self._behind_steady = present - noted.sessions - max(present - noted.wall, 0)
        self._behind_wall = self._behind_steady
        """How far it was behind the wall clock when that was last recorded, or when the database was opened."""
        self._note_at = 0

    def __call__(self) -> int:
        """Return the current time, in microseconds."""
        return self._steady() - self._behind_steady

    def wall(self, time: int) -> int:
        """Return a time of this clock as a time of the wall clock as that is set now."""
        return time + self._behind_wall

    def note(self) -> None:
        """Commit the time by both clocks, if the stored record no longer holds. Raises the errors of writing state."""
        now, behind = self(), self._behind_steady + self._steady.behind()
        if now >= self._note_at or abs(behind - self._behind_wall) >= _TOLERANCE:
            self._state.write([put(CLOCK, _Moment(VERSION, now + behind, now))])
            self._behind_wall = behind
            self._note_at = now + _NOTED_EVERY


def microseconds(seconds: float) -> int:
    """Return seconds as the whole microseconds that records hold."""
    return round(seconds * 1e6)
