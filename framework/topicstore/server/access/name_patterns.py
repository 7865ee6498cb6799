"""Patterns of user names and client ids: ``*`` stands for any text, and in client ids ``%u`` for the user's name.

A name is matched in linear time, because clients choose it: the texts between ``*`` are looked for in their order, each
at the first place where it stands. No later place can do better, and so nothing is tried twice.
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
        """Return whether the whole of a name matches."""
        return _match(self._parts, name)


class ClientIdPatterns:
    """Patterns of client ids, which may bind a client id to a user by ``%u``.

    A client id is bound to one user at most. Therefore ``%u`` isn't followed by ``*``, and a user whose name contains
    the character that follows it in one of the patterns is in none: by ``%u-*`` the client id ``ann-b-1`` would be of
    both ``ann`` and ``ann-b``. A ``*`` in a user's name is a character like any other.
    """

    __slots__ = ("_delimiters", "_free", "_named")

    def __init__(self, texts: Sequence[str]) -> None:
        """Raise ValueError for a pattern whose ``%u`` could mean two users."""
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
        """Return whether a client id is one of a user's, or matches a pattern without ``%u``; None is anonymous.

        ``mistakable``: also if the user's name is such that the client id could be another user's.
        """
        if any(pattern.matches(client_id) for pattern in self._free):
            return True
        if not user or not (mistakable or self._delimiters.isdisjoint(user)):
            return False
        return any(_match((before + user + first, *rest), client_id) for before, (first, *rest) in self._named)


def _check_apart(beginnings: Iterable[str]) -> None:
    """Raise ValueError if one of the texts before ``%u`` begins with another one."""
    for one, following in itertools.pairwise(sorted(beginnings)):
        if following.startswith(one):
            raise ValueError(f"'{one}%u' and '{following}%u' can mean two users by the same client id")


def _match(parts: Sequence[str], name: str) -> bool:
    """Return whether a name consists of parts with any text between each two of them."""
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
