"""The clocks of an open database, which distinguish elapsed time from changes of the wall clock.

There are two clocks, both in microseconds. The wall clock gives the time of events, and may jump. Positions begin with
its time, and messages expire by it, because their expiry interval counts from their position's time. The monotonic
clock measures elapsed time in this process, and never jumps: all durations are measured with it, through a
`SteadyClock`. It isn't comparable between processes. For a wait that spans a restart, the wall clock supplies the time
between the two processes. A jump therefore counts only if it happened while no process ran to detect it
(`topicstore.sessions.clock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from topicstore.contract.positions import span_text

from .warning import warn_caller

__all__ = ["ClockGuard", "Clocks", "SteadyClock", "monotonic", "now"]

_PASSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The id of the system's monotonic clock; if available, of one that also advances while the machine is suspended."""
_TOLERANCE = 60_000_000
"""Microseconds above which a difference of the clocks counts as a jump."""


def now() -> int:
    """Return the current time by the machine's clock, in microseconds since the epoch."""
    return time.time_ns() // 1_000


def monotonic() -> int:
    """Return the microseconds since a fixed moment, which is unaffected by changes of the machine's clock."""
    return time.clock_gettime_ns(_PASSED) // 1_000


@attrs.frozen
class Clocks:
    """The clocks of an open database."""

    wall: Callable[[], int] = now
    """A function that returns the current time, in microseconds since the epoch."""
    monotonic: Callable[[], int] = monotonic
    """A function that returns the microseconds since a fixed moment, and never jumps."""

    @classmethod
    def given(cls, wall: Callable[[], int], passing: Callable[[], int] | None) -> Clocks:
        """Return clocks with these functions. If ``passing`` is None, a custom ``wall`` is also the monotonic clock."""
        return cls(wall, passing or (monotonic if wall is now else wall))


class SteadyClock:
    """A clock that starts at the wall clock's time and advances by the monotonic clock."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._began = clocks.wall() - clocks.monotonic()

    def __call__(self) -> int:
        """Return the current time, in microseconds since the epoch."""
        return self._began + self._clocks.monotonic()

    def at(self, monotonic: int) -> int:
        """Return this clock's time at a time of the monotonic clock."""
        return self._began + monotonic

    def wall(self, time: int) -> int:
        """Convert a time of this clock to the wall clock as it is set now."""
        return time + self.behind()

    def behind(self) -> int:
        """Return by how many microseconds the wall clock has jumped ahead since the start; negative if backwards."""
        return self._clocks.wall() - self()


class ClockGuard:
    """Measures the time by which the wall clock has jumped ahead of elapsed time, for retention to subtract.

    The wall clock is trusted when the guard is created, and again after it has differed by the same amount for as long
    as messages are kept: then messages stored before the change are old enough by any clock. A wall clock that is set
    back is trusted as well, because messages stored then get its times; when it is set forward again, that is a jump
    for these messages. Used by one thread at a time, except `stored`.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.held_back = 0
        """Microseconds by which the wall clock has jumped ahead, and which don't count as elapsed."""
        self._trust()

    def _trust(self) -> None:
        self._steady = SteadyClock(self._clocks)
        self._reported = self.held_back = 0
        # Storing threads set these two fields without a lock; the next store corrects a stale value.
        self._lowest = 0
        """The lowest difference of the wall clock from elapsed time, in microseconds; 0 or negative."""
        self._unchanged = 0, self._clocks.monotonic()
        """The current difference in microseconds, and the monotonic time since which it has not changed."""

    def stored(self) -> None:
        """Record the wall clock's difference when messages are stored. Cheap and thread-safe."""
        differ = self._steady.behind()
        if differ < self._lowest:
            self._lowest = differ
        if abs(differ - self._unchanged[0]) > _TOLERANCE:
            self._unchanged = differ, self._clocks.monotonic()

    def look(self, kept_for: int) -> None:
        """Update `held_back`, and warn of a jump forward. ``kept_for``: microseconds for which messages are kept."""
        self.stored()
        ahead = self._steady.behind() - self._lowest
        self.held_back = ahead if ahead > _TOLERANCE else 0
        reported, self._reported = self._reported, self.held_back
        if self.held_back and abs(self.held_back - reported) > _TOLERANCE:
            warn_caller(
                f"the clock is {span_text(ahead)} ahead of the time that has passed; until it has been so for "
                "as long as messages stay, that doesn't count for retention",
            )
        elif self._clocks.monotonic() - self._unchanged[1] >= kept_for:
            self._trust()
