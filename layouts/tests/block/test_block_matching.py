"""Tests that every way to match topics agrees with `TopicFilter.matches` of each topic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from topicstore import TopicFilter
from topicstore.contract.columns import Coded, Constant
from topicstore.contract.engine import KEYSPACES
from topicstore.contract.errors import CorruptionError
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.oracle import strategies
from topicstore_layouts.block import matching
from topicstore_layouts.block import stream_ranges as wanted
from topicstore_layouts.block.matching import Matcher, Matchers, topic_range
from topicstore_layouts.block.stream_ranges import StreamRangesCache
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable, coded

learned_topics = st.lists(strategies.topics(), min_size=1, max_size=12)


def table() -> NameTable:
    return NameTable(MemoryEngine(KEYSPACES), 1, 0x10, lambda _: 1)


def listed(found: Any, rows: int) -> list[bool]:
    """Return a matcher's result as one verdict per row, after checking that a mask is neither all true nor false."""
    if isinstance(found, bool):
        return [found] * rows
    verdicts: list[bool] = found.tolist()
    assert {True, False} == set(verdicts)
    return verdicts


# --- topics as numbers --------------------------------------------------------------


@pytest.mark.parametrize("text", ["#", "t/+", "t/7", "t/never", "$x/#", "+/7/#"])
def test_verdicts(text: str) -> None:
    """A matcher decides on topic numbers in any order and form, including topics added after its creation."""
    names = table()
    matcher, matches = Matcher(TopicFilter(text), names), TopicFilter(text).matches
    topics = [f"{'$x' if n % 3 == 0 else 't'}/{n}" for n in range(300)]
    for count in (1, 2, 20, 300):
        numbers = names.encode(topics[:count])
        assert isinstance(numbers, np.ndarray)
        for asked in (numbers, numbers[::-1], numbers[-1:], numbers[:1].astype(np.uint8)):
            assert [matches(topics[n]) for n in asked] == listed(matcher.rows(asked), len(asked))
        for number in range(0, count, 7):
            assert matcher.rows(Constant(number, 5)) is matches(topics[number])


def test_an_unknown_topic_number_is_damage() -> None:
    """A topic number without a name raises `CorruptionError`."""
    names = table()
    names.encode(["a", "b"])
    matcher = Matcher(TopicFilter("+"), names)
    for numbers in (np.array([0, 2]), Constant(2, 3)):
        with pytest.raises(CorruptionError, match="number 2"):
            matcher.rows(numbers)


def test_the_filters_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matchers of the filters used last are cached, as many as the limit allows."""
    monkeypatch.setattr(matching, "_KEPT_BYTES", 64)
    monkeypatch.setattr(matching, "_LEAST_BYTES", 8)
    matchers = Matchers(table())
    made = [matchers.of(TopicFilter(f"t/{number}/#")) for number in range(8)]
    assert made == [matchers.of(TopicFilter(f"t/{number}/#")) for number in range(8)]
    assert made[0] is matchers.of(TopicFilter("t/0/#"))
    matchers.of(TopicFilter("new/#"))
    assert made[0] is matchers.of(TopicFilter("t/0/#"))
    assert made[1] is not matchers.of(TopicFilter("t/1/#"))


# --- topics as texts ----------------------------------------------------------------

ODD = [
    "a\nb/c", "\n", "a/\n", "a.b/c", "a*b", "(a", "[a]/^$", "\\d/\\", "a|b", "{2}", "é/Ⅷ/²", "\U0001f68c/\u0301",
    "$", "$/", "/$", "/", "//", "a/$x", "\x01/\x7f", " ", "a b/-", "A/a",
]  # fmt: skip
some_topics = st.lists(strategies.topics() | st.sampled_from(ODD), min_size=1, max_size=6)


@settings(max_examples=200)
@given(some_topics, st.data())
def test_texts(topics: list[str], data: st.DataObject) -> None:
    """Matching a few topics one by one, and many by one regular expression, is right for any characters."""
    text = data.draw(strategies.filters(st.sampled_from(topics)) | st.sampled_from(topics))
    matcher, matches = Matcher(TopicFilter(text), table()), TopicFilter(text).matches
    many = list(dict.fromkeys([*topics, *ODD, *(f"{topic[:99]}/{n}" for n in range(40) for topic in topics[:1])]))
    assert len(many) >= matching._WORTH_A_PATTERN
    for texts in (topics, many):
        column = coded(texts)
        assert list(map(matches, texts)) == listed(matcher.rows(column), len(texts))
        assert list(map(matches, texts[::-1])) == listed(
            matcher.rows(Coded(column.codes[::-1], column.texts)), len(texts)
        )
    for topic in topics:
        assert matcher.rows(Constant(topic, 3)) is matches(topic)


@pytest.mark.parametrize("length", [990, 1_000, 1_001, 65_535])
@pytest.mark.parametrize("level", ["\U0001f68c", "x", "-", "+"])
def test_long_filters(level: str, length: int) -> None:
    """Filters of any length are matched correctly, whether they become an expression or not."""
    levels = length // 2 if level == "+" else 1
    text = "/".join([level] * levels) if level == "+" else level * (length // len(level.encode()))
    topic = text.replace("+", "a")
    topics = [topic, *(f"{n}" for n in range(40)), f"{topic}/"]
    matcher = Matcher(TopicFilter(text), table())
    assert [True] + [False] * 41 == listed(matcher.rows(coded(topics)), 42)


# --- ranges of topics ---------------------------------------------------------------


def learned(topics: list[str], capacity: int = 1 << 16) -> LearnedTopics:
    """Return a trie with low thresholds that has learned these topics."""
    trie = LearnedTopics(1, (2, 1), capacity)
    trie.learn_all(topics)
    return trie


@pytest.mark.parametrize(
    ("levels", "text", "expected"),
    [
        ("a/b", "#", ("a/b", "a/b")),
        ("a/+/c", "#", ("a", "a0")),
        ("a/+/c", "a/5/c", ("a/5/c", "a/5/c")),
        ("a/+/c", "+/5/+", ("a/5/c", "a/5/c")),
        ("a/+/+", "a/5/#", ("a/5", "a/50")),
        ("a/+/+", "a/5", ("a/5", "a/50")),
        ("+/b", "#", ("", None)),
        ("+/b", "x/#", ("x/b", "x/b")),
        ("+/+", "+/b", ("", None)),
        ("a/#", "#", ("a", "a0")),
        ("a/#", "a/b/c", ("a", "a0")),
        ("#", "a", ("", None)),
        ("/+", "//#", ("/", "/")),
        ("/+", "#", ("", "0")),
    ],
)
def test_ranges(levels: str, text: str, expected: tuple[str, str | None]) -> None:
    """A key range is limited by all levels before the first level that neither the stream nor the filter fixes."""
    assert expected == topic_range(tuple(levels.split("/")), TopicFilter(text))


@settings(max_examples=300)
@given(learned_topics, st.data())
@example(["$x/1", "$x/2", "$y/2"], None)
def test_what_is_wanted(topics: list[str], data: st.DataObject | None) -> None:
    """Every matching topic lies in the range of its stream, and a covered stream has only matching topics."""
    filters = strategies.filters(st.sampled_from(topics)) | st.sampled_from(topics)
    text = "#" if data is None else data.draw(filters)
    capacity = 1 << 16 if data is None else data.draw(st.sampled_from([4, 1 << 16]))
    topic_filter = TopicFilter(text)
    trie = learned(topics, capacity)
    streams = StreamRangesCache(trie)
    whole = streams.of(topic_filter, None)
    ranges = {stream: (low, high) for stream, low, high in whole.ranges}
    assert ranges == whole.by_stream
    assert sorted(ranges) == list(ranges)
    for topic in topics:
        stream, matches = trie.learn(topic), topic_filter.matches(topic)
        if matches:
            assert_between(topic, ranges[stream])
        one = streams.of(topic_filter, stream)
        assert [(stream, *between) for between in one.by_stream.values()] == list(one.ranges)
        if matches:
            assert_between(topic, one.by_stream[stream])
        for found in (whole, one):
            assert matches or not (found.everything or stream in found.covered)


def assert_between(topic: str, between: tuple[str, str | None]) -> None:
    low, high = between
    assert low <= topic
    assert high is None or topic <= high


def test_what_covers() -> None:
    """A stream is covered if each of its levels equals that of the filter, or is a wildcard in the filter."""
    trie = learned(["a/1/x", "a/2/x", "b", "$x/1", "$x/2", "c/1/2"])
    patterns = {trie.pattern(stream): stream for stream in range(1, len(trie) + 1)}
    assert ["a/1/x", "a/+/x", "b", "$x/1", "$x/+", "+/1/2"] == list(patterns)
    streams = StreamRangesCache(trie)

    def covered(text: str) -> list[str]:
        found = streams.of(TopicFilter(text), None)
        assert found.everything == (len(found.covered) == len(patterns))
        return [pattern for pattern, stream in patterns.items() if stream in found.covered]

    assert ["a/1/x", "a/+/x", "b", "+/1/2"] == covered("#")
    assert ["a/1/x", "a/+/x", "+/1/2"] == covered("+/+/#") == covered("+/+/+")
    assert ["a/1/x", "a/+/x"] == covered("a/#")
    assert ["b"] == covered("b") == covered("b/#") == covered("+")
    assert ["a/1/x", "+/1/2"] == covered("+/1/+")
    assert ["a/1/x"] == covered("a/1/x")
    assert ["$x/1", "$x/+"] == covered("$x/#") == covered("$x/+")
    assert [] == covered("a/2/x") == covered("c/1/2") == covered("no")


def test_what_is_wanted_changes_when_a_stream_is_new() -> None:
    """A filter's ranges are cached until the trie has a new stream, and then computed again."""
    trie = learned(["a/1"])
    streams = StreamRangesCache(trie)
    before = streams.of(TopicFilter("a/#"), None)
    assert before.everything
    assert before is streams.of(TopicFilter("a/#"), None)
    trie.learn("b")
    after = streams.of(TopicFilter("a/#"), None)
    assert not after.everything
    trie.learn("a/1")
    assert after is streams.of(TopicFilter("a/#"), None)


def test_the_filters_used_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges of the filters used last are cached, and older ones are evicted."""
    monkeypatch.setattr(wanted, "_KEPT", 4)
    streams = StreamRangesCache(learned(["a"]))
    made = [streams.of(TopicFilter(f"{n}"), None) for n in range(4)]
    assert all(made[n] is streams.of(TopicFilter(f"{n}"), None) for n in range(4))
    streams.of(TopicFilter("4"), None)
    assert made[0] is not streams.of(TopicFilter("0"), None)
    assert made[3] is streams.of(TopicFilter("3"), None)


def test_what_filters_want_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached ranges of filters take bounded memory; only the newest may exceed the limit."""
    trie = LearnedTopics(1, (10**6,))
    trie.learn_all(f"{'x' * 50}/{number}" for number in range(1_000))
    monkeypatch.setattr(wanted, "_KEPT_BYTES", 3_000_000)
    filters = StreamRangesCache(trie)
    kept = []
    for number in range(20):
        found = filters.of(TopicFilter(f"{'x' * 50}/+{'/#' * (number % 2)}"), None)
        assert found is filters.of(TopicFilter(f"{'x' * 50}/+{'/#' * (number % 2)}"), None)
        filters.of(TopicFilter(f"+/{number}"), None)
        kept.append(sum(memory for _, _, memory in filters._kept.values()))
    assert max(kept) <= 3_000_000
    monkeypatch.setattr(wanted, "_KEPT_BYTES", 10)
    found = filters.of(TopicFilter("#"), None)
    assert found is filters.of(TopicFilter("#"), None)
    assert 1 == len(filters._kept)
