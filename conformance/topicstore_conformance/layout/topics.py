"""Tests of topic filters: the topics that they match in a slab with learned structure."""

from __future__ import annotations

from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.oracle.strategies import EDGE_TOPICS

from .fixtures import Fixtures, Stored, numbered

__all__ = ["Topics"]

DOLLAR = ["$SYS/a", "$SYS/b", "$SYS/a/b", "$x/a", "$x", "$", "$/", "$SYS", "a/$SYS", "a/$x/b", "$SYS/$x"]


class Topics(Fixtures):
    """Tests of topic filters."""

    def test_wildcards_do_not_match_dollar_topics(self, stored: Stored) -> None:
        """A filter that begins with ``#`` or ``+`` matches no topic that begins with ``$``; ``$SYS/#`` does.

        This also applies to first levels with a ``$`` that the slab hasn't seen, after reopening and after compaction.
        """
        stored.put(numbered(["a", "b/c", "a/a", *DOLLAR, *(f"$d{n}/a" for n in range(9))], 200))
        for change in (stored.end_epoch, stored.reopen, stored.compact):
            change()
            for topic_filter in ("#", "+", "+/#", "+/+", "+/a", "+/a/#", "+/$x", "+/$x/b"):
                stored.check(topic_filter)
            known = ("$SYS/#", "$SYS/+", "$SYS", "$x/#", "$/#", "$", "$SYS/a/b", "a/#", "a/+")
            for topic_filter in (*known, "$d3/+", "$d8/a", "$d8/+", "$d8/#"):
                assert stored.wanted(topic_filter)
                stored.check(topic_filter)

    def test_empty_levels_are_levels(self, stored: Stored) -> None:
        """An empty level is a level like others: ``/a``, ``a/``, ``a//b`` and ``/`` are four different topics."""
        stored.put(numbered(["a", "/a", "a/", "a//b", "a/b", "/", "//", "/a/", "a/x/b", "a///b"], 100))
        for topic_filter in (
            "+",
            "/+",
            "+/",
            "+/+",
            "a//b",
            "a/+/b",
            "a/#",
            "/#",
            "//#",
            "+/+/+",
            "/a",
            "a/",
            "/",
            "//",
        ):
            stored.check(topic_filter)

    def test_a_filter_matches_the_level_above_its_hash(self, stored: Stored) -> None:
        """The filter ``a/#`` matches ``a`` and all topics below, at any depth."""
        topics = ["a", "a/b", "a/b/c", "ab", "a/b/c/" + "/".join("d" * 60), "b/a"]
        stored.put(numbered(topics, 60))
        for topic_filter in ("a/#", "a/b/#", "a/b/c/#", "a/b/c/d/#", "+/#", "+/b/#", "#"):
            stored.check(topic_filter)

    def test_filters_made_of_topics(self, stored: Stored) -> None:
        """A filter made from any topic, with ``+`` for a level or ``#`` for the rest, finds exactly its matches."""
        topics = [*EDGE_TOPICS[:24], *(f"f/{n % 5}/{n}/{n % 2}" for n in range(40))]
        stored.put(numbered(topics, 150), 11)
        stored.reopen()
        for topic in topics[:: tries(3, 1)]:
            levels = topic.split("/")
            if len(levels) > 40:
                continue
            stored.check(topic)
            for depth in range(len(levels)):
                stored.check("/".join([*levels[:depth], "+", *levels[depth + 1 :]]))
                stored.check("/".join([*levels[:depth], "#"]))

    def test_topics_nobody_published_to(self, stored: Stored) -> None:
        """A filter that matches no stored topic finds no message, in an empty slab and in others."""
        for _ in range(2):
            for topic_filter in ("no/such/topic", "no/#", "f/1/no", "f/1/x/no", "f/+/no/+", "$SYS/no", "+/+/+/+/+/+"):
                stored.check(topic_filter)
            stored.put(numbered([f"f/{n}/x" for n in range(20)], 40))
        stored.check_all()
