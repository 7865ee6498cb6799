"""Topic filters of access rules: matching of topics, and coverage of other filters.

``+`` and ``#`` match as in subscriptions (MQTT 5, section 4.7), so they don't match a first level that begins with
``$``. Names inserted for ``%u`` and ``%c`` are literal, also if they contain wildcards.
"""

from __future__ import annotations

from topicstore.contract.topics import TopicFilter

__all__ = ["TopicPattern"]


class TopicPattern:
    """A topic filter of a rule, with a client's names inserted."""

    __slots__ = ("_levels", "_open_ended")

    def __init__(self, text: str, user: str | None, client_id: str) -> None:
        """Replace ``%u`` and ``%c`` by names. ``text`` is a valid filter; without a user it has no ``%u``."""
        levels = text.split("/")
        self._open_ended = levels[-1] == "#"
        if self._open_ended:
            levels.pop()
        self._levels: list[str | None] = []
        for level in levels:
            if level == "+":
                self._levels.append(None)
            else:
                named = _with_names(level, user or "", client_id)
                self._levels += named.split("/")

    def matches(self, topic: str) -> bool:
        """Return whether a topic name matches."""
        mine, theirs = self._levels, topic.split("/")
        if len(theirs) != len(mine) and not (self._open_ended and len(theirs) > len(mine)):
            return False
        if theirs[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        return all(a is None or a == b for a, b in zip(mine, theirs, strict=False))

    def covers(self, topic_filter: TopicFilter) -> bool:
        """Return whether this filter matches every topic that another filter matches."""
        theirs = topic_filter.levels
        their_end = theirs[-1] == "#"
        if their_end:
            theirs = theirs[:-1]
        mine = self._levels
        if self._open_ended:
            if len(theirs) < len(mine):
                return False
        elif their_end or len(theirs) != len(mine):
            return False
        if theirs and theirs[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        # A literal wildcard in `mine` can only come from a client's name, and must not equal a wildcard in `theirs`.
        return all(a is None or (a == b and b != "+") for a, b in zip(mine, theirs, strict=False))


def _with_names(level: str, user: str, client_id: str) -> str:
    """Replace placeholders; placeholders within the inserted names are not replaced."""
    parts = level.split("%u")
    return user.join(part.replace("%c", client_id) for part in parts)
