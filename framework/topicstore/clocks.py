"""The clocks of an open database, and how it tells time that has passed from a wall clock that was set.

Two clocks, both in microseconds. The wall clock says when something happened, is what positions begin with, and may
jump. The monotonic clock says how much time has passed in this process, and never jumps: all durations go by it.
What must outlive a restart has to be stored as wall time; `SteadyClock` guards that against jumps within a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

__all__ = ["Clocks", "SteadyClock", "monotonic", "now"]

_PASSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Where there is one, a clock that also goes on while the machine is suspended."""


def now() -> int:
    """Return the present by the machine's clock: microseconds since the epoch."""
    return time.time_ns() // 1_000


def monotonic() -> int:
    """Return microseconds that have passed since some moment, whatever the machine's clock was set to meanwhile."""
    return time.clock_gettime_ns(_PASSED) // 1_000


@attrs.frozen
class Clocks:
    """What an open database goes by."""

    wall: Callable[[], int] = now
    """Microseconds since the epoch."""
    monotonic: Callable[[], int] = monotonic
    """Microseconds since some moment."""

    @classmethod
    def given(cls, wall: Callable[[], int], passing: Callable[[], int] | None) -> Clocks:
        """Return these. Without the second, a wall clock that is not the machine's is all the time there is."""
        return cls(wall, passing or (monotonic if wall is now else wall))


class SteadyClock:
    """Begins as the wall clock, which is trusted at that moment, and goes on with the time that really passes."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._began = clocks.wall() - clocks.monotonic()

    def __call__(self) -> int:
        """Return the present: microseconds since the epoch."""
        return self._began + self._clocks.monotonic()
