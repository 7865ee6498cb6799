"""Clocks for `topicstore.open` that move only when a test moves them."""

from __future__ import annotations

import attrs

__all__ = ["START", "Clock"]

START = 1_700_000_000_000_000
"""The time at which clocks begin: microseconds since 1970."""


@attrs.define
class Clock:
    """A clock that returns ``now``, which the test sets: that much time passes, unless the test calls `jump`."""

    now: int = START
    _jumped: int = attrs.field(default=0, init=False)

    def __call__(self) -> int:
        """Return the present."""
        return self.now

    def jump(self, by: int) -> None:
        """Set the clock forward or back, without time passing."""
        self.now += by
        self._jumped += by

    def monotonic(self) -> int:
        """Return the time that has really passed."""
        return self.now - self._jumped
