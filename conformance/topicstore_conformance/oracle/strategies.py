"""Hypothesis strategies: topics nobody would choose, filters that nearly match them, and messages.

Most topics come from a few short levels, so that filters, learned structure and several
publishers meet on the same topics; the rest are what the standard allows at its edges.
"""

from __future__ import annotations

from hypothesis import strategies as st
from topicstore import Message, Properties
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
"""Each is a topic by MQTT 5: empty levels, ``$``, Unicode of every length, 128 levels, 65,535 bytes."""

_LEVELS = ("a", "b", "c", "", "$x", "é", "1", "2", "3", "4", "5", "6", "7", "8")
_TEXT = st.characters(codec="utf-8", exclude_characters="\0+#")

_short = st.lists(st.sampled_from(_LEVELS), min_size=1, max_size=4).map("/".join).filter(bool)
_any = st.lists(st.text(_TEXT, max_size=4), min_size=1, max_size=5).map("/".join).filter(bool)


def topics() -> st.SearchStrategy[str]:
    """Topics that often meet, and some that are odd."""
    return st.one_of(_short, _short, _short, st.sampled_from(EDGE_TOPICS[:19]), _any)


def hostile_topics() -> st.SearchStrategy[str]:
    """Topics at the edges of the standard, the longest among them."""
    return st.one_of(st.sampled_from(EDGE_TOPICS), _any, _short)


@st.composite
def filters_of(draw: st.DrawFn, topic: str) -> str:
    """Filters made from a topic: some levels become ``+``, the end perhaps ``#``, one level perhaps another."""
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
    """Filters that match some of such topics; everything and nothing among them."""
    derived = (topics() if of is None else of).flatmap(filters_of)
    return st.one_of(st.sampled_from(("#", "+", "+/#", "+/+", "/#", "$x/#", "$SYS/#", "a/#", "no/such/topic")), derived)


def client_ids() -> st.SearchStrategy[str]:
    """Few publishers, so that each has several messages, over several shards."""
    return st.sampled_from(("", "c1", "c2", "c3", "c4", "bus-\U0001f68c", "x" * 300))


def payloads() -> st.SearchStrategy[bytes]:
    """Empty, short, and long enough for a length of two and of four bytes."""
    long = st.builds(
        lambda byte, length: bytes([byte]) * length, st.integers(0, 255), st.sampled_from((255, 256, 70_000))
    )
    return st.one_of(st.binary(max_size=12), st.binary(max_size=12), st.binary(max_size=12), long)


_name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


def properties() -> st.SearchStrategy[Properties]:
    """Every property of MQTT 5 that belongs to a message, repeated user properties among them."""
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
    """Messages with topics from ``of`` and timestamps from ``times``."""
    return st.builds(
        Message,
        topics() if of is None else of,
        payloads(),
        client_ids(),
        st.integers(0, 2),
        st.booleans(),
        st.none() | st.integers(0, 2**40) if times is None else times,
        st.none() | st.none() | properties(),
    )
