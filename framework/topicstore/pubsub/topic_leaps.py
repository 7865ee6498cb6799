"""`TopicLeaps`: finds ranges of topics, in order of topics, that a scan for the matches of a filter can skip.

Topics are in order of code points, which is that of their bytes in UTF-8. In this order all topics below a level lie
between the level with ``/`` and the level with ``0``, the character after ``/``. Other topics may come before these:
``a!`` comes between ``a`` and ``a/b``.
"""

from __future__ import annotations

from itertools import takewhile

from topicstore.contract.topics import TopicFilter

__all__ = ["TopicLeaps"]

_WILDCARDS = frozenset("+#")


class TopicLeaps:
    """The ranges in which topics may match a filter, and the topics within the ranges that can be skipped."""

    __slots__ = ("_levels", "_open_ended", "_plus_before", "every", "ranges")

    def __init__(self, topic_filter: TopicFilter) -> None:
        levels = topic_filter.levels
        self._open_ended = levels[-1] == "#"
        self._levels = levels[:-1] if self._open_ended else levels
        self._plus_before: list[int | None] = [None]
        """By number of levels, the index of the last ``+`` among these levels."""
        for depth, level in enumerate(self._levels):
            self._plus_before.append(depth if level == "+" else self._plus_before[-1])
        self.ranges = _ranges(topic_filter)
        """The ranges of topics that may match, in order: the first text, inclusive, and the end, exclusive. An end of
        None is open."""
        self.every = topic_filter.literal or "+" not in levels
        """Whether all topics within the ranges match."""

    def after(self, topic: str) -> str | None:
        """Return a text after ``topic``, but not after the next matching topic, at which a scan can continue.

        ``topic`` lies within the ranges. None: no topic after ``topic`` can match.
        """
        mine, theirs = self._levels, topic.split("/")
        for depth, level in enumerate(mine):
            if depth == len(theirs):
                return topic + "\0"  # too few levels; a topic with more levels may follow directly
            if level not in ("+", theirs[depth]):
                return self._of_other_level(depth, theirs, topic)
        if self._open_ended or (len(theirs) == len(mine) and mine[-1] == "+"):
            return topic + "\0"
        return self._next_sibling(len(mine), theirs)

    def _of_other_level(self, depth: int, theirs: list[str], topic: str) -> str | None:
        """Return the result of `after` for a topic that differs from the filter in a literal level."""
        wanted = "/".join([*theirs[:depth], self._levels[depth]])
        last = depth == len(self._levels) - 1
        if last and topic < wanted:
            return wanted
        if (not last or self._open_ended) and topic < wanted + "/":
            return wanted + "/"
        return self._next_sibling(depth, theirs)

    def _next_sibling(self, depth: int, theirs: list[str]) -> str | None:
        """Return the text after all topics that have the same levels up to the last ``+`` before a depth."""
        plus = self._plus_before[depth]
        return None if plus is None else "/".join(theirs[: plus + 1]) + "0"


def _ranges(topic_filter: TopicFilter) -> list[tuple[str, str | None]]:
    """Return the ranges of topics that begin with the filter's literal levels.

    Without a literal level these are all topics, except those that begin with ``$`` (MQTT 5, section 4.7.2).
    """
    literal = list(takewhile(_WILDCARDS.isdisjoint, topic_filter.levels))
    if not literal:
        return [("", "$"), ("%", None)]  # "%" comes right after "$"
    parent = "/".join(literal)
    itself, below = (parent, parent + "\0"), (parent + "/", parent + "0")
    if topic_filter.literal:
        return [itself]
    return [itself, below] if topic_filter.levels[len(literal)] == "#" else [below]
