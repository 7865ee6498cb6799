"""The lag of readers in messages: exact up to `COUNTED` messages, estimated above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.positions import first_position
from topicstore.storage.counting import lag as module
from topicstore.storage.counting.lag import Lag, LagCounter
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START, Clock

SECOND = 1_000_000
TOPICS = ["a/1", "a/2", "b/1", "$a/1"]
FILTERS = ["#", "a/+", "b/#", "+/1", "c"]

Stored = list[tuple[int, int, str]]
"""Shard, position and topic of each message."""


def counted(stored: Stored, topic_filter: str, places: list[int]) -> Lag:
    """Return the lag, computed from all messages."""
    matches = ts.TopicFilter(topic_filter).matches
    unread = [position for shard, position, topic in stored if position > places[shard] and matches(topic)]
    newest = max((position for _, position, _ in stored), default=0)
    seconds = ((newest >> 11) - (min(unread) >> 11)) / 1e6 if unread else 0.0
    return Lag(messages=len(unread), exact=True, seconds=seconds)


def store(db: ts.Database, clock: Clock, topics: list[str], seconds: float = 1) -> Stored:
    """Store one message for each given topic, in order; the clock advances by `seconds` before each."""
    found = []
    for number, topic in enumerate(topics):
        clock.now += int(seconds * SECOND)
        (one,) = db.store([ts.Message(topic, b"", f"client-{number % 3}", 1)]).ids
        found.append((one.shard, one.position, topic))
    return found


@pytest.mark.parametrize("layout", ["block", "wildcard_optimized"])
@settings(COSTLY, max_examples=tries(30, 300))
@given(data=st.data())
def test_what_is_counted_is_exact(tmp_path_factory: pytest.TempPathFactory, layout: str, data: st.DataObject) -> None:
    """The lag, if counted, is exact for every filter and position, over several shards and generations."""
    clock = Clock()
    path = tmp_path_factory.mktemp("lag") / "db"
    options = {"epoch_bits": 11} if layout == "wildcard_optimized" else {}
    with ts.open(
        path,
        backend="memory",
        layout=layout,
        shards=2,
        options={layout: options},
        clock=clock,
        monotonic=clock.monotonic,
    ) as db:
        stored: Stored = []
        for topics in data.draw(st.lists(st.lists(st.sampled_from(TOPICS), max_size=8), min_size=1, max_size=3)):
            stored += store(db, clock, topics)
            db.add_generation()
        counter = LagCounter(db.storage)
        positions = st.sampled_from([0, *(position for _, position, _ in stored), 1 << 63])
        for _ in range(5):
            topic_filter, places = data.draw(st.sampled_from(FILTERS)), [data.draw(positions), data.draw(positions)]
            assert counted(stored, topic_filter, places) == counter.lag(ts.TopicFilter(topic_filter), places)


def steadily(number: int) -> int:
    return number * SECOND


def in_bursts(number: int) -> int:
    """Return times in microseconds: bursts of a hundred messages, with pauses between them."""
    return number // 100 * 500 * SECOND + number % 100


@pytest.mark.parametrize(("time", "off"), [(steadily, 0.02), (in_bursts, 0.5)])
def test_what_is_estimated_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: Callable[[int], int], off: float
) -> None:
    """An estimated lag is marked as inexact, is close at a steady rate, and never exceeds the stored messages."""
    monkeypatch.setattr(module, "COUNTED", 500)
    clock = Clock()
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", clock=clock) as db:
        clock.now = START + 10**9 * SECOND
        stamps = [START + time(number) for number in range(30_000)]
        rows = [ts.Message(f"a/{n % 3}", b"", "p", 1, timestamp=stamp) for n, stamp in enumerate(stamps)]
        db.store(rows)
        for topic_filter, truth in (("#", 30_000), ("a/1", 10_000)):
            lag = LagCounter(db.storage).lag(ts.TopicFilter(topic_filter), [0])
            assert not lag.exact
            assert abs(lag.messages - truth) <= off * truth
            assert lag.messages <= 30_000
            assert lag.seconds == pytest.approx((stamps[-1] - stamps[0]) / 1e6, abs=2)
        near = first_position(stamps[-400]) - 1
        assert LagCounter(db.storage).lag(ts.TopicFilter("#"), [near]) == Lag(
            messages=400, exact=True, seconds=(stamps[-1] - stamps[-400]) / 1e6
        )


def test_few_messages_are_read_for_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate reads few messages, and none if the reader has read everything."""
    monkeypatch.setattr(module, "COUNTED", 500)
    with ts.open(tmp_path / "db", backend="memory") as db:
        for _ in range(50):
            db.store([ts.Message("a", b"", "p", 1) for _ in range(1_000)])
        shard = db.storage.shards[0]
        LagCounter(db.storage).lag(ts.TopicFilter("a"), [shard.writer.watermark])
        assert shard.writer.counters.read_messages == 0
        assert LagCounter(db.storage).lag(ts.TopicFilter("a"), [0]).messages > 500
        assert shard.writer.counters.read_messages < 20_000


def test_a_closed_database_says_so(tmp_path: Path) -> None:
    db = ts.open(tmp_path / "db", backend="memory")
    subscription = db.subscribe("#")
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        subscription.lag()


def test_a_long_lag_is_estimated_without_reading(tmp_path: Path) -> None:
    """With topics counted, an estimate reads no message. It is exact for topics wholly before or after the position."""
    clock = Clock()
    with ts.open(tmp_path / "db", backend="memory", clock=clock, monotonic=clock.monotonic, auto_compact=False) as db:
        places = []
        for number in range(200):
            clock.now += SECOND
            topics = ["early"] if number < 50 else ["a/1", "a/2", "late"] if number >= 190 else ["a/1", "a/2"]
            db.store([ts.Message(topics[n % len(topics)], b"", "p", 1) for n in range(1_000)])
            places.append(db.storage.shards[0].writer.watermark)
        db.topics()  # counts the stored messages by topic
        before = db.info().total.read_messages
        counter = LagCounter(db.storage)
        for number, place in enumerate(places[:120:10]):
            lag = counter.lag(ts.TopicFilter("#"), [place])
            truth = 200_000 - 1_000 * (number * 10 + 1)
            assert abs(lag.messages - truth) <= 0.05 * truth
            assert lag.seconds == pytest.approx(200 - number * 10 - 1, abs=1)
        assert counter.lag(ts.TopicFilter("early"), [places[60]]) == Lag.none()
        late = counter.lag(ts.TopicFilter("late"), [places[60]])
        assert (3_330, True) == (late.messages, late.exact)
        assert late.seconds == pytest.approx(9, abs=0.1)
        assert not counter.lag(ts.TopicFilter("a/1"), [places[60]]).exact
        assert db.info().total.read_messages == before
        assert counter.lag(ts.TopicFilter("#"), [places[-5]]) == Lag(messages=4_000, exact=True, seconds=3.0)
