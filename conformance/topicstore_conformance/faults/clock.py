"""Clocks for `topicstore.open` that only tests advance."""

from __future__ import annotations

import attrs

__all__ = ["START", "Clock"]

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
