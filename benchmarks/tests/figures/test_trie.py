"""The measurements of the learned topic structure: of what they say they measure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from topicstore import TopicFilter

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks.figures.trie import Outcome, devices, flood, measure_trie
from topicstore_layouts.shared.learned_topics import CAPACITY, LearnedTopics

TOPICS = 4_000


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measure_trie(TOPICS, 1)


def test_sets_are_the_same_in_every_run() -> None:
    """And of different topics: all of one shape, or of none."""
    assert list(devices(TOPICS)) == list(devices(TOPICS))
    assert list(flood(TOPICS)) == list(flood(TOPICS))
    assert TOPICS == len(set(devices(TOPICS))) == len(set(flood(TOPICS)))


def test_everything_took_time(outcome: Outcome) -> None:
    """Rates, seconds and bytes are above 0."""
    assert TOPICS == outcome.topics
    assert all(rate > 0 for rate in (outcome.cached, outcome.cold, outcome.walked, outcome.flood_rate))
    assert outcome.load_seconds > 0
    assert outcome.flood_load_seconds > 0


def test_topics_of_one_shape_stay_small(outcome: Outcome) -> None:
    """Eight regions with 20 devices and one for the rest; a flood makes far more of as many topics."""
    assert (8 * 21, 2 + 1 + 8 * (1 + 2 * 21)) == (outcome.streams, outcome.nodes)
    assert outcome.memory < 500_000 < outcome.flood_memory
    assert outcome.memory < outcome.learning_memory < TOPICS * 500
    assert outcome.streams < outcome.flood_streams <= outcome.flood_nodes <= 2 * CAPACITY


def test_filters_go_from_one_topic_to_all(outcome: Outcome) -> None:
    """Each wants more than the one before."""
    topic = next(flood(1))
    assert [topic, "#"] == [outcome.matches[0].topic_filter, outcome.matches[-1].topic_filter]
    streams = [match.streams for match in outcome.matches]
    assert sorted(streams) == streams
    assert (1, outcome.flood_streams) == (streams[0], streams[-1])
    assert all(match.seconds > 0 for match in outcome.matches)


def steps(work: Callable[[], object]) -> int:
    """Return how many bytecodes Python runs for it, however busy the machine is."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time that this thread takes for it, at the best of many tries."""
    found = []
    for _ in range(30):
        began = time.thread_time()
        for _ in range(10):
            work()
        found.append(time.thread_time() - began)
    return min(found)


def test_a_narrow_filter_does_not_walk_the_tree() -> None:
    """It takes less than a fiftieth of Python's steps for all topics, and less than a thirtieth of all its time."""
    trie = LearnedTopics(1, (100,))
    topics = list(flood(15 * TOPICS))
    trie.learn_all(topics)
    narrow, wide = TopicFilter(topics[0]), TopicFilter("#")
    assert 50 * steps(lambda: trie.match(narrow)) < steps(lambda: trie.match(wide))
    assert 30 * seconds(lambda: trie.match(narrow)) < seconds(lambda: trie.match(wide))
