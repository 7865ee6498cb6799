"""Topic names and filters, compared with a language-independent list of cases and a simple matcher."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import InvalidFilterError, InvalidTopicError
from topicstore.contract.topics import MAX_TOPIC_BYTES, TopicFilter, check_topic, matches

CASES = json.loads(Path(__file__).with_name("topic_cases.json").read_text(encoding="utf-8"))


def spelled(text: str | dict[str, Any]) -> str:
    if isinstance(text, str):
        return text
    part, times = text["repeat"]
    return part * times + text.get("then", "")


def cases(kind: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{n}-{c['why']}") for n, c in enumerate(CASES[kind])])


def obviously_matches(levels: list[str], topic: list[str]) -> bool:
    """Match as section 4.7 of the MQTT standard says, one level at a time; the caller handles topics with $."""
    if levels == ["#"]:
        return True
    if not levels or not topic:
        return levels == topic
    return levels[0] in ("+", topic[0]) and obviously_matches(levels[1:], topic[1:])


# a small alphabet, so that filters often match topics
level = st.text("ab$ é", max_size=2)
topics = st.lists(level, min_size=1, max_size=6).map("/".join).filter(bool)
filters = st.builds(
    lambda levels, tail: "/".join([*levels, *tail]),
    st.lists(st.just("+") | level, max_size=6),
    st.sampled_from([[], ["#"]]),
).filter(bool)


@cases("topics")
def test_a_topic_is_valid_or_refused(case: dict[str, Any]) -> None:
    """`check_topic` returns valid topics unchanged and refuses others."""
    topic = spelled(case["topic"])
    if case["valid"]:
        assert topic == check_topic(topic)
    else:
        with pytest.raises(InvalidTopicError):
            check_topic(topic)


@cases("filters")
def test_a_filter_is_valid_or_refused(case: dict[str, Any]) -> None:
    """`TopicFilter` accepts valid filters unchanged and refuses others."""
    text = spelled(case["filter"])
    if case["valid"]:
        assert text == TopicFilter(text).text
    else:
        with pytest.raises(InvalidFilterError):
            TopicFilter(text)


@cases("matches")
def test_a_filter_matches_or_does_not(case: dict[str, Any]) -> None:
    """`matches` and `TopicFilter.matches` give the result in the list of cases."""
    text, topic = spelled(case["filter"]), spelled(case["topic"])
    assert case["matches"] == matches(text, topic)
    assert case["matches"] == TopicFilter(text).matches(topic)


@pytest.mark.parametrize("kind", ["topics", "filters", "matches"])
def test_the_corpus_names_no_case_twice(kind: str) -> None:
    """No case is listed twice."""
    texts = [(json.dumps(case.get("filter")), json.dumps(case.get("topic"))) for case in CASES[kind]]
    assert len(texts) == len(set(texts))


@settings(max_examples=1000)
@given(filters, topics)
def test_matching_equals_the_standard(text: str, topic: str) -> None:
    """`TopicFilter.matches` gives the result of the simple recursive matcher."""
    hidden = topic.startswith("$") and text.startswith(("+", "#"))
    expected = not hidden and obviously_matches(text.split("/"), topic.split("/"))
    assert expected == TopicFilter(text).matches(topic)


@settings(max_examples=500)
@given(st.text(st.sampled_from("ab+#/$\0\ud800é"), max_size=6))
def test_a_filter_without_wildcards_is_valid_where_the_topic_is(text: str) -> None:
    """Topics and filters obey the same rules except for wildcards: every valid topic is a literal filter."""
    try:
        check_topic(text)
    except InvalidTopicError:
        with contextlib.suppress(InvalidFilterError):
            assert not TopicFilter(text).literal
            assert set(text) & set("+#")
    else:
        assert TopicFilter(text).literal


@pytest.mark.parametrize(
    "thing", [None, 1, True, b"a", bytearray(b"a"), ["a"], ("a",), object()], ids=lambda thing: type(thing).__name__
)
def test_only_text_is_a_topic_or_a_filter(thing: object) -> None:
    """Anything but a str is refused with `InvalidTopicError` or `InvalidFilterError`."""
    with pytest.raises(InvalidTopicError, match=f"not {type(thing).__name__}"):
        check_topic(thing)
    with pytest.raises(InvalidFilterError, match=f"not {type(thing).__name__}"):
        TopicFilter(thing)  # type: ignore[arg-type]


def test_matches_checks_both() -> None:
    """`matches` refuses a wildcard in the topic, and an invalid filter."""
    with pytest.raises(InvalidTopicError):
        matches("a/#", "a/+")
    with pytest.raises(InvalidFilterError):
        matches("a#", "a")


def test_errors_do_not_repeat_a_long_text() -> None:
    """The text of an error stays short for a long topic."""
    for bad in ("a" * (MAX_TOPIC_BYTES + 1), "\0" * 60_000, "a+" * 30_000, "\ud800" * 60_000):
        with pytest.raises(InvalidTopicError) as caught:
            check_topic(bad)
        assert len(str(caught.value)) < 1_000


def test_filters_are_equal_by_their_text() -> None:
    """Equality and hash of filters are those of their texts; a filter doesn't equal a str."""
    assert TopicFilter("a/+") == TopicFilter("a/+")
    assert TopicFilter("a/+") != TopicFilter("a/#")
    assert TopicFilter("a/+") != "a/+"
    assert {TopicFilter("a/+")} == {TopicFilter("a/+"), TopicFilter("a/+")}
    assert repr(TopicFilter("a/+")) == "TopicFilter('a/+')"
    assert TopicFilter("a//+").levels == ("a", "", "+")


@given(wide=filters, narrow=filters, topic=topics)
def test_a_filter_that_covers_another_matches_all_its_topics(wide: str, narrow: str, topic: str) -> None:
    """`covers` returns True only if every topic that the other filter matches is matched."""
    if TopicFilter(wide).covers(TopicFilter(narrow)) and TopicFilter(narrow).matches(topic):
        assert TopicFilter(wide).matches(topic)


@pytest.mark.parametrize(
    ("wide", "narrow", "covered"),
    [
        ("#", "a/#", True),
        ("a/#", "a/+/b", True),
        ("a/#", "a", True),
        ("+/b", "a/b", True),
        ("a/+", "a/+", True),
        ("a/+", "a/#", False),
        ("a/+/#", "a/#", False),
        ("a/b", "a/+", False),
        ("#", "$SYS/#", False),
    ],
)
def test_filters_that_cover_others(wide: str, narrow: str, covered: bool) -> None:
    """Wildcards cover names and narrower wildcards, but no topics that begin with ``$``."""
    assert covered == TopicFilter(wide).covers(TopicFilter(narrow))
