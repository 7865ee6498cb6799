"""`ClockGuard`: a time for removals that must not come too early, even if the wall clock jumps forward."""

from __future__ import annotations

from topicstore.clocks import Clocks, SteadyClock
from topicstore.contract.positions import span_text
from topicstore.warning import warn_caller

__all__ = ["ClockGuard"]

_TOLERANCE = 60_000_000
"""Microseconds by which clocks may differ before this counts as a jump."""


class ClockGuard:
    """Holds back the time by which the wall clock is ahead of the time that has really passed since the guard was made.

    The wall clock is trusted when the guard is made, and again once it has differed by the same amount for as long as
    messages are kept: messages stored before it was set are then old enough by any clock. Used by one thread at a time.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.held_back = 0
        """Microseconds by which the wall clock has jumped ahead, which don't count as passed."""
        self._trust()

    def _trust(self) -> None:
        self._steady = SteadyClock(self._clocks)
        self._noted, self._since = 0, self._clocks.monotonic()
        self.held_back = 0

    def look(self, kept_for: int) -> None:
        """Compare the clocks, and warn of a jump forward. ``kept_for``: microseconds for which messages are kept."""
        differ, passed = self._steady.behind(), self._clocks.monotonic()
        self.held_back = differ if differ > _TOLERANCE else 0
        if abs(differ - self._noted) > _TOLERANCE:
            self._noted, self._since = differ, passed
            if self.held_back:
                warn_caller(
                    f"the clock is {span_text(differ)} ahead of the time that has passed; until it has been so for "
                    "as long as messages stay, that doesn't count for retention",
                )
        elif passed - self._since >= kept_for:
            self._trust()
