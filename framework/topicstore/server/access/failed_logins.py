"""How long whoever has shown wrong passwords has to wait before another one of its is checked.

An address that guesses has to pause, longer from one wrong password to the next, and so does each address that has
failed lately and tries a user at whom many have failed. A user at whom others guess gets in without a pause from an
address that hasn't failed. Failures are forgotten with time, and at once by a right password.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["FailedLogins"]

_FREE = 10
"""Failures without a pause."""
_FIRST, _LONGEST = 0.05, 1.0
"""Seconds of the pause after the first failure that isn't free, and of the longest pause; each is twice the one before.
Others may come from the same address, so no pause is long."""
_HALVED = 60.0
"""Seconds in which half of the failures are forgotten."""
_KEPT = 10_000
"""Addresses, and users, whose failures are remembered; those that failed least lately are forgotten."""


class _Failures:
    """The failures by key, of a bounded number of keys, which are short."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """How many failures there were at the time of the last one, and that time."""

    def count(self, key: str) -> float:
        """Return how many failures are not forgotten."""
        number, last = self._found.get(key, (0.0, 0.0))
        return number * math.exp2((last - self._now()) / _HALVED) if number else 0.0

    def pause(self, key: str) -> float:
        """Return the seconds that are left of the pause after the last failure; 0 or less: none."""
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
    """What is remembered of wrong passwords, by texts of a bounded size that stand for users. Used in one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """``now`` returns seconds that never go back."""
        self._addresses, self._users = _Failures(now), _Failures(now)

    def pause(self, address: str, user: str) -> float:
        """Return for how many seconds no password for a user may be checked for an address; 0 or less: for none."""
        if self._addresses.count(address) < 0.5:
            return 0.0
        return max(self._addresses.pause(address), self._users.pause(user))

    def note(self, address: str, user: str, *, right: bool) -> None:
        """Note whether a password was right."""
        for failures, key in ((self._addresses, address), (self._users, user)):
            if right:
                failures.forget(key)
            else:
                failures.add(key)
