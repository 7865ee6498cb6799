"""Filters made from conditions on topics match every topic that meets the conditions, for any value."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from pyspark.sql.datasource import EqualTo, In, StringStartsWith
from topicstore.contract.errors import InvalidTopicError
from topicstore.contract.topics import MAX_TOPIC_BYTES, TopicFilter, check_topic
from topicstore.spark.options import Selection
from topicstore.storage.directory.manifest import Manifest

MANIFEST = Manifest(
    id="0" * 32,
    backend="memory",
    layout="reference",
    shards=1,
    durability="commit",
    timestamps="message",
    late="raise",
    max_skew=0.0,
    plugins=(),
    options={},
    created="",
    created_by="",
)
TEXTS = st.text("ab/+#$\0é", max_size=6)
LONG = "x" * (MAX_TOPIC_BYTES - 1)


def valid(topic: str) -> bool:
    try:
        check_topic(topic)
    except InvalidTopicError:
        return False
    return True


def wanted(selection: Selection, topic: str) -> bool:
    return any(TopicFilter(text).matches(topic) for text in selection.filters)


@given(TEXTS, TEXTS, st.sampled_from(["#", "a/#", "+/b", "a/b/+", "$a/#"]))
@example(LONG, "/", "#")
@example(LONG, "xx", "#")
def test_conditions_on_topics(value: str, more: str, topic_filter: str) -> None:
    """A valid topic that meets a condition is selected if it matches the filter; an invalid topic adds no filter."""
    whole, topic = Selection(filters=(topic_filter,)), value + more
    begins = whole.narrowed([StringStartsWith(("topic",), value)], MANIFEST)
    for condition in (EqualTo(("topic",), topic), In(("topic",), (topic, value))):
        equals = whole.narrowed([condition], MANIFEST)
        if valid(topic):
            assert wanted(equals, topic) == wanted(begins, topic) == wanted(whole, topic)
        else:
            assert topic not in equals.filters
    if value and not valid(value):
        assert begins.empty
