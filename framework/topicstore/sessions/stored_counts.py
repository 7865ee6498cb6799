"""`StoredCounts`: the numbers of stored sessions, in all and of each user, and their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import attrs

from topicstore.contract.arguments import check_count
from topicstore.contract.errors import QuotaExceededError

__all__ = ["StoredBounds", "StoredCounts"]


def _check(_instance: StoredBounds, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None:
        check_count(attribute.name, value)


@attrs.define
class StoredBounds:
    """The largest numbers of stored sessions. May be set at any time, in any thread; not stored.

    Opening a new session above a limit raises `QuotaExceededError`; stored sessions can still be opened. Sessions that
    are kept in memory don't count. Raises `InvalidArgumentError` for a value other than None or a positive integer.
    """

    in_all: int | None = attrs.field(default=None, validator=_check)
    """The limit for all clients together; None: no limit."""
    each_user: int | None = attrs.field(default=None, validator=_check)
    """The limit for each ``user`` of `Sessions.open`; sessions without a user count together. None: no limit."""


class StoredCounts:
    """Counts the stored sessions of one open database. Used under the sessions' mutex.

    users: yields the user of each stored session. Called when a limit is first checked.
    """

    def __init__(self, users: Callable[[], Iterable[str]]) -> None:
        self.bounds = StoredBounds()
        self._users = users
        self._counts: Counter[str] | None = None
        """The number of sessions by user; None before the first count."""
        self._total = 0

    def check(self, user: str) -> None:
        """Raise `QuotaExceededError` if one more session can't be stored."""
        bounds = self.bounds
        if bounds.in_all is None and bounds.each_user is None:
            return
        if self._counts is None:
            counts = Counter(self._users())
            self._counts, self._total = counts, counts.total()
        if bounds.in_all is not None and self._total >= bounds.in_all:
            raise QuotaExceededError(f"{self._total:,} sessions are stored, and {bounds.in_all:,} may be")
        if bounds.each_user is not None and self._counts[user] >= bounds.each_user:
            whose = f"user {user!r}" if user else "clients without a user"
            raise QuotaExceededError(f"{self._counts[user]:,} sessions of {whose} are stored, of {bounds.each_user:,}")

    def add(self, user: str, change: int) -> None:
        """Add ``change``, 1 or -1, to the number of a user's sessions."""
        if self._counts is not None:
            self._counts[user] += change
            self._total += change
