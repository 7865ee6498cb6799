"""Clocks for `topicstore.open` that only tests advance, and a function that advances this process's clocks by a day."""

from __future__ import annotations

import time

import attrs
import pytest

__all__ = ["START", "Clock", "pass_a_day"]

START = 1_700_000_000_000_000
"""The initial time of clocks, in microseconds since 1970."""


@attrs.define
class Clock:
    """A wall clock and a monotonic clock: setting ``now`` advances both, and `jump` only the wall clock."""

    now: int = START
    _jumped: int = attrs.field(default=0, init=False)

    def __call__(self) -> int:
        """Return the wall clock's time, in microseconds since 1970."""
        return self.now

    def jump(self, by: int) -> None:
        """Set the wall clock forward or back by microseconds; the monotonic clock stays."""
        self.now += by
        self._jumped += by

    def monotonic(self) -> int:
        """Return the monotonic clock's time, in microseconds."""
        return self.now - self._jumped


def pass_a_day(patch: pytest.MonkeyPatch) -> None:
    """Advance the clocks of the module `time` by a day, for all code that calls them through the module."""
    for name in ("time", "monotonic", "perf_counter"):
        for clock, by in ((name, 86_400), (f"{name}_ns", 86_400 * 10**9)):
            real = getattr(time, clock)
            patch.setattr(time, clock, lambda real=real, by=by: real() + by)
