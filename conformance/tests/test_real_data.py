"""Real messages, imported with their own times, come back exactly as a plain filter over the file gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore_conformance import datasets
from topicstore_conformance.checks import quick_directory
from topicstore_conformance.model import match
from topicstore_conformance.pairs import Pair, pairs

BATCH = 5_000
SLICE = 20_000
"""Messages for layouts that scan everything for every filter: the whole sets would take them minutes a pair."""
COLUMNS = ("timestamp", "topic", "client_id", "qos", "retain", "payload")
Order = Literal["time"] | None


@attrs.frozen
class Imported:
    """A database, and the rows of the file that it was filled from."""

    db: ts.Database
    table: pa.Table
    """With the columns ``shard``, ``position`` and ``number`` as they should be."""
    times: np.ndarray
    """Microseconds."""
    names: list[str]
    topics: np.ndarray
    """Of each row the index of its topic in ``names``."""

    def expected(self, topic_filter: str, start: int = 0, until: int | None = None) -> pa.Table:
        """Return the rows that a filter over the file gives, in order of time."""
        wanted = np.array([match(topic_filter, topic) for topic in self.names], dtype=bool)
        mask = wanted[self.topics] & (self.times >= start)
        if until is not None:
            mask &= self.times < until
        if mask.all():
            return self.table
        return self.table.filter(pa.array(mask))


def place(table: pa.Table, db: ts.Database) -> pa.Table:
    """Add to each row its shard and its position, counted one by one."""
    times = table.column("timestamp").cast(pa.int64()).to_pylist()
    shards = [db.shard_of(client_id) for client_id in table.column("client_id").to_pylist()]
    last = dict.fromkeys(range(len(db.shards)), 0)
    positions = []
    for shard, time in zip(shards, times, strict=True):
        last[shard] = max(last[shard] + 1, time * 2048)
        positions.append(last[shard])
    placed = table.append_column("shard", pa.array(shards, pa.uint16()))
    return by_position(placed.append_column("position", pa.array(positions, pa.uint64())))


def by_position(table: pa.Table) -> pa.Table:
    """Return the rows in order of position, then of shard."""
    positions, shards = table.column("position").to_numpy(), table.column("shard").to_numpy()
    order = np.lexsort((shards, positions))
    return table if bool((np.diff(order) == 1).all()) else table.take(pa.array(order))


@pytest.fixture(
    scope="module",
    params=[(pair, name, shards) for pair in pairs() for name in datasets.NAMES for shards in (1, 3)],
    ids=lambda param: "-".join(map(str, param)),
)
def imported(request: pytest.FixtureRequest) -> Iterator[Imported]:
    """A set in a database."""
    pair, name, shards = request.param
    reason = datasets.why_absent(name)
    if reason is not None:
        pytest.skip(reason)
    with quick_directory() as directory, open_empty(pair, Path(directory), shards) as db:
        table = datasets.load(name)
        if pair.scans_all(db):
            table = table.slice(table.num_rows // 2, SLICE)
        for batch in table.to_batches(max_chunksize=BATCH):
            db.store(batch)
        table = place(table, db)
        topics = table.column("topic").combine_chunks().dictionary_encode()
        times = table.column("timestamp").cast(pa.int64()).to_numpy()
        yield Imported(db, table, times, topics.dictionary.to_pylist(), topics.indices.to_numpy())


def open_empty(pair: Pair, directory: Path, shards: int) -> ts.Database:
    """Return a database that takes positions from the messages' own times."""
    return pair.open(directory / "db", shards=shards, timestamps="message")


def check(data: Imported, topic_filter: str, start: int = 0, until: int | None = None) -> int:
    """Compare both orders and both forms of a replay with the file; return how many rows there are."""
    expected = data.expected(topic_filter, start, until)
    orders: tuple[Order, ...] = (None, "time")
    for order in orders:
        batches = list(data.db.replay_arrow(topic_filter, start, until, order=order, ids=True))
        got = pa.Table.from_batches(batches, ts.SCHEMA_WITH_IDS)
        if order is None:
            check_order(got)
            got = by_position(got)
        for column in (*COLUMNS, "shard", "position"):
            assert expected.column(column).equals(got.column(column)), column
        assert expected.num_rows == got.column("properties").null_count
    if expected.num_rows > SLICE:
        return expected.num_rows  # as messages, `test_everything` reads them once
    rows = pa.Table.from_batches(batches, ts.SCHEMA_WITH_IDS)
    check_messages(data, rows, topic_filter, start, until)
    return expected.num_rows


def check_messages(data: Imported, rows: pa.Table, topic_filter: str, start: int = 0, until: int | None = None) -> None:
    """Compare what a replay gives as messages with what it gave as record batches."""
    messages = list(data.db.replay(topic_filter, start, until, order="time"))
    assert rows.column("topic").to_pylist() == [message.topic for message in messages]
    assert rows.column("payload").to_pylist() == [message.payload for message in messages]
    assert rows.column("client_id").to_pylist() == [message.client_id for message in messages]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [message.timestamp for message in messages]


def check_order(table: pa.Table) -> None:
    """Each publisher's messages of each topic come in order of position."""
    if not table.num_rows:
        return
    client = table.column("client_id").combine_chunks().dictionary_encode().indices.to_numpy()
    topic = table.column("topic").combine_chunks().dictionary_encode().indices.to_numpy()
    of = client.astype(np.int64) * 1_000_000 + topic
    by_publisher = np.argsort(of, kind="stable")
    same = np.diff(of[by_publisher]) == 0
    steps = np.diff(table.column("position").to_numpy()[by_publisher].astype(np.int64))
    assert bool((steps[same] > 0).all())


def topics_by_count(data: Imported) -> list[str]:
    """Return the topics, the busiest first."""
    counts = data.table.column("topic").value_counts().to_pylist()
    return [entry["values"] for entry in sorted(counts, key=lambda entry: (-entry["counts"], entry["values"]))]


def test_everything(imported: Imported) -> None:
    """``#`` and ``+/+/#`` give every row once, as record batches and as messages; verification finds it whole."""
    assert imported.table.num_rows == check(imported, "#")
    assert imported.table.num_rows == check(imported, "+/+/#")
    check_messages(imported, imported.table, "#")
    assert (imported.table.num_rows, []) == ((report := imported.db.verify()).messages, report.damages)


def test_wildcards(imported: Imported) -> None:
    """One level kept and the others free, each level but the first in turn."""
    topics = topics_by_count(imported)
    wanted = set()
    for topic in (topics[0], topics[len(topics) // 2], topics[-1]):
        levels = topic.split("/")
        wanted.add("/".join([*levels[:-2], "+", levels[-1]]))
        wanted.add("/".join(["+"] * (len(levels) - 1) + levels[-1:]))
        wanted.add("/".join([*levels[:-1], "+"]))
        wanted.add("/".join([*levels[:-1], "#"]))
    for topic_filter in sorted(wanted):
        assert 0 < check(imported, topic_filter)


def test_named_filters(imported: Imported) -> None:
    """A route, and some vehicles over all their routes, as people ask for them."""
    vehicles = {topic.rsplit("/", 1)[1] for topic in topics_by_count(imported)[:200:50]}
    for topic_filter in ("capmetro/vp/801/+", *(f"capmetro/vp/+/{vehicle}" for vehicle in sorted(vehicles))):
        check(imported, topic_filter)


def test_exact_topics(imported: Imported) -> None:
    """The busiest topic, the median one and the rarest."""
    topics = topics_by_count(imported)
    for topic in (topics[0], topics[len(topics) // 2], topics[-1]):
        assert 0 < check(imported, topic)


def test_nothing(imported: Imported) -> None:
    """Filters and times that match nothing give nothing, and no error."""
    last = int(imported.times[-1])
    for topic_filter in ("no/such/topic", "capmetro", "+", "+/+", "+/+/+/+/+", "$SYS/#", "openhomex/#"):
        assert 0 == check(imported, topic_filter)
    assert 0 == check(imported, "#", last + 1)
    assert 0 == check(imported, "#", 0, int(imported.times[0]))
    assert 0 == check(imported, "#", last, last)
    assert 0 == check(imported, "#", last, last - 1)


def test_times(imported: Imported) -> None:
    """Ranges that begin and end on a message's very time: inclusive and exclusive."""
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
    assert imported.table.num_rows == sum(
        batch.num_rows for batch in imported.db.replay_arrow("#", int(times[0]), int(times[-1]) + 1)
    )


def test_streams_are_few(imported: Imported) -> None:
    """Thousands of topics make few streams, whose patterns match what they hold."""
    streams, topics = imported.db.streams("#"), topics_by_count(imported)
    assert len(streams) <= max(50, len(topics) // 5) * len(imported.db.shards)
    seen = 0
    for stream in streams[:: max(1, len(streams) // 10)]:
        iterator = imported.db.iterate(stream, "#")
        batch = imported.db.next(iterator, 1_000).batch
        seen += len(batch)
        assert all(match(stream.pattern, topic) for topic in set(batch.topics))
    assert 0 < seen
