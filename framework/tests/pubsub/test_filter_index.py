"""`topicstore.pubsub.filter_index`: which of many filters match a topic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from topicstore import TopicFilter
from topicstore.pubsub.filter_index import FilterIndex

LEVELS = st.sampled_from(["a", "b", "", "$x"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, rest: "/".join(levels + rest),
    st.lists(st.one_of(LEVELS, st.just("+")), min_size=1, max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool) | st.just("#")


@given(st.lists(st.tuples(FILTERS, st.integers(0, 3))), st.lists(st.integers(0, 30)), st.lists(TOPICS, min_size=1))
def test_matches_what_each_filter_matches(pairs: list[tuple[str, int]], gone: list[int], topics: list[str]) -> None:
    """What is added and not removed since is found, each value once, whatever was asked before."""
    routes: FilterIndex[int] = FilterIndex()
    held: set[tuple[str, int]] = set()
    for text, value in pairs:
        assert routes.add(TopicFilter(text), value) is ((text, value) not in held)
        held.add((text, value))
        routes.match(topics[0])
    for number in gone:
        if number < len(pairs):
            text, value = pairs[number]
            assert routes.remove(TopicFilter(text), value) is ((text, value) in held)
            held.discard((text, value))
    assert len(routes) == len(held)
    for topic in topics:
        expected = {value for text, value in held if TopicFilter(text).matches(topic)}
        found = routes.match(topic)
        assert set(found) == expected
        assert len(found) == len(expected)


def test_an_unknown_filter_is_not_removed() -> None:
    """Removing what is not there says so and changes nothing."""
    routes: FilterIndex[str] = FilterIndex()
    routes.add(TopicFilter("a/b"), "x")
    assert not routes.remove(TopicFilter("a/b"), "y")
    assert not routes.remove(TopicFilter("a/c"), "x")
    assert not routes.remove(TopicFilter("a/#"), "x")
    assert routes.match("a/b") == ("x",)


def test_removed_filters_leave_nothing() -> None:
    """The tree shrinks with its filters: a million of passing clients don't fill memory."""
    routes: FilterIndex[int] = FilterIndex()
    for number in range(1_000):
        routes.add(TopicFilter(f"client/{number}/+/#"), number)
        routes.remove(TopicFilter(f"client/{number}/+/#"), number)
    assert not routes._root.children
