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

from topicstore_benchmarks.figures.figure import Cell, Section
from topicstore_benchmarks.figures.trie import devices, flood, measure_trie
from topicstore_layouts.shared.learned_topics import CAPACITY, LearnedTopics

TOPICS = 4_000


@pytest.fixture(scope="module")
def section() -> Section:
    return measure_trie(TOPICS, 1)


def value(section: Section, data: str, name: str) -> float:
    (found,) = (figure.value for figure in section.figures if (figure.data, figure.name) == (data, name))
    return found


def test_sets_are_the_same_in_every_run() -> None:
    """And of different topics: all of one shape, or of none."""
    assert list(devices(TOPICS)) == list(devices(TOPICS))
    assert list(flood(TOPICS)) == list(flood(TOPICS))
    assert TOPICS == len(set(devices(TOPICS))) == len(set(flood(TOPICS)))


def test_everything_took_time(section: Section) -> None:
    """Rates, seconds and bytes are above 0."""
    assert all(figure.value > 0 for figure in section.figures)


def test_topics_of_one_shape_stay_small(section: Section) -> None:
    """Eight regions with 20 devices and one for the rest; a flood makes far more of as many topics."""
    known, full = LearnedTopics(1, (100, 20)), LearnedTopics(1, (100, 20))
    known.learn_all(list(devices(TOPICS)))
    full.learn_all(list(flood(TOPICS)))
    streams, flooded = (value(section, data, "streams") for data in ("devices", "flood"))
    assert (8 * 21, 2 + 1 + 8 * (1 + 2 * 21)) == (streams, known.nodes)
    assert streams < flooded == len(full) <= full.nodes <= 2 * CAPACITY
    memory, flood_memory = (value(section, data, "memory once loaded, MB") for data in ("devices", "flood"))
    assert memory < 0.5 < flood_memory
    assert memory < value(section, "devices", "memory once all were learned, MB") < TOPICS * 500 / 1e6


def test_filters_go_from_one_topic_to_all(section: Section) -> None:
    """Each wants more than the one before."""
    topic = next(flood(1))
    rows = section.sheets[1].rows
    assert [f"`{topic}`", "`#`"] == [rows[0][0], rows[-1][0]]
    streams = [int(cell.text.replace(",", "")) for _, cell, _ in rows if isinstance(cell, Cell)]
    assert sorted(streams) == streams
    assert (1, value(section, "flood", "streams")) == (streams[0], streams[-1])
    assert all(value(section, "flood", f"µs to match {str(row[0]).strip('`')}") > 0 for row in rows)


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
