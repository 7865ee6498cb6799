"""A clock that only moves when it is told to, for `topicstore.open`."""

from __future__ import annotations

import attrs

__all__ = ["START", "Clock"]

START = 1_700_000_000_000_000
"""Where clocks begin: microseconds since 1970."""


@attrs.define
class Clock:
    """Returns ``now``, which whoever made it sets."""

    now: int = START

    def __call__(self) -> int:
        """Return the present."""
        return self.now
