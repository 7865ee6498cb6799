"""Tests of the table layout: rows that SQL can query, and filters expressed in SQL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, Properties, TopicFilter
from topicstore.contract.engine import DATA, KEYSPACES, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, UnsupportedError
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import LayoutSubject
from topicstore_conformance.layout.fixtures import GENERATION, SHARD, START, Reader, Stored
from topicstore_conformance.oracle import strategies
from topicstore_layouts import table
from topicstore_layouts.table import TableLayout, TableOptions

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions

LARGE = 65_537
RELAXED = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = DuckdbBackend(DuckdbOptions()).open_shard(tmp_path / "shard", KEYSPACES, create=True)
    with contextlib.closing(opened):
        yield opened


@pytest.fixture
def stored(engine: Engine) -> Stored:
    return created(engine)


def created(engine: Engine, generation: int = GENERATION) -> Stored:
    subject = LayoutSubject(make=lambda: TableLayout(TableOptions()), capabilities={"position_order"})
    made = Stored(subject, engine, generation)
    made.create()
    return made


def plain(count: int, size: int = 10) -> list[Message]:
    return [Message("ab"[n % 2], bytes((n % 256,)) * size, "c", 1, False, 0) for n in range(count)]


def change(stored: Stored, statement: str) -> None:
    """Change rows by an SQL statement, bypassing the layout."""
    engine: Any = stored.engine
    writer = engine._writer
    writer.execute(f"USE {engine._name}.main").complete()
    writer.execute(statement).complete()


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_says_what_the_message_says(stored: Stored) -> None:
    """Each field of a message is stored in a typed column of the same name."""
    properties = Properties(content_type="text/plain", user_properties=(("k", "v"), ("k", "w")))
    stored.last = START | 6
    stored.put([Message("a/b", b"\x00\xff", "c", 2, True, 1_700_000_000_000_000, properties)])
    (row,) = stored.engine.sql(
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
    """The table exists before the first message, even after a second generation was created."""
    slabs = created(engine, 1), created(engine, 2)
    assert [{"n": 0}] == engine.sql("SELECT count(*) AS n FROM messages").to_pylist()
    for slab in slabs:
        slab.check()


def test_arrow_stays_arrow(stored: Stored) -> None:
    """Columns that were read, and slices of them, become a record batch without conversion to Python objects."""
    stored.put(plain(50))
    batch = Reader(stored, 0, "#").step(stored.last).batch
    assert MessageBatch.from_arrow(batch.to_arrow(ids=True)).to_messages() == batch.to_messages()
    for part, rows in ((batch, range(50)), (batch[10:20], range(10, 20))):
        payloads = part.to_arrow().column("payload")
        assert isinstance(part.payloads.toarrow(), pa.Array)
        assert [bytes((n,)) * 10 for n in rows] == payloads.to_pylist() == list(part.payloads)


# --- filters ------------------------------------------------------------------------------------


_with_filters = strategies.hostile_topics().flatmap(
    lambda topic: st.tuples(st.just(topic), strategies.filters_of(topic))
)


def test_sql_matches_as_mqtt_does(engine: Engine) -> None:
    """A filter in SQL matches the same topics as an MQTT filter, whatever characters they contain."""
    generations = itertools.count(1)

    @RELAXED
    @given(
        st.lists(_with_filters, min_size=1, max_size=8),
        st.lists(strategies.filters(strategies.hostile_topics()), max_size=4),
    )
    def check(topics: list[tuple[str, str]], filters: list[str]) -> None:
        stored = created(engine, next(generations))
        stored.put([Message(topic, b"") for topic, _ in topics])
        for text in ("#", "+", "+/#", "$SYS/#", *filters, *(own for _, own in topics)):
            stored.check(text)

    check()


@pytest.mark.parametrize("filter_", ["+/" * 200 + "x", "a/" * 150 + "#", "+/" * 30_000 + "+", "#", "+/" * 99 + "#"])
def test_filters_of_many_levels(stored: Stored, filter_: str) -> None:
    """Filters of very many levels match correctly, although SQL compares only their prefix."""
    topics = ["a/" * 200 + "x", "a/" * 150 + "b", "/" * 30_000, "/" * 29_999, "a", "$a/" + "a/" * 199 + "x"]
    stored.put([Message(topic, b"") for topic in topics])
    stored.check(filter_)
    stored.check(filter_, limit=1)
    stored.delete(filter_)
    stored.check_all()


# --- steps --------------------------------------------------------------------------------------


def test_a_deadline_ends_a_read_that_finds_nothing(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that finds nothing before its deadline still makes progress, so that repeated calls see every row."""
    monkeypatch.setattr(table, "_LOOKED_AT", 10)
    stored.put([*plain(95), Message("rare", b"x")])
    reader = Reader(stored, 0, "rare")
    assert stored.rows[-1:] == reader.read(stored.last, deadline=0.0)
    assert [0] * 9 == reader.calls[:9]


# --- large payloads -----------------------------------------------------------------------------


def test_large_payloads_lie_apart(stored: Stored) -> None:
    """A large payload is stored outside its row, and is read and deleted together with the row under any limit."""
    sizes = [LARGE - 1, LARGE, 0, 3 * LARGE, 5, 1]
    stored.put([Message("t", bytes((n,)) * size) for n, size in enumerate(sizes)])
    found = stored.engine.sql("SELECT payload_bytes, payload IS NULL AS apart FROM messages").to_pylist()
    assert [(size, size >= LARGE) for size in sizes] == [(row["payload_bytes"], row["apart"]) for row in found]
    for limits in ({}, {"limit": 1}, {"limit_bytes": 1}, {"limit_bytes": LARGE}):
        stored.check(**limits)  # type: ignore[arg-type]
    stored.delete("t", START + 2, START + 3)
    stored.check_all()
    assert [(DATA, (GENERATION, 0, START + 4))] == [pair[:2] for pair in stored.pairs()]


def test_a_large_payload_deleted_under_a_reader_is_not_damage(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is deleted between the queries of rows and payloads is left out of the read."""
    stored.put([*[Message("t", bytes(LARGE))] * 2, *plain(1)])
    (step,), get_many = list(stored.slab.delete(TopicFilter("t"), 0, stored.rows[0][0])), stored.engine.get_many

    def delete_first(keyspace: Any, keys: Any) -> Any:
        stored.engine.write(step.write)
        return get_many(keyspace, keys)

    monkeypatch.setattr(stored.engine, "get_many", delete_first)
    assert stored.rows[1:] == Reader(stored, 0, "#").read(stored.last)


# --- accounts -----------------------------------------------------------------------------------


def test_bytes_are_counted_the_same_when_they_come_and_when_they_go(stored: Stored) -> None:
    """Deletes report as freed exactly the bytes that the writes reported.

    Texts with several bytes a character and large payloads are included, and every message is counted once.
    """
    messages, counted = [*plain(10), Message("ü/€", b"x" * LARGE, "größe"), Message("ü", b"")], 0
    for _ in range(2):
        write, (batch, rows) = WriteBatch(), stored.place(messages)
        stored.slab.store(batch, write)
        stored.engine.write(write)
        counted, stored.last = counted + write.size, rows[-1][0]
    steps = []
    for text in ("ü/#", "#"):
        for step in stored.slab.delete(TopicFilter(text), 0, stored.last):
            stored.engine.write(step.write)
            steps.append(step)
    assert (24, counted) == (sum(step.messages for step in steps), sum(step.freed for step in steps))
    stored.check_all()


def test_a_delete_looks_at_so_many_rows_a_step(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a delete examines a bounded number of rows, whether they match or not."""
    monkeypatch.setattr(table, "_DELETED", 10)
    stored.put(plain(35))
    assert [5, 5, 5] == stored.commit(stored.slab.delete(TopicFilter("a"), START + 6, START + 35))
    stored.forget("a", START + 6, START + 35)
    stored.check_all()


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    ["shard = 5", "position = 1152921504606846981", "position = 1152921504606847100"],
)
def test_a_row_in_the_wrong_place_is_reported(stored: Stored, what: str) -> None:
    """Readers and verification report a row that belongs to another shard, and rows out of order."""
    stored.put(plain(10))
    change(stored, f"UPDATE messages SET {what} WHERE position = {START + 3}")
    with pytest.raises(CorruptionError, match="shard 4, generation 2"):
        stored.check(bound=START + 1_000)
    ((damage,),) = stored.verify(START + 1_000)[1:]
    assert damage.place.startswith("shard 4, generation 2, message at position")


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
def test_a_row_that_contradicts_itself_is_reported(stored: Stored, what: str) -> None:
    """Verification reports a row whose columns contradict each other, and counts the other rows as intact."""
    stored.put(plain(10))
    change(stored, f"UPDATE messages SET {what} WHERE position = {START + 3}")
    place = f"shard 4, generation 2, message at position {START + 3}"
    good, damages = stored.verify()
    assert place in [damage.place for damage in damages]
    assert 9 == good


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_large_payload_is_reported(stored: Stored, missing: bool) -> None:
    """Readers and verification report a changed or missing large payload; the other messages can be read."""
    stored.put([Message("t", bytes(LARGE)), *plain(3)])
    if missing:
        change(stored, "DELETE FROM data")
    else:
        stored.replace(DATA, (GENERATION, 0, START + 1), bytes(8) + bytes(LARGE))
    place = f"shard 4, generation 2, message at position {START + 1}"
    with pytest.raises(CorruptionError, match=place):
        stored.check()
    good, (damage,) = stored.verify()
    assert (place, 3) == (damage.place, good)
    stored.check(first=START + 2)


def test_an_engine_without_sql_is_refused() -> None:
    """An engine without SQL raises `UnsupportedError` before anything is stored."""
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    TableLayout(TableOptions()).create(engine, SHARD, GENERATION, None, write)
    with pytest.raises(UnsupportedError):
        write.without_rows()
    with pytest.raises(UnsupportedError):
        engine.sql("SELECT 1")
