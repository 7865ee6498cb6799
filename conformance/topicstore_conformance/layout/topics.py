"""Promises about filters: which topics they match, over a slab that has learned of them."""

from __future__ import annotations

from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.oracle.strategies import EDGE_TOPICS

from .fixtures import Fixtures, Stored, numbered

__all__ = ["Topics"]

DOLLAR = ["$SYS/a", "$SYS/b", "$SYS/a/b", "$x/a", "$x", "$", "$/", "$SYS", "a/$SYS", "a/$x/b", "$SYS/$x"]
EMPTY = ["a", "/a", "a/", "a//b", "a/b", "/", "//", "/a/", "a/x/b", "a///b", "ab", "a/b/c/" + "/".join("d" * 30)]


class Topics(Fixtures):
    """Promises about filters."""

    def test_filters_made_of_topics(self, stored: Stored) -> None:
        """A filter made of any topic, with ``+`` for one level or ``#`` for the rest, finds exactly its matches."""
        topics = [*DOLLAR, *EMPTY, *EDGE_TOPICS[:24], *(f"f/{n % 5}/{n}/{n % 2}" for n in range(40))]
        for topic_filter in ("no/such/topic", "#", "+/+"):
            stored.check(topic_filter)
        stored.put(numbered(topics, 250), 11)
        stored.reopen()
        for topic in topics[:: tries(3, 1)]:
            levels = topic.split("/")
            if len(levels) > 40:
                continue
            for topic_filter in (topic, f"{topic}/no", f"{topic}/+"):
                stored.check(topic_filter)
            for depth in range(len(levels)):
                stored.check("/".join([*levels[:depth], "+", *levels[depth + 1 :]]))
                stored.check("/".join([*levels[:depth], "#"]))
        for topic_filter in ("+", "+/#", "+/+", "+/+/+", "+/a/#", "+/$x/b", "$SYS/#", "$SYS/no", "f/1/#", "f/+/no/+"):
            stored.check(topic_filter)
        stored.check_all()
