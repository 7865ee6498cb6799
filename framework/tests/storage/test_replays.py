"""Merging streams: rows and their order equal those of a plain sort, and the cost is proportional to the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, MessageBatch
from topicstore.contract.cursors import Cursor
from topicstore.contract.replay_plan import GenerationPlan, Order, ReplayPlan, ShardPlan
from topicstore.contract.requests import ReadResult
from topicstore.storage.reading.pages import ReplayPlace
from topicstore.storage.replays import run

BASE = 1 << 63
"""A position above the range of signed 64-bit numbers, and of exact floats."""

Streams = list[list[list[int]]]
"""For each stream, the positions of its batches, relative to `BASE`."""


class Source:
    """A source that returns the streams' batches one by one, and splits them if fewer rows are requested."""

    def __init__(self, streams: list[tuple[int, list[list[int]]]]) -> None:
        self.batches = {number: [batch for batch in batches if batch] for number, (_, batches) in enumerate(streams)}
        self.shards = {number: shard for number, (shard, _) in enumerate(streams)}
        self.asked: list[int] = []

    def plan(self, order: Order, batch_size: int = 1_000) -> ReplayPlan:
        shards = []
        for shard in sorted(set(self.shards.values())):
            ours = [
                Cursor(bytes(16), shard, 1, number, "#", b"") for number, its in self.shards.items() if its == shard
            ]
            shards.append(ShardPlan(shard=shard, bound=2 * BASE, generations=[GenerationPlan(ours, 1)]))
        return ReplayPlan(shards=shards, order=order, batch_size=batch_size, timestamps=None)

    def fetch(self, cursor: Cursor, bound: int, limit: int) -> ReadResult:
        self.asked.append(limit)
        left = self.batches[cursor.stream]
        batch = left.pop(0) if left else []
        if len(batch) > limit:
            left.insert(0, batch[limit:])
            batch = batch[:limit]
        done = not left
        return ReadResult(
            batch=_batch(batch, cursor.shard, cursor.stream), cursor=cursor, end_of_stream=False, caught_up=done
        )


def _batch(positions: list[int], shard: int, stream: int) -> MessageBatch:
    batch = MessageBatch.from_messages([Message(f"{stream}/{position}", b"") for position in positions])
    at = np.array(positions, dtype=np.uint64) + np.uint64(BASE)
    return batch.placed(at, [0] * len(positions), shard)


@st.composite
def _streams(draw: st.DrawFn) -> list[tuple[int, list[list[int]]]]:
    streams = []
    for _ in range(draw(st.integers(1, 6))):
        positions = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
        cuts = sorted(draw(st.lists(st.integers(0, len(positions)), max_size=3)))
        batches = [positions[a:b] for a, b in zip([0, *cuts], [*cuts, len(positions)], strict=True)]
        streams.append((draw(st.integers(0, 2)), batches))
    return streams


@given(_streams(), st.sampled_from((1, 3, 1_000)))
def test_any_streams(streams: list[tuple[int, list[list[int]]]], batch_size: int) -> None:
    """`order="time"` sorts by position, then shard; `order="any"` yields each row once, and each stream in order."""
    rows = [(at, shard, number) for number, (shard, of) in enumerate(streams) for each in of for at in each]
    source = Source(streams)
    found = [topic for batch in run(source.plan("time", batch_size), source.fetch) for topic in batch.topics]
    by_position = sorted(rows, key=lambda row: row[:2])
    assert [(at, shard) for at, shard, _ in by_position] == [
        (int(topic.split("/")[1]), streams[int(topic.split("/")[0])][0]) for topic in found
    ]
    assert sorted(f"{number}/{at}" for at, _, number in rows) == sorted(found)
    source = Source(streams)
    found = [topic for batch in run(source.plan("any", batch_size), source.fetch) for topic in batch.topics]
    for number, (_, batches) in enumerate(streams):
        assert [f"{number}/{at}" for each in batches for at in each] == [
            topic for topic in found if topic.startswith(f"{number}/")
        ]
    assert len(rows) == len(found)
    assert max(source.asked, default=0) <= batch_size


@pytest.mark.parametrize("order", ["time", "any"])
def test_ten_times_the_streams_cost_about_ten_times(order: Order) -> None:
    """The cost of ten times as many streams is less than fifteen times as high.

    The cost counts executed lines of Python, rows of batches, and the lengths of lists and arrays that C methods
    process.
    """

    def cost(count: int) -> int:
        source = Source([(0, [[number], [count + number]]) for number in range(count)])
        steps = 0

        def trace(_frame: FrameType, event: str, value: object) -> Callable[..., Any]:
            nonlocal steps
            steps += len(value) if event == "return" and isinstance(value, MessageBatch) else event == "line"
            return trace

        def profile(_frame: FrameType, event: str, called: Any) -> None:
            nonlocal steps
            owner = getattr(called, "__self__", None) if event == "c_call" else None
            if isinstance(owner, list | np.ndarray) and called.__name__ != "append":
                steps += owner.size if isinstance(owner, np.ndarray) else len(owner)

        before = sys.gettrace(), sys.getprofile()
        sys.settrace(trace)
        sys.setprofile(profile)
        try:
            rows = sum(len(batch) for batch in run(source.plan(order), source.fetch))
        finally:
            sys.setprofile(before[1])
            sys.settrace(before[0])
        assert 2 * count == rows
        return steps

    assert cost(1_000) < 15 * cost(100)


def test_of_many_streams_few_messages_each_are_held() -> None:
    """The batch size is divided among the streams that are merged, with a minimum of 64 rows."""
    for count, expected in ((1, 1_000), (10, 100), (1_000, 64)):
        source = Source([(0, [[number]]) for number in range(count)])
        assert count == sum(len(batch) for batch in run(source.plan("time"), source.fetch))
        assert {expected} == set(source.asked)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_replay_continues_between_messages_at_one_position(tmp_path: Path, reverse: bool) -> None:
    """Pages of one message each return every message once, even if several shards have messages at one position."""
    with ts.open(tmp_path / "db", backend="memory", shards=3, clock=lambda: 1_700_000_000_000_000) as db:
        ids = db.store([Message("a", b"%d" % number, f"client-{number}") for number in range(12)]).ids
        assert len({one.position for one in ids}) < 12
        place, found = ReplayPlace.beginning(db.storage, "#", 0, None, by="position", reverse=reverse), []
        for _ in ids:
            page = next(place.batches(db.storage, 1))[:1]
            found += page.to_messages()
            place = place.after(page)
        assert found == list(db.replay("#", order="time", reverse=reverse))
