"""Topic filters of access rules: which topics one matches, and which filters lie wholly within it.

``+`` and ``#`` mean what they mean in subscriptions (MQTT 5, section 4.7), also that they don't match a first level
that begins with ``$``. Names that were put in place of ``%u`` and ``%c`` are literal, whatever they contain.
"""

from __future__ import annotations

from topicstore.contract.topics import TopicFilter

__all__ = ["TopicPattern"]


class TopicPattern:
    """A topic filter of a rule, with a client's names in it."""

    __slots__ = ("_levels", "_open_ended")

    def __init__(self, text: str, user: str | None, client_id: str) -> None:
        """Put names in place of ``%u`` and ``%c``. ``text`` is a valid filter; without a user it has no ``%u``."""
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
        """Return whether a topic to which somebody publishes, or of a message, matches."""
        mine, theirs = self._levels, topic.split("/")
        if len(theirs) != len(mine) and not (self._open_ended and len(theirs) > len(mine)):
            return False
        if theirs[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        return all(a is None or a == b for a, b in zip(mine, theirs, strict=False))

    def covers(self, topic_filter: TopicFilter) -> bool:
        """Return whether every topic that a filter matches matches this one."""
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
        # A wildcard of theirs isn't in `mine` as a literal but by a client's name, and then no topic matches it.
        return all(a is None or (a == b and b != "+") for a, b in zip(mine, theirs, strict=False))


def _with_names(level: str, user: str, client_id: str) -> str:
    """Replace each placeholder once: a name may itself contain ``%c``."""
    parts = level.split("%u")
    return user.join(part.replace("%c", client_id) for part in parts)
