"""The clocks of an open database, which distinguish time that has passed from changes of the wall clock.

Two clocks, both in microseconds. The wall clock says when something happened, and may jump. Positions begin with its
time, and messages expire by it, because their expiry interval counts from their position's time. The monotonic clock
says how much time has passed in this process, and never jumps: all durations are measured by it, through a
`SteadyClock`. It ends with its process. A wait that spans a restart therefore takes from the wall clock how much time
has passed between the two processes, and nothing else: a jump counts only if no process ran that could notice it
(`topicstore.sessions.session_clock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

__all__ = ["Clocks", "SteadyClock", "monotonic", "now"]

_PASSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The machine's monotonic clock; where the system has one, a clock that also goes on while the machine is suspended."""


def now() -> int:
    """Return the current time by the machine's clock, in microseconds since the epoch."""
    return time.time_ns() // 1_000


def monotonic() -> int:
    """Return the microseconds since a fixed moment, which setting the machine's clock doesn't change."""
    return time.clock_gettime_ns(_PASSED) // 1_000


@attrs.frozen
class Clocks:
    """The clocks of an open database."""

    wall: Callable[[], int] = now
    """Returns the current time, in microseconds since the epoch."""
    monotonic: Callable[[], int] = monotonic
    """Returns the microseconds since a fixed moment."""

    @classmethod
    def given(cls, wall: Callable[[], int], passing: Callable[[], int] | None) -> Clocks:
        """Return the clocks given. Without ``passing``, a wall clock that is not the machine's serves as both."""
        return cls(wall, passing or (monotonic if wall is now else wall))


class SteadyClock:
    """A clock that starts at the wall clock's time and advances by the monotonic clock."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._began = clocks.wall() - clocks.monotonic()

    def __call__(self) -> int:
        """Return the current time, in microseconds since the epoch."""
        return self._began + self._clocks.monotonic()

    def behind(self) -> int:
        """Return by how many microseconds the wall clock has jumped ahead since; negative if it jumped back."""
        return self._clocks.wall() - self()
