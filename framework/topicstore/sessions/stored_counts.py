"""`StoredCounts`: how many sessions are stored, in all and of each user, and how many there may be."""

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
    """How many sessions may be stored. Both may be set at any time, in any thread, and are not stored.

    A session that would be one more can't be opened, with a `QuotaExceededError`; those that are stored can. Sessions
    that are kept in memory don't count. Raises `InvalidArgumentError` for anything but a number from 1, or None.
    """

    in_all: int | None = attrs.field(default=None, validator=_check)
    """Sessions of all clients; None: any number."""
    each_user: int | None = attrs.field(default=None, validator=_check)
    """Sessions of each user, as `Sessions.open` was told; those without a user count together. None: any number."""


class StoredCounts:
    """Counts the stored sessions of one open database. Used under the dispatcher's lock.

    users: yields the user of each stored session. It is called when a bound is first looked at.
    """

    def __init__(self, users: Callable[[], Iterable[str]]) -> None:
        self.bounds = StoredBounds()
        self._users = users
        self._counts: Counter[str] | None = None
        """By user, or None as long as nothing was counted."""
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
        """Count one more or less."""
        if self._counts is not None:
            self._counts[user] += change
            self._total += change
