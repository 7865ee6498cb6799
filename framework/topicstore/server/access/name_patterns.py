"""Patterns of user names and client ids: ``*`` stands for any text, and in client ids ``%u`` for the user's name.

Names are matched in linear time, because clients choose them: the texts between ``*`` are searched in order, each at
its first occurrence. A later occurrence can't match better, so there is no backtracking.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

__all__ = ["ClientIdPatterns", "NamePattern"]

_USER = "%u"


class NamePattern:
    """A pattern in which only ``*`` is special."""

    __slots__ = ("_parts",)

    def __init__(self, text: str) -> None:
        self._parts = tuple(text.split("*"))

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return _match(self._parts, name)


class ClientIdPatterns:
    """Patterns of client ids, in which ``%u`` can bind a client id to a user.

    A client id is bound to at most one user. Therefore ``*`` may not follow ``%u``. Patterns with ``%u`` also don't
    apply to users whose names contain the character after ``%u`` in a pattern: with ``%u-*`` the client id ``ann-b-1``
    would belong to both ``ann`` and ``ann-b``. A ``*`` in a user's name has no special meaning.
    """

    __slots__ = ("_delimiters", "_free", "_named")

    def __init__(self, texts: Sequence[str]) -> None:
        """Parse patterns. Raises ValueError if a client id could be bound to two users."""
        named = [text.split(_USER) for text in texts if _USER in text]
        for before, after, *more in named:
            text = _USER.join((before, after, *more))
            if more or "*" in before or after.startswith("*"):
                raise ValueError(f"{text!r} has more than one '%u', or '*' before it or right behind it")
        _check_apart({before for before, *_ in named})
        self._free = tuple(NamePattern(text) for text in texts if _USER not in text)
        self._named = tuple((before, tuple(after.split("*"))) for before, after in named)
        self._delimiters = frozenset(after[:1] for _, after in named) - {""}

    def match(self, client_id: str, user: str | None, *, mistakable: bool = False) -> bool:
        """Return whether a client id is allowed to a user, or matches a pattern without ``%u``; None is anonymous.

        ``mistakable``: also match users whose names make the client id ambiguous, as rules that deny must.
        """
        if any(pattern.matches(client_id) for pattern in self._free):
            return True
        if not user or not (mistakable or self._delimiters.isdisjoint(user)):
            return False
        return any(_match((before + user + first, *rest), client_id) for before, (first, *rest) in self._named)


def _check_apart(beginnings: Iterable[str]) -> None:
    """Raise ValueError if a text before ``%u`` is a prefix of another one."""
    for one, following in itertools.pairwise(sorted(beginnings)):
        if following.startswith(one):
            raise ValueError(f"'{one}%u' and '{following}%u' can mean two users by the same client id")


def _match(parts: Sequence[str], name: str) -> bool:
    """Return whether a name consists of the parts in order, with any text between two parts."""
    first, *between = parts
    if not between:
        return name == first
    last = between.pop()
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in between:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
