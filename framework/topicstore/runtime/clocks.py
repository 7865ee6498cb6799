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

__all__ = ["Clocks", "SteadyClock", "monotonic", "now"]

_PASSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The id of the system's monotonic clock; if available, of one that also advances while the machine is suspended."""


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
        """Return clocks of these functions. If ``passing`` is None, a custom wall clock is also the monotonic clock."""
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
