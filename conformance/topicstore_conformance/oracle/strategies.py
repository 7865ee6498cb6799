"""Hypothesis strategies for topics, filters that match or nearly match them, and messages.

Most topics consist of a few short levels, so that filters, learned structure and several publishers concern the same
topics. The others are edge cases that the MQTT standard permits.
"""

from __future__ import annotations

from hypothesis import strategies as st
from topicstore import Message, Properties
from topicstore.contract.times import suspected_unit
from topicstore.contract.topics import MAX_TOPIC_BYTES

__all__ = [
    "EDGE_TOPICS",
    "client_ids",
    "filters",
    "filters_of",
    "hostile_topics",
    "messages",
    "payloads",
    "properties",
    "topics",
]

EDGE_TOPICS = (
    "/",
    "//",
    "a/",
    "/a",
    "a//b",
    " ",
    "$",
    "$/",
    "$SYS/broker/load",
    "a/$SYS",
    "$share/g/a",
    "\ufeff",
    "a/\ufeff/b",
    "\ufeffa",
    "é",
    "e\u0301",
    "\U0001f68c/\U0010ffff",
    "a\u0001b",
    "\x7f/\x80",
    "/".join(["a"] * 128),
    "/".join(["b"] * 31),
    "/".join(["b"] * 32),
    "/".join(["b"] * 33),
    "/" * 127,
    "x" * 65_535,
    "é" * 32_767,
    "\U0001f68c" * 16_383,
    "/" * 65_535,
)
"""Topics that are valid by MQTT 5: empty levels, ``$``, Unicode of every length, 128 levels, 65,535 bytes."""

_LEVELS = ("a", "b", "c", "", "$x", "é", "1", "2", "3", "4", "5", "6", "7", "8")
_TEXT = st.characters(codec="utf-8", exclude_characters="\0+#")

_short = st.lists(st.sampled_from(_LEVELS), min_size=1, max_size=4).map("/".join).filter(bool)
_any = st.lists(st.text(_TEXT, max_size=4), min_size=1, max_size=5).map("/".join).filter(bool)


def topics() -> st.SearchStrategy[str]:
    """Return a strategy for topics: most are drawn from a few common ones, and some are unusual."""
    return st.one_of(_short, _short, _short, st.sampled_from(EDGE_TOPICS[:19]), _any)


def hostile_topics() -> st.SearchStrategy[str]:
    """Return a strategy that includes all `EDGE_TOPICS`, also the longest ones."""
    # Edge topics are drawn by index, so that Hypothesis doesn't print the long ones when it shows the strategy.
    edges = st.integers(0, len(EDGE_TOPICS) - 1).map(lambda number: EDGE_TOPICS[number])
    return st.one_of(edges, _any, _short)


@st.composite
def filters_of(draw: st.DrawFn, topic: str) -> str:
    """Draw a filter made from a topic, with ``+`` for some levels, ``#`` for the last levels, or one level replaced."""
    levels = topic.split("/")
    kind = draw(st.sampled_from(("same", "plus", "plus", "rest", "rest", "other")))
    if kind != "same":
        for index in draw(st.lists(st.integers(0, len(levels) - 1), max_size=3)):
            levels[index] = "+"
    if kind == "rest":
        levels = [*levels[: draw(st.integers(0, len(levels)))], "#"]
    if kind == "other":
        levels[draw(st.integers(0, len(levels) - 1))] = draw(st.sampled_from(_LEVELS))
    made = "/".join(levels) or "+"
    return made if len(made.encode()) <= MAX_TOPIC_BYTES else topic


def filters(of: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[str]:
    """Return a strategy for filters that mostly match some topics of ``of``, and may match all topics or none."""
    derived = (topics() if of is None else of).flatmap(filters_of)
    return st.one_of(st.sampled_from(("#", "+", "+/#", "+/+", "/#", "$x/#", "$SYS/#", "a/#", "no/such/topic")), derived)


def client_ids() -> st.SearchStrategy[str]:
    """Return a strategy for a few client ids, so that each has several messages and they are in several shards."""
    return st.sampled_from(("", "c1", "c2", "c3", "c4", "bus-\U0001f68c", "x" * 300))


def payloads() -> st.SearchStrategy[bytes]:
    """Return a strategy for payloads: empty, short, and of lengths that are encoded in two and in four bytes."""
    long = st.builds(
        lambda byte, length: bytes([byte]) * length, st.integers(0, 255), st.sampled_from((255, 256, 70_000))
    )
    return st.one_of(st.binary(max_size=12), st.binary(max_size=12), st.binary(max_size=12), long)


_name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


def properties() -> st.SearchStrategy[Properties]:
    """Return a strategy for all message properties of MQTT 5, with repeated user properties."""
    return st.builds(
        Properties,
        st.none() | st.integers(0, 1),
        st.none() | st.sampled_from((0, 1, 2**32 - 1)),
        st.none() | _name,
        st.none() | topics(),
        st.none() | st.binary(max_size=5),
        st.lists(st.tuples(_name, _name), max_size=3).map(tuple),
    )


def messages(
    of: st.SearchStrategy[str] | None = None, times: st.SearchStrategy[int | None] | None = None
) -> st.SearchStrategy[Message]:
    """Return a strategy for messages with topics from ``of`` and timestamps, in microseconds, from ``times``.

    By default no timestamp looks like another unit, or like a date written as a number, which databases refuse.
    """
    microseconds = (st.integers(0, 10**9 - 1) | st.integers(2**43, 2**50)).filter(lambda t: suspected_unit(t) is None)
    return st.builds(
        Message,
        topics() if of is None else of,
        payloads(),
        client_ids(),
        st.integers(0, 2),
        st.booleans(),
        st.none() | microseconds if times is None else times,
        st.none() | st.none() | properties(),
    )
