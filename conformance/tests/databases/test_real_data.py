"""Real messages, imported with their own times, are read back exactly as a filter over the file selects them.

The first half of a data set is in one generation, the second in another. Of the pairs that cover all backends and
layouts, the first gets each data set whole, and the others get one each. Other pairs, backends that aren't persistent,
and layouts that scan everything for every filter get a slice. In the quick mode slices are smaller, and only the first
pair gets whole data sets. ``TOPICSTORE_CONFORMANCE=thorough`` uses whole data sets for every pair, with one shard and
with several.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pyarrow as pa
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.skipping import need, need_data
from topicstore_conformance.conditions.tries import MODE, tries
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects import datasets
from topicstore_conformance.subjects.pairs import Pair, covering, known

BATCH = 2_000
SCANNED, SLICE, LARGE_SLICE = (6_000, 16_000, 60_000) if MODE == "quick" else (20_000, 20_000, None)
COLUMNS = ("timestamp", "topic", "client_id", "qos", "retain", "payload", "shard", "position")
Order = Literal["time"] | None
SHARDS = (1, 3)


@attrs.frozen
class Case:
    """A data set, and the pair and the number of shards of the database that stores it."""

    pair: Pair
    name: str
    shards: int
    rows: int | None = None
    """The number of rows to store, from the middle of the data set on; None: all rows."""

    def __str__(self) -> str:
        return f"{self.pair}-{self.name}-{self.shards}"


def cases() -> list[Case]:
    """Return the cases to test, which in the thorough mode are all combinations."""
    sets = list(zip(datasets.NAMES, SHARDS, strict=True))
    if MODE == "thorough":
        return [Case(pair, name, shards) for pair in known() for name in datasets.NAMES for shards in SHARDS]
    first, *rest = covering("fast_seek")
    found = [Case(first, *each) for each in sets]
    found += [Case(pair, *sets[number % 2], most(pair)) for number, pair in enumerate(rest)]
    others = [pair for pair in known() if pair not in (first, *rest)]
    return found + [Case(pair, *sets[number % 2], SLICE) for number, pair in enumerate(others)]


def marked() -> list[Any]:
    """Return the cases as parameters; cases of further pairs, and of the whole large data set, are marked as slow."""
    found = []
    for case in cases():
        quick = case.pair in covering("fast_seek") and (case.rows is not None or case.name != "bus")
        found.append(pytest.param(case, marks=() if quick else pytest.mark.slow))
    return found


def most(pair: Pair) -> int | None:
    """Return the number of rows to import for a pair that covers a backend or a layout."""
    return LARGE_SLICE if "persistent" in pair.capabilities else SLICE


@attrs.define
class Imported:
    """A database, and the rows of the file from which it was filled."""

    path: Path
    db: ts.Database
    table: pa.Table
    """The rows in order of position, with the expected ``shard``, ``position`` and ``generation``."""
    times: np.ndarray
    """The timestamp of each row, in microseconds."""
    names: list[str]
    topics: np.ndarray
    """The index in ``names`` of each row's topic."""
    alive: np.ndarray
    """Whether each row was not deleted."""

    def rows(self, topic_filter: str, start: int = 0, until: int | None = None) -> np.ndarray:
        """Return a mask of the rows that a filter and a time range select from the file."""
        wanted = np.array([match(topic_filter, topic) for topic in self.names], dtype=bool)
        mask = self.alive & wanted[self.topics] & (self.times >= start)
        return mask if until is None else mask & (self.times < until)

    def expected(self, topic_filter: str, start: int = 0, until: int | None = None) -> pa.Table:
        """Return the rows that a filter and a time range select from the file, in order of time."""
        mask = self.rows(topic_filter, start, until)
        return self.table if mask.all() else self.table.filter(pa.array(mask))

    def reopen(self) -> None:
        """Close the database and open it again, if it is persistent."""
        if self.path.exists():
            self.db.close()
            self.db = ts.open(self.path, auto_compact=False)


def place(table: pa.Table, db: ts.Database) -> pa.Table:
    """Add to each row its generation, its shard and its expected position, assigned one by one."""
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    shards = [db.shard_of(client_id) for client_id in table.column("client_id").to_pylist()]
    last = dict.fromkeys(range(len(db.storage.shards)), 0)
    positions = []
    for shard, time in zip(shards, times, strict=True):
        last[shard] = max(last[shard] + 1, time * 2048)
        positions.append(last[shard])
    generations = 1 + (np.arange(len(times)) >= half(table))
    for name, values, kind in (
        ("generation", generations, pa.int64()),
        ("shard", shards, pa.uint16()),
        ("position", positions, pa.uint64()),
    ):
        table = table.append_column(name, pa.array(values, kind))
    return by_position(table)


def half(table: pa.Table) -> int:
    """Return the index of the second generation's first row, a multiple of the batch size."""
    return table.num_rows // 2 // BATCH * BATCH


def by_position(table: pa.Table) -> pa.Table:
    """Return the rows in order of position, then of shard."""
    positions, shards = table.column("position").to_numpy(), table.column("shard").to_numpy()
    order = np.lexsort((shards, positions))
    return table if bool((np.diff(order) == 1).all()) else table.take(pa.array(order))


@pytest.fixture(scope="module", params=marked(), ids=str)
def imported(request: pytest.FixtureRequest) -> Iterator[Imported]:
    """A data set in a database, which tests must not change."""
    yield from filled(request.param)


@pytest.fixture(params=marked(), ids=str)
def changing(request: pytest.FixtureRequest) -> Iterator[Imported]:
    """A data set in a new database, which the test may change."""
    yield from filled(request.param)


def filled(case: Case) -> Iterator[Imported]:
    """Yield a database filled with the case's data set, and close it afterwards."""
    need(case.pair)
    need_data(f"{case.name}.parquet")
    with quick_directory() as directory:
        data = fill(case, Path(directory, "db"))
        try:
            yield data
        finally:
            data.db.close()


def fill(case: Case, path: Path) -> Imported:
    """Return a database with ``timestamps="message"`` that holds the case's data set in two generations."""
    db = case.pair.open(path, shards=case.shards, timestamps="message", auto_compact=False)
    table = datasets.load(case.name)
    if case.rows is not None or case.pair.scans_all(db):
        table = table.slice(table.num_rows // 2, SCANNED if case.pair.scans_all(db) else case.rows)
    for number, batch in enumerate(table.to_batches(max_chunksize=BATCH)):
        if number * BATCH == half(table):
            db.add_generation()
        db.store(batch)
    table = place(table, db)
    topics = table.column("topic").combine_chunks().dictionary_encode()
    times = table.column("timestamp").cast(pa.int64()).to_numpy()
    alive = np.ones(table.num_rows, dtype=bool)
    return Imported(path, db, table, times, topics.dictionary.to_pylist(), topics.indices.to_numpy(), alive)


# --- comparing --------------------------------------------------------------------------------


def check(
    data: Imported, topic_filter: str, start: int = 0, until: int | None = None, *, batch_size: int = 4096
) -> int:
    """Compare replays in both orders with the file, and small results also as messages; return the number of rows."""
    expected = data.expected(topic_filter, start, until)
    orders: tuple[Order, ...] = ("any", "time")
    for order in orders:
        got = replayed(data, topic_filter, start, until, order, batch_size)
        if order == "any":
            check_order(data, got)
            got = by_position(got)
        for column in COLUMNS:
            assert expected.column(column).equals(got.column(column)), column
        assert expected.num_rows == got.column("properties").null_count
    if expected.num_rows <= BATCH:
        check_messages(data, expected, topic_filter, start, until)
    return expected.num_rows


def replayed(
    data: Imported, topic_filter: str, start: int, until: int | None, order: Order, batch_size: int
) -> pa.Table:
    """Return all rows of a replay, with ids."""
    batches = data.db.replay_arrow(topic_filter, start, until, order=order, batch_size=batch_size, ids=True)
    return pa.Table.from_batches(list(batches), ts.SCHEMA_WITH_IDS)


def check_messages(data: Imported, rows: pa.Table, topic_filter: str, start: int = 0, until: int | None = None) -> None:
    """Compare the messages of a replay with the expected rows."""
    messages = list(data.db.replay(topic_filter, start, until, order="time"))
    assert rows.column("topic").to_pylist() == [message.topic for message in messages]
    assert rows.column("payload").to_pylist() == [message.payload for message in messages]
    assert rows.column("client_id").to_pylist() == [message.client_id for message in messages]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [message.timestamp for message in messages]


def check_order(data: Imported, table: pa.Table) -> None:
    """Check that each publisher's messages of a topic are in order of position, and a shard's generations in order."""
    if not table.num_rows:
        return
    client = table.column("client_id").combine_chunks().dictionary_encode().indices.to_numpy()
    topic = table.column("topic").combine_chunks().dictionary_encode().indices.to_numpy()
    positions, shards = table.column("position").to_numpy(), table.column("shard").to_numpy()
    assert bool((steps(client.astype(np.int64) * 1_000_000 + topic, positions) > 0).all())
    second = data.table.column("generation").to_numpy() == 2
    firsts = np.full(len(data.db.storage.shards), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(
        firsts, data.table.column("shard").to_numpy()[second], data.table.column("position").to_numpy()[second]
    )
    assert bool((steps(shards, positions >= firsts[shards]) >= 0).all())


def steps(of: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the differences between consecutive values in each group; ``of`` has each value's group number."""
    order = np.argsort(of, kind="stable")
    return np.diff(values[order].astype(np.int64))[np.diff(of[order]) == 0]


def topics_by_count(data: Imported) -> list[str]:
    """Return the topics in order of their number of messages, the largest first."""
    counts = data.table.column("topic").value_counts().to_pylist()
    return [entry["values"] for entry in sorted(counts, key=lambda entry: (-entry["counts"], entry["values"]))]


def wildcards(data: Imported) -> list[str]:
    """Return wildcard filters made from the busiest topic and from the median one."""
    topics = topics_by_count(data)
    first, middle = topics[0].split("/"), topics[len(topics) // 2].split("/")
    kept = ["/".join([*levels[:-2], "+", levels[-1]]) for levels in (first, middle)]
    kept.append("/".join(["+"] * (len(middle) - 1) + middle[-1:]))
    return [*kept, "/".join([*first[:-1], "+"]), "/".join([*first[:-1], "#"]), "/".join([*middle[:-1], "+"])]


# --- drawing ----------------------------------------------------------------------------------


def drawn(data: Imported, examples: int) -> None:
    """Check that replays and cursor reads return the messages of the file, for random filters and times."""
    count = len(data.times)

    @settings(COSTLY, max_examples=examples)
    @given(st.data())
    def check_drawn(draw: st.DataObject) -> None:
        topic_filter = draw.draw(st.sampled_from(data.names).flatmap(strategies.filters_of))
        first = draw.draw(st.integers(0, count - 1))
        rows = draw.draw(st.sampled_from((1, 7, count // 500, count // 50)))
        start = int(data.times[first]) + draw.draw(st.sampled_from((0, 0, 1, -1)))
        until: int | None = int(data.times[min(first + rows, count - 1)])
        if draw.draw(st.booleans()) and data.rows(topic_filter, start).sum() < count // 20:
            until = None
        check(data, topic_filter, start, until, batch_size=draw.draw(st.sampled_from((7, 500, 4096, 100_000))))
        follow(data, topic_filter, start, until, draw)

    check_drawn()


def follow(data: Imported, topic_filter: str, start: int, until: int | None, draw: st.DataObject) -> None:
    """Read each stream with cursors that are serialized after each batch, with restarts in between."""
    data.db.replay(topic_filter)  # waits until all stored messages are visible
    positions: list[int] = []
    small = draw.draw(st.lists(st.sampled_from((1, 30, 1_000)), max_size=3))
    for stream in data.db.streams(topic_filter, start):
        saved, ended = data.db.cursor(stream, topic_filter, start).to_bytes(), False
        while not ended:
            result = data.db.read(ts.Cursor.from_bytes(saved), small.pop() if small else 4096, until=until)
            if len(result.batch):
                positions += np.asarray(result.batch.positions).tolist()
            saved, ended = result.cursor.to_bytes(), result.caught_up
            if len(small) == 1:
                data.reopen()
    wanted = data.table.column("position").to_numpy()[data.rows(topic_filter, start, until)]
    assert np.array_equal(np.sort(wanted), np.sort(np.array(positions, dtype=np.uint64)))


# --- as it was stored -------------------------------------------------------------------------


def test_everything(imported: Imported) -> None:
    """A replay of ``#`` yields every row once, as record batches and as messages, and `verify` finds no damage."""
    assert imported.table.num_rows == check(imported, "#")
    check_messages(imported, imported.table, "+/+/#")
    assert (imported.table.num_rows, []) == ((report := imported.db.verify()).messages, report.damages)


def test_filters(imported: Imported) -> None:
    """Replays with wildcard filters, and of the busiest, the median and the rarest topic, yield exactly their rows."""
    topics = topics_by_count(imported)
    for topic_filter in (*wildcards(imported), topics[0], topics[len(topics) // 2], topics[-1]):
        assert 0 < check(imported, topic_filter)


def test_nothing(imported: Imported) -> None:
    """A replay whose filter or time range matches nothing yields nothing and raises no error."""
    last = int(imported.times[-1])
    for topic_filter in ("no/such/topic", "capmetro", "+", "+/+", "+/+/+/+/+", "$SYS/#", "openhomex/#"):
        assert 0 == check(imported, topic_filter)
    assert 0 == check(imported, "#", last + 1)
    assert 0 == check(imported, "#", 0, int(imported.times[0]))
    assert 0 == check(imported, "#", last, last)
    assert 0 == check(imported, "#", last, last - 1)


def test_times(imported: Imported) -> None:
    """Time ranges that begin or end exactly at a message's time, or span two generations, yield exactly their rows."""
    times = imported.times
    begin, end = int(times[len(times) // 2]), int(times[len(times) // 2 + len(times) // 20])
    levels = topics_by_count(imported)[0].split("/")
    for topic_filter in ("#", "/".join([*levels[:-1], "+"]), "/".join(levels)):
        check(imported, topic_filter, begin, end)
        check(imported, topic_filter, begin + 1, end + 1)
        check(imported, topic_filter, begin - 1, begin)
        check(imported, topic_filter, begin, begin + 1)
    assert 0 < check(imported, "#", begin, begin + 1)
    assert 0 < check(imported, "#", int(times[-1]))
    assert 0 < check(imported, "#", 0, int(times[0]) + 1)
    border = int(times[imported.table.column("generation").to_pylist().index(2)])
    assert 0 < check(imported, "#", border - 60_000_000, border + 60_000_000)


def test_streams_are_few(imported: Imported) -> None:
    """Thousands of topics are stored in few streams, whose patterns match the topics in them."""
    streams, topics = imported.db.streams("#"), topics_by_count(imported)
    assert len(streams) <= 2 * max(50, len(topics) // 5) * len(imported.db.storage.shards)
    seen = 0
    for stream in streams[:: max(1, len(streams) // 10)]:
        cursor = imported.db.cursor(stream, "#")
        batch = imported.db.read(cursor, 1_000).batch
        seen += len(batch)
        assert all(match(stream.pattern, topic) for topic in set(batch.topics))
    assert 0 < seen


def test_drawn(imported: Imported) -> None:
    """Replays and cursors with random filters, times, batch sizes and restarts yield exactly the matching rows."""
    drawn(imported, tries(5, 10))


# --- changed ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_compacted_then_deleted(changing: Imported) -> None:
    """Compaction doesn't change reads, and a later delete removes exactly the matching rows."""
    compact(changing)
    delete(changing)


def compact(data: Imported) -> None:
    """Compact the database, compare all rows with the file, and check that earlier cursors are still valid."""
    saved = [data.db.cursor(stream, "#").to_bytes() for stream in data.db.streams("#")]
    if data.db.compact().messages:
        assert data.table.num_rows == check(data, "#")
        for topic_filter in (*wildcards(data)[::3], *topics_by_count(data)[:3]):
            check(data, topic_filter)
        drawn(data, tries(5, 10))
    data.reopen()
    assert data.table.num_rows == data.db.info().messages
    assert 0 < sum(len(data.db.read(ts.Cursor.from_bytes(each)).batch) for each in saved)


def delete(data: Imported) -> None:
    """Delete by topic and by time, and compare the remaining rows before and after another compaction."""
    topics, times = topics_by_count(data), data.times
    middle = int(times[len(times) // 2]), int(times[len(times) // 2 + len(times) // 50])
    spans: list[tuple[Any, ...]] = [(topics[0],), (wildcards(data)[0], *middle), ("#", int(times[-500]))]
    for span in spans:
        gone = data.rows(*span)
        assert int(gone.sum()) == data.db.delete(*span)
        data.alive &= ~gone
        assert 0 == check(data, *span)
    drawn(data, tries(3, 5))
    data.db.compact()
    data.reopen()
    left = int(data.alive.sum())
    assert left == data.db.info().messages == check(data, "#")
    assert (left, []) == ((report := data.db.verify()).messages, report.damages)
