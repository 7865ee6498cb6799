"""`topicstore.pubsub.filter_index`: an index of the filters that match a topic."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from topicstore import TopicFilter
from topicstore.pubsub import filter_index
from topicstore.pubsub.filter_index import FilterIndex

LEVELS = st.sampled_from(["a", "b", "", "$x"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, rest: "/".join(levels + rest),
    st.lists(st.one_of(LEVELS, st.just("+")), min_size=1, max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool) | st.just("#")


@example([(text, one) for text in ("a/+", "a/#", "a/b") for one in range(12)], list(range(0, 30, 2)), ["a/b"])
@given(st.lists(st.tuples(FILTERS, st.integers(0, 3))), st.lists(st.integers(0, 30)), st.lists(TOPICS, min_size=1))
def test_matches_what_each_filter_matches(pairs: list[tuple[str, int]], gone: list[int], topics: list[str]) -> None:
    """Matching a topic returns each stored value whose filter matches the topic, once.

    When all values are removed, the index is empty.
    """
    routes: FilterIndex[int] = FilterIndex()
    held: set[tuple[str, int]] = set()
    for text, value in pairs:
        assert routes.add(TopicFilter(text), value) is ((text, value) not in held)
        held.add((text, value))
        for topic in topics:
            assert set(routes.match(topic)) == {other for one, other in held if TopicFilter(one).matches(topic)}
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
    for text, value in held:
        assert routes.remove(TopicFilter(text), value)
    assert not routes._root.children
    assert not routes._literal


def _walks(routes: FilterIndex[int], topics: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Match each topic; return the number of topics that weren't cached, so that the filter tree was searched."""
    walked: list[str] = []
    match = filter_index._match
    with monkeypatch.context() as patched:
        patched.setattr(filter_index, "_match", lambda root, topic: walked.append(topic) or match(root, topic))
        for topic in topics:
            routes.match(topic)
    return len(walked)


@pytest.mark.slow
def test_routes_of_a_hundred_thousand_topics_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matches of 100,000 topics are all cached; after 300,000 more topics, the cache is still limited in number."""
    routes: FilterIndex[int] = FilterIndex()
    routes.add(TopicFilter("#"), 1)
    topics = [f"t/{number}" for number in range(100_000)]
    assert _walks(routes, topics, monkeypatch) == len(topics)
    assert _walks(routes, topics, monkeypatch) == 0
    assert _walks(routes, [f"u/{number}" for number in range(300_000)], monkeypatch) == 300_000
    assert len(routes._memo._younger.routes) + len(routes._memo._older.routes) <= 2 * 131_072


def test_routes_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached matches are limited in bytes: long topics and topics that many filters match are evicted sooner.

    Evicted topics are still matched correctly.
    """
    monkeypatch.setattr("topicstore.pubsub.filter_index._BYTES", 1 << 20)
    routes: FilterIndex[int] = FilterIndex()
    for number in range(1_000):
        routes.add(TopicFilter("many/#"), number)
    for number in range(20_000):
        assert () == routes.match(f"{number}/".ljust(500, "x"))
        assert len(routes._memo._younger.routes) <= (1 << 20) // 500
    for number in range(1_000):
        assert 1_000 == len(routes.match(f"many/{number}"))
        assert len(routes._memo._younger.routes) <= (1 << 20) // 500


@pytest.mark.parametrize("form", ["{}", "{}/#", "{}/+/x"])
def test_a_filter_that_comes_or_goes_costs_other_topics_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding or removing a filter for few topics evicts only these topics from the cache."""
    routes: FilterIndex[int] = FilterIndex()
    routes.add(TopicFilter("#"), -1)
    topics = [f"t/{number}/{end}" for number in range(1_000) for end in ("a", "b/x")]
    _walks(routes, topics, monkeypatch)
    for number in range(200):
        routes.add(TopicFilter(form.format(f"t/{number}")), number)
    assert _walks(routes, topics, monkeypatch) <= 2 * 200
    for number in range(100):
        routes.remove(TopicFilter(form.format(f"t/{number}")), number)
    assert _walks(routes, topics, monkeypatch) <= 2 * 100


def test_a_filter_over_many_topics_is_found_at_once() -> None:
    """Adding or removing a filter that may match many topics invalidates all cached matches at once."""
    routes: FilterIndex[int] = FilterIndex()
    topics = [f"t/{number}/a" for number in range(1_000)]
    assert not any(map(routes.match, topics))
    for number, text in enumerate(["t/#", "t/+/a", "+/+/a", "#"]):
        routes.add(TopicFilter(text), number)
        assert all(number in routes.match(topic) for topic in topics)
    for number, text in enumerate(["t/#", "t/+/a", "+/+/a", "#"]):
        routes.remove(TopicFilter(text), number)
        assert all(number not in routes.match(topic) for topic in topics)


def test_long_topics_are_matched_and_not_kept() -> None:
    """Long topics are matched but not cached, because hundreds of thousands of them would take gigabytes."""
    routes: FilterIndex[int] = FilterIndex()
    long = "a/" + "x" * 60_000
    for text in ("a/#", "+/+", long):
        routes.add(TopicFilter(text), len(text))
    assert set(routes.match(long)) == {3, len(long)}
    routes.remove(TopicFilter("+/+"), 3)
    assert set(routes.match(long)) == {3, len(long)}
    routes.remove(TopicFilter(long), len(long))
    assert routes.match(long) == (3,)
    assert not routes._memo._younger.routes
