"""`ClockGuard`: a time for removals that must not come too early, even if the wall clock jumps forward."""

from __future__ import annotations

from topicstore.contract.positions import span_text
from topicstore.runtime.clocks import Clocks, SteadyClock
from topicstore.runtime.warning import warn_caller

__all__ = ["ClockGuard"]

_TOLERANCE = 60_000_000
"""Microseconds by which clocks may differ before this counts as a jump."""


class ClockGuard:
    """Holds back the time by which the wall clock is ahead of the time that has really passed since the guard was made.

    The wall clock is trusted when the guard is made, and again once it has differed by the same amount for as long as
    messages are kept: messages stored before it was set are then old enough by any clock. One that is set back is
    trusted, too, because messages that are stored then get its times: when it is set right, it has jumped forward for
    them. Used by one thread at a time, but for `stored`.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.held_back = 0
        """Microseconds by which the wall clock has jumped ahead, which don't count as passed."""
        self._trust()

    def _trust(self) -> None:
        self._steady = SteadyClock(self._clocks)
        self._told = self.held_back = 0
        # Threads that store set these two without a lock: a stale value stands until the next store.
        self._lowest = 0
        """The most microseconds by which the wall clock has been behind since, as a number below 0."""
        self._noted = 0, self._clocks.monotonic()
        """By how much the wall clock differs, and the monotonic time since which it does."""

    def stored(self) -> None:
        """Note where the wall clock is when messages are stored. Cheap; may be called by any thread."""
        differ = self._steady.behind()
        if differ < self._lowest:
            self._lowest = differ
        if abs(differ - self._noted[0]) > _TOLERANCE:
            self._noted = differ, self._clocks.monotonic()

    def look(self, kept_for: int) -> None:
        """Compare the clocks, and warn of a jump forward. ``kept_for``: microseconds for which messages are kept."""
        self.stored()
        ahead = self._steady.behind() - self._lowest
        self.held_back = ahead if ahead > _TOLERANCE else 0
        told, self._told = self._told, self.held_back
        if self.held_back and abs(self.held_back - told) > _TOLERANCE:
            warn_caller(
                f"the clock is {span_text(ahead)} ahead of the time that has passed; until it has been so for "
                "as long as messages stay, that doesn't count for retention",
            )
        elif self._clocks.monotonic() - self._noted[1] >= kept_for:
            self._trust()
