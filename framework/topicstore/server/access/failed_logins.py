"""Pauses between password checks after failed logins, against guessing.

An address with many failures has to pause, longer after each one. An address with a recent failure also has to pause if
the user has many failures. From an address without failures a user can always log in without a pause, even while other
addresses guess the user's password. Failures decay with time, and a correct password clears them.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["FailedLogins"]

_FREE = 10
"""Number of failures that cause no pause."""
_FIRST, _LONGEST = 0.05, 1.0
"""Seconds of the first and of the longest pause; each pause is twice the previous one. Other users may share the
address, so no pause is long."""
_HALVED = 60.0
"""The half-life of the number of failures, in seconds."""
_KEPT = 10_000
"""Most addresses, and most users, whose failures are stored; the one with the oldest last failure is evicted."""


class _Failures:
    """The numbers of failures by key, for a bounded number of short keys."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """The decayed number of failures at the time of the last failure, and that time."""

    def count(self, key: str) -> float:
        """Return the decayed number of failures."""
        number, last = self._found.get(key, (0.0, 0.0))
        return number * math.exp2((last - self._now()) / _HALVED) if number else 0.0

    def pause(self, key: str) -> float:
        """Return the remaining seconds of the pause after the last failure; 0 or less: none."""
        number, last = self._found.get(key, (0.0, 0.0))
        if number <= _FREE:
            return 0.0
        return last + min(_LONGEST, _FIRST * math.exp2(min(number - _FREE - 1, 64))) - self._now()

    def add(self, key: str) -> None:
        number = self.count(key) + 1
        self._found[key] = number, self._now()
        self._found.move_to_end(key)
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)

    def forget(self, key: str) -> None:
        self._found.pop(key, None)


class FailedLogins:
    """The failed logins by address and user. Not thread-safe; users are given by strings of bounded size."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """``now`` returns a monotonic time in seconds."""
        self._addresses, self._users = _Failures(now), _Failures(now)

    def pause(self, address: str, user: str) -> float:
        """Return the seconds for which an address may not check a user's password; 0 or less: none."""
        if self._addresses.count(address) < 0.5:
            return 0.0
        return max(self._addresses.pause(address), self._users.pause(user))

    def note(self, address: str, user: str, *, right: bool) -> None:
        """Record whether a password was correct."""
        for failures, key in ((self._addresses, address), (self._users, user)):
            if right:
                failures.forget(key)
            else:
                failures.add(key)
