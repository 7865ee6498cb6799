"""`ClockGuard`: prevents early removals when the wall clock jumps forward."""

from __future__ import annotations

from topicstore.contract.positions import span_text
from topicstore.runtime.clocks import Clocks, SteadyClock
from topicstore.runtime.warning import warn_caller

__all__ = ["ClockGuard"]

_TOLERANCE = 60_000_000
"""Microseconds above which a difference of the clocks counts as a jump."""


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
        # Storing threads set these two without a lock; the next store corrects a stale value.
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
