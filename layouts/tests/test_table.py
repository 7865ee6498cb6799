"""The table layout: rows that SQL reads, and filters said in SQL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, Properties, TopicFilter
from topicstore.contract.columns import to_list
from topicstore.contract.engine import DATA, KEYSPACES, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, UnsupportedError
from topicstore.contract.layout import Damage, Slab
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.oracle import strategies
from topicstore_layouts import table
from topicstore_layouts.table import TableLayout, TableOptions

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions

SHARD, GENERATION, START = 4, 2, 1 << 60
PLENTY = {"limit": 100_000, "limit_bytes": 1 << 30, "deadline": None}
LARGE = 65_537
RELAXED = settings(max_examples=40, suppress_health_check=list(HealthCheck))

Row = tuple[int, Message]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = DuckdbBackend(DuckdbOptions()).open_shard(tmp_path / "shard", KEYSPACES, create=True)
    with contextlib.closing(opened):
        yield opened


def created(engine: Engine, generation: int = GENERATION) -> Slab:
    layout, write = TableLayout(TableOptions()), WriteBatch()
    layout.create(engine, SHARD, generation, None, write)
    engine.write(write)
    return layout.open(engine, SHARD, generation)


def put(engine: Engine, slab: Slab, messages: Sequence[Message], first: int = START, gaps: int = 1) -> list[Row]:
    """Store messages and return them with their positions."""
    batch, write = MessageBatch.from_messages(messages), WriteBatch()
    positions = np.arange(len(batch), dtype=np.uint64) * np.uint64(gaps) + np.uint64(first)
    slab.store(batch.placed(positions, batch.timestamps, SHARD), write)
    engine.write(write)
    slab.committed()
    return list(zip(positions.tolist(), messages, strict=True))


def read(slab: Slab, text: str = "#", first: int = 0, bound: int = START + 100_000, **limits: Any) -> list[list[Row]]:
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


def flat(calls: list[list[Row]]) -> list[Row]:
    return [row for call in calls for row in call]


def plain(count: int, size: int = 10) -> list[Message]:
    return [Message("ab"[n % 2], bytes((n % 256,)) * size, "c", 1, False, 0) for n in range(count)]


def change(engine: Engine, statement: str) -> None:
    """Change rows by what no layout may: a statement that writes."""
    writer: Any = engine._writer
    writer.execute(f"USE {engine._name}.main").complete()
    writer.execute(statement).complete()


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_says_what_the_message_says(engine: Engine) -> None:
    """In columns that need no explaining."""
    slab = created(engine)
    properties = Properties(content_type="text/plain", user_properties=(("k", "v"), ("k", "w")))
    put(engine, slab, [Message("a/b", b"\x00\xff", "c", 2, True, 1_700_000_000_000_000, properties)], START | 7)
    (row,) = engine.sql(
        "SELECT * EXCLUDE (time, timestamp), epoch_us(time), epoch_us(timestamp) FROM messages"
    ).to_pylist()
    assert {
        "generation": GENERATION,
        "stream": 0,
        "position": START | 7,
        "shard": SHARD,
        "topic": "a/b",
        "client_id": "c",
        "qos": 2,
        "retain": True,
        "payload": b"\x00\xff",
        "payload_bytes": 2,
        "properties": {
            "payload_format_indicator": None,
            "message_expiry_interval": None,
            "content_type": "text/plain",
            "response_topic": None,
            "correlation_data": None,
            "user_properties": [{"name": "k", "value": "v"}, {"name": "k", "value": "w"}],
        },
        'epoch_us("time")': START >> 11,
        'epoch_us("timestamp")': 1_700_000_000_000_000,
    } == row


def test_an_empty_slab_can_be_queried(engine: Engine) -> None:
    """The table is there from the beginning, and the second generation doesn't mind."""
    slabs = created(engine, 1), created(engine, 2)
    assert [{"n": 0}] == engine.sql("SELECT count(*) AS n FROM messages").to_pylist()
    assert [[[]], [[]]] == [read(slab) for slab in slabs]


def test_messages_come_back(engine: Engine) -> None:
    """As objects and as Arrow, whatever is in them."""
    generations = itertools.count(1)

    @RELAXED
    @given(st.lists(strategies.messages(times=st.integers(0, 2**40)), min_size=1, max_size=20))
    def check(messages: list[Message]) -> None:
        slab = created(engine, next(generations))
        rows = put(engine, slab, messages)
        everything = flat(read(slab)) + [row for row in rows if row[1].topic[0] == "$"]
        assert rows == sorted(everything, key=lambda row: row[0])
        batch = slab.next(0, TopicFilter("#"), bytes(8), bound=START + 100, **PLENTY).batch
        if len(batch):
            assert MessageBatch.from_arrow(batch.to_arrow(ids=True)).to_messages() == batch.to_messages()
        assert [len(rows)] == list(slab.verify(START + 100))

    check()


def test_arrow_stays_arrow(engine: Engine) -> None:
    """From the table to a record batch, and slices too; objects are made when they are asked for."""
    slab = created(engine)
    put(engine, slab, plain(50))
    batch = slab.next(0, TopicFilter("#"), bytes(8), bound=START + 100, **PLENTY).batch
    for part, rows in ((batch, range(50)), (batch[10:20], range(10, 20))):
        payloads = part.to_arrow().column("payload")
        assert isinstance(part.payloads.toarrow(), pa.Array)
        assert [bytes((n,)) * 10 for n in rows] == payloads.to_pylist() == list(part.payloads)


# --- filters ------------------------------------------------------------------------------------


_with_filters = strategies.hostile_topics().flatmap(
    lambda topic: st.tuples(st.just(topic), strategies.filters_of(topic))
)


def test_sql_matches_as_mqtt_does(engine: Engine) -> None:
    """Whatever characters topics and filters have."""
    generations = itertools.count(1)

    @RELAXED
    @given(
        st.lists(_with_filters, min_size=1, max_size=8),
        st.lists(strategies.filters(strategies.hostile_topics()), max_size=4),
    )
    def check(topics: list[tuple[str, str]], filters: list[str]) -> None:
        slab = created(engine, next(generations))
        rows = put(engine, slab, [Message(topic, b"", "", 0, False, 0) for topic, _ in topics])
        for text in ("#", "+", "+/#", "$SYS/#", *filters, *(own for _, own in topics)):
            topic_filter = TopicFilter(text)
            assert [row for row in rows if topic_filter.matches(row[1].topic)] == flat(read(slab, text))

    check()


@pytest.mark.parametrize("filter_", ["+/" * 200 + "x", "a/" * 150 + "#", "+/" * 30_000 + "+", "#", "+/" * 99 + "#"])
def test_filters_of_many_levels(engine: Engine, filter_: str) -> None:
    """They are matched all the same; those that are too long for SQL, here."""
    slab = created(engine)
    topics = ["a/" * 200 + "x", "a/" * 150 + "b", "/" * 30_000, "/" * 29_999, "a", "$a/" + "a/" * 199 + "x"]
    rows = put(engine, slab, [Message(topic, b"", "", 0, False, 0) for topic in topics])
    wanted = TopicFilter(filter_)
    assert [row for row in rows if wanted.matches(row[1].topic)] == flat(read(slab, filter_))
    assert [row for row in rows if wanted.matches(row[1].topic)] == flat(read(slab, filter_, limit=1))
    (step,) = slab.delete(wanted, 0, START + 100)
    engine.write(step.write)
    assert step.messages == sum(wanted.matches(row[1].topic) for row in rows)
    assert [] == flat(read(slab, filter_))


# --- limits -------------------------------------------------------------------------------------


def test_limits_of_rows_bytes_and_positions(engine: Engine) -> None:
    """At most so many; payloads up to a limit and then one more; from a position to a bound, both inside."""
    slab = created(engine)
    rows = put(engine, slab, plain(100), gaps=3)
    assert [7] * 14 + [2] == [len(call) for call in read(slab, limit=7) if call]
    assert [4] * 25 == [len(call) for call in read(slab, limit_bytes=40) if call]
    assert [1] * 100 == [len(call) for call in read(slab, limit_bytes=1) if call]
    assert rows == flat(read(slab, limit=7, limit_bytes=55)) == flat(read(slab, deadline=0.0))
    assert rows[1:34] == flat(read(slab, first=START + 1, bound=START + 99))
    assert rows[1::2] == flat(read(slab, "b", limit=3, limit_bytes=20))


def test_a_deadline_ends_a_read_that_finds_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Having moved on: after many calls it has seen everything."""
    monkeypatch.setattr(table, "_LOOKED_AT", 10)
    slab = created(engine)
    rows = put(engine, slab, [*plain(95), Message("rare", b"x", "c", 0, False, 0)])
    calls = read(slab, "rare", deadline=0.0)
    assert ([[]] * 9, rows[-1:]) == (calls[:9], flat(calls))


def test_a_place_of_another_kind_is_refused(engine: Engine) -> None:
    """And so is a stream that never was."""
    slab = created(engine)
    with pytest.raises(ValueError, match="seven"):
        slab.next(0, TopicFilter("#"), b"seven", bound=START, **PLENTY)
    with pytest.raises(KeyError):
        slab.next(1, TopicFilter("#"), bytes(8), bound=START, **PLENTY)
    with pytest.raises(KeyError):
        slab.begin(1, TopicFilter("#"), 0)


# --- large payloads -----------------------------------------------------------------------------


def test_large_payloads_lie_apart(engine: Engine) -> None:
    """And come back in their places, alone or beside small ones, by every limit; deleting takes both parts."""
    slab = created(engine)
    sizes = [LARGE - 1, LARGE, 0, 3 * LARGE, 5, 1]
    rows = put(engine, slab, [Message("t", bytes((n,)) * size, "c", 0, False, 0) for n, size in enumerate(sizes)])
    found = engine.sql("SELECT payload_bytes, payload IS NULL AS apart FROM messages").to_pylist()
    assert [(size, size >= LARGE) for size in sizes] == [(row["payload_bytes"], row["apart"]) for row in found]
    for limits in ({}, {"limit": 1}, {"limit_bytes": 1}, {"limit_bytes": LARGE}):
        assert rows == flat(read(slab, **limits))
    assert [6] == list(slab.verify(START + 10))
    (step,) = slab.delete(TopicFilter("t"), START + 1, START + 2)
    engine.write(step.write)
    assert [rows[0], *rows[3:]] == flat(read(slab))
    assert [(GENERATION, 0, START + 3)] == [key for chunk in engine.scan(DATA) for key, _ in chunk]


def test_a_large_payload_deleted_under_a_reader_is_not_damage(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the query of the rows and that of the payloads: the message is left out."""
    slab = created(engine)
    rows = put(engine, slab, [Message("t", bytes(LARGE), "c", 0, False, 0)] * 2 + plain(1))
    (step,) = slab.delete(TopicFilter("t"), START, START)
    get_many = engine.get_many

    def delete_first(keyspace: Any, keys: Any) -> Any:
        engine.write(step.write)
        return get_many(keyspace, keys)

    monkeypatch.setattr(engine, "get_many", delete_first)
    assert rows[1:] == flat(read(slab))


# --- accounts -----------------------------------------------------------------------------------


def test_bytes_are_counted_the_same_when_they_come_and_when_they_go(engine: Engine) -> None:
    """Texts of several bytes a character and large payloads among them; and every message once."""
    slab, counted = created(engine), 0
    messages = [*plain(10), Message("ü/€", b"x" * LARGE, "größe", 0, False, 0), Message("ü", b"", "", 0, False, 0)]
    for first in (START, START + 100):
        batch, write = MessageBatch.from_messages(messages), WriteBatch()
        slab.store(batch.placed(np.arange(12, dtype=np.uint64) + np.uint64(first), batch.timestamps, SHARD), write)
        engine.write(write)
        counted += write.size
    steps = []
    for text in ("ü/#", "#"):
        for step in slab.delete(TopicFilter(text), 0, START + 1_000):
            engine.write(step.write)
            steps.append(step)
    assert (24, counted) == (sum(step.messages for step in steps), sum(step.freed for step in steps))
    assert [] == flat(read(slab))


def test_a_delete_looks_at_so_many_rows_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they match or not."""
    monkeypatch.setattr(table, "_DELETED", 10)
    slab = created(engine)
    rows = put(engine, slab, plain(35))
    removed = []
    for step in slab.delete(TopicFilter("a"), START + 5, START + 34):
        engine.write(step.write)
        removed.append(step.messages)
    assert [5, 5, 5] == removed
    assert [*rows[:5], *rows[5::2]] == flat(read(slab))


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    ["shard = 5", "position = 1152921504606846981", "position = 1152921504606847100"],
)
def test_a_row_in_the_wrong_place_is_told(engine: Engine, what: str) -> None:
    """Of another shard, or out of order: by readers and by verify."""
    slab = created(engine)
    put(engine, slab, plain(10))
    change(engine, f"UPDATE messages SET {what} WHERE position = {START + 3}")
    with pytest.raises(CorruptionError, match="shard 4, generation 2"):
        read(slab)
    found = list(slab.verify(START + 1_000))
    assert ["shard 4, generation 2, message at position" in f.place for f in found if isinstance(f, Damage)] == [True]


@pytest.mark.parametrize(
    "what",
    [
        "topic = ''",
        "qos = 3",
        "payload_bytes = 11",
        "payload = NULL",
        "time = time + INTERVAL 1 SECOND",
        "retain = NULL",
    ],
)
def test_a_row_that_contradicts_itself_is_told(engine: Engine, what: str) -> None:
    """By verify, with the others counted as good."""
    slab = created(engine)
    put(engine, slab, plain(10))
    change(engine, f"UPDATE messages SET {what} WHERE position = {START + 3}")
    place = f"shard 4, generation 2, message at position {START + 3}"
    found = list(slab.verify(START + 1_000))
    assert place in [f.place for f in found if isinstance(f, Damage)]
    assert 9 == sum(f for f in found if isinstance(f, int))


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_large_payload_is_told(engine: Engine, missing: bool) -> None:
    """Changed, or gone while its row is there: by readers and by verify; the others can be read."""
    slab = created(engine)
    rows = put(engine, slab, [Message("t", bytes(LARGE), "c", 0, False, 0), *plain(3)])
    if missing:
        change(engine, "DELETE FROM data")
    else:
        write = WriteBatch()
        write.put(DATA, (GENERATION, 0, START), bytes(8) + bytes(LARGE))
        engine.write(write)
    place = f"shard 4, generation 2, message at position {START}"
    with pytest.raises(CorruptionError, match=place):
        read(slab)
    assert [Damage, int] == list(map(type, found := list(slab.verify(START + 10))))
    assert (place, 3) == (found[0].place, found[1])  # type: ignore[union-attr]
    assert rows[1:] == flat(read(slab, first=START + 1))


def test_an_engine_without_sql_is_refused() -> None:
    """Before anything is stored."""
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    TableLayout(TableOptions()).create(engine, SHARD, GENERATION, None, write)
    with pytest.raises(UnsupportedError):
        write.without_rows()
    with pytest.raises(UnsupportedError):
        engine.sql("SELECT 1")
