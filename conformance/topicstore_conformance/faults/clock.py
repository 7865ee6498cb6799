"""Clocks that only move when they are told to, for `topicstore.open`."""

from __future__ import annotations

import attrs

__all__ = ["START", "Clock"]

START = 1_700_000_000_000_000
"""Where clocks begin: microseconds since 1970."""


@attrs.define
class Clock:
    """Returns ``now``, which whoever made it sets: so much time passes, unless it is told to `jump`."""

    now: int = START
    _jumped: int = attrs.field(default=0, init=False)

    def __call__(self) -> int:
        """Return the present."""
        return self.now

    def jump(self, by: int) -> None:
        """Be set forward, or back: no time passes."""
        self.now += by
        self._jumped += by

    def monotonic(self) -> int:
        """Return what has really passed."""
        return self.now - self._jumped
