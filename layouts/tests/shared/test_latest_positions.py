"""Tests that readers skip exactly the streams that end before their first position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, TopicFilter
from topicstore.contract.engine import KEYSPACES, Reader
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.faults.clock import START, Clock
from topicstore_layouts.shared.latest_positions import LatestPositions

_STREAMS = st.integers(1, 100)
_BATCHES = st.lists(st.lists(_STREAMS, min_size=1, max_size=20), max_size=8)


@given(_BATCHES, _BATCHES, st.integers(0, 200))
def test_what_it_leaves_out(before: list[list[int]], since: list[list[int]], first: int) -> None:
    """The streams left out are exactly those whose last position, cached or looked up, is before a given one."""
    latest: dict[int, int] = {}
    asked: list[int] = []

    def look_up(_: Reader, stream: int) -> int:
        asked.append(stream)
        return stored.get(stream, 0)

    position = 0
    for batch in before:
        for stream in batch:
            position += 1
            latest[stream] = position
    stored = dict(latest)
    positions = LatestPositions(MemoryEngine(KEYSPACES), look_up)
    every = list(range(1, 101))
    for batch in since:
        at = np.arange(position + 1, position + 1 + len(batch), dtype=np.uint64)
        positions.note(np.array(batch, dtype=np.uint64), at)
        latest.update(zip(batch, at.tolist(), strict=True))
        position += len(batch)
        wanted = every if first == 0 else [stream for stream in every if latest.get(stream, 0) >= first]
        assert wanted == positions.reaching(every, first)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("layout", ["skipstream", "wildcard_optimized"])
def test_a_late_start_seeks_in_few_streams(tmp_path: Path, layout: str) -> None:
    """Streams that end before the start of a replay cost no seek, except on the first replay after an opening."""
    clock = Clock(START)
    with ts.open(tmp_path / "db", mode="x", backend="rocksdb", layout=layout, clock=clock) as db:
        db.store([Message(f"{number}/x", b"early") for number in range(90)])
        clock.now += 10_000_000
        db.store([Message(f"{number}/x", b"late") for number in range(3)])
        _check_late(db, clock)
    with ts.open(tmp_path / "db", clock=clock) as db:
        assert [b"late"] * 3 == _late(db, clock)  # this replay also reads the last positions of the other streams
        _check_late(db, clock)
        db.store([Message("50/x", b"late")])
        assert [b"late"] * 4 == _late(db, clock)


def _check_late(db: ts.Database, clock: Clock) -> None:
    counters = db.storage.shards[0].generations.slab(1).counters
    before = counters.seeks
    assert [b"late"] * 3 == _late(db, clock)
    assert counters.seeks - before <= 3
    assert len(db.storage.shards[0].generations.slab(1).cover(TopicFilter("#"), 0)) >= 90


def _late(db: ts.Database, clock: Clock) -> list[bytes]:
    return [message.payload for message in db.replay("#", start=clock.now - 1_000_000)]
