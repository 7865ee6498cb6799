"""The reference layout: one value a message, and nothing that could go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import to_list
from topicstore.contract.engine import DATA, KEYSPACES, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage, Slab
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.oracle import strategies
from topicstore_layouts.reference import ReferenceLayout, ReferenceOptions

SHARD, GENERATION, START = 4, 2, 1 << 60
PLENTY = {"limit": 100_000, "limit_bytes": 1 << 30, "deadline": None}

Row = tuple[int, Message]


def opened(engine: Engine, generation: int = GENERATION) -> Slab:
    return ReferenceLayout(ReferenceOptions()).open(engine, SHARD, generation)


def put(engine: Engine, slab: Slab, messages: Sequence[Message], first: int = START, gaps: int = 1) -> list[Row]:
    """Store messages and return them with their positions."""
    batch, write = MessageBatch.from_messages(messages), WriteBatch()
    positions = np.arange(len(batch), dtype=np.uint64) * np.uint64(gaps) + np.uint64(first)
    slab.store(batch.placed(positions, batch.timestamps, SHARD), write)
    engine.write(write)
    slab.committed()
    return list(zip(positions.tolist(), messages, strict=True))


def read(slab: Slab, text: str = "#", first: int = 0, bound: int = START + 10_000, **limits: Any) -> list[list[Row]]:
    """Return what a reader gets, a list a call."""
    topic_filter, calls, exhausted = TopicFilter(text), [], False
    place = slab.begin(0, topic_filter, first)
    while not exhausted:
        step = slab.next(0, topic_filter, place, bound=bound, **{**PLENTY, **limits})
        assert step.exhausted or step.place > place
        place, exhausted = step.place, step.exhausted
        positions = to_list(step.batch.positions) if len(step.batch) else []
        calls.append(list(zip(positions, step.batch.to_messages(), strict=True)))
    return calls


def plain(rows: int) -> list[Message]:
    return [Message("ab"[n % 2], bytes((n,)) * 10, "c", 1, False, 0) for n in range(rows)]


times = st.integers(0, 2**40)


@given(
    st.lists(strategies.messages(times=times), min_size=1, max_size=12),
    strategies.filters(),
    st.integers(START - 2, START + 40),
    st.integers(START - 2, START + 40),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([1, 300, 1 << 30]),
)
def test_everything_comes_back(
    messages: list[Message], text: str, first: int, bound: int, limit: int, limit_bytes: int
) -> None:
    """Every field, for any filter, place, bound and limit."""
    engine = MemoryEngine(KEYSPACES)
    slab = opened(engine)
    rows = put(engine, slab, messages, gaps=3)
    calls = read(slab, text, first, bound, limit=limit, limit_bytes=limit_bytes)
    matches = TopicFilter(text).matches
    assert [row for row in rows if first <= row[0] <= bound and matches(row[1].topic)] == [r for c in calls for r in c]
    assert all(len(call) <= limit for call in calls)


def test_limits() -> None:
    """A call ends with its rows, its bytes or its time, having moved on."""
    engine = MemoryEngine(KEYSPACES)
    slab = opened(engine)
    put(engine, slab, plain(10))
    assert [3, 3, 3, 1] == list(map(len, read(slab, limit=3)))
    assert [2, 2, 2, 2, 2] == list(map(len, read(slab, limit_bytes=11)))
    assert [1] * 10 == list(map(len, read(slab, limit_bytes=1)))
    assert [1, 0] * 5 == list(map(len, read(slab, "a", deadline=0.0)))


def test_one_stream() -> None:
    """Whatever the filter; others there are none."""
    slab = opened(MemoryEngine(KEYSPACES))
    assert [(0, "#")] == [(info.stream, info.pattern) for info in slab.streams(TopicFilter("a/b"))]
    assert [0] == slab.cover(TopicFilter("a/b"))
    assert 1 == slab.info().streams
    with pytest.raises(KeyError):
        slab.begin(1, TopicFilter("#"), 0)
    for stream, place in ((1, bytes(8)), (0, bytes(7)), (0, b"")):
        with pytest.raises(ValueError, match="b'"):
            slab.next(stream, TopicFilter("#"), place, bound=START, **PLENTY)  # type: ignore[arg-type]


def test_delete() -> None:
    """Matching messages of a range go, each step looks at a thousand; places stay valid."""
    engine = MemoryEngine(KEYSPACES)
    slab = opened(engine)
    rows = put(engine, slab, plain(200) * 15)
    last = START + 2_899
    sizes = {key[2]: len(value) for chunk in engine.scan(DATA) for key, value in chunk}
    steps = list(slab.delete(TopicFilter("a"), START + 100, last))
    assert [500, 500, 400] == [step.messages for step in steps]
    for step in steps:
        assert step.messages == len(step.write.operations)
        assert sum(sizes[key[2]] for _, key, _ in step.write.operations) == step.freed
        engine.write(step.write)
    expected = [row for row in rows if row[1].topic == "b" or not START + 100 <= row[0] <= last]
    assert [expected] == read(slab)
    assert [[row for row in expected if row[0] >= START + 102]] == read(slab, first=START + 102)
    assert [0, 0] == [step.messages for step in slab.delete(TopicFilter("a"), START + 100, last)]
    assert len(expected) == sum(found for found in slab.verify(START + 10_000) if isinstance(found, int))


def test_slabs_keep_apart() -> None:
    """Generations before and behind are not seen."""
    engine = MemoryEngine(KEYSPACES)
    rows = [put(engine, opened(engine, generation), plain(generation)) for generation in (1, 2, 3)]
    assert [[each] for each in rows] == [read(opened(engine, generation)) for generation in (1, 2, 3)]


def test_reopening_finds_it_on_disk(open_rocksdb: Callable[[], Engine]) -> None:
    """With a real engine between."""
    engine = open_rocksdb()
    rows = put(engine, opened(engine), plain(100))
    engine.close()
    engine = open_rocksdb()
    assert [rows] == read(opened(engine))
    engine.close()


def test_every_flipped_bit_and_truncation_is_found() -> None:
    """And named, while the messages around it stay readable."""
    engine = MemoryEngine(KEYSPACES)
    slab = opened(engine)
    rows = put(engine, slab, plain(3))
    key, place = (GENERATION, 0, START + 1), f"shard {SHARD}, generation {GENERATION}, message at position {START + 1}"
    good = engine.get(DATA, key)
    assert good is not None
    flipped = [good[:n] + bytes((good[n] ^ 1 << bit,)) + good[n + 1 :] for n in range(len(good)) for bit in range(8)]
    for bad in [*flipped, *(good[:n] for n in range(len(good))), good + b"\0"]:
        write = WriteBatch()
        write.put(DATA, key, bad)
        engine.write(write)
        error = NewerFormatError if bad[:1] > b"\1" else CorruptionError
        with pytest.raises(error, match=f"^{place}: "):
            read(slab)
        assert [2, place] == [
            sum(found for found in slab.verify(START + 9) if isinstance(found, int)),
            *(found.place for found in slab.verify(START + 9) if isinstance(found, Damage)),
        ]
    assert [rows[:1], rows[2:]] == [*read(slab, bound=START), *read(slab, first=START + 2)]


def test_a_value_under_another_position() -> None:
    """The checksum knows where it belongs."""
    engine = MemoryEngine(KEYSPACES)
    slab = opened(engine)
    put(engine, slab, plain(1))
    value, write = engine.get(DATA, (GENERATION, 0, START)), WriteBatch()
    assert value is not None
    write.put(DATA, (GENERATION, 0, START + 1), value)
    engine.write(write)
    with pytest.raises(CorruptionError, match=str(START + 1)):
        read(slab)
