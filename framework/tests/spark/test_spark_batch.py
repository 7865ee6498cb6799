"""Batch writes and reads with Spark: every reader gets the rows that were written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need

from .conftest import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

ALONE = ("duckdb", "leveldb")
"""Backends whose databases only one process can open at a time."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST = 1_700_000_000_000_000
PROPERTIES = ts.Properties(
    payload_format_indicator=1,
    message_expiry_interval=4_000_000_000,
    content_type="text/plain",
    response_topic="answers",
    correlation_data=b"\0\1",
    user_properties=(("a", "1"), ("a", "2")),
)


def frame(spark: SparkSession, messages: Iterable[ts.Message], partitions: int = 1) -> DataFrame:
    """Return messages as a data frame of Spark, in their order."""
    return spark.createDataFrame(table(messages)).coalesce(partitions)


def table(*parts: Iterable[ts.Message]) -> pa.Table:
    """Return messages as an Arrow table, with the types that Spark supports."""
    from topicstore.spark.schema import MESSAGES, Shape

    shape = Shape(MESSAGES)
    return pa.Table.from_batches([shape.of(ts.MessageBatch.from_messages(part).to_arrow()) for part in parts])


def save(frame: DataFrame, path: Path, **options: Any) -> None:
    frame.write.format("topicstore").options(**options).mode("append").save(str(path))


def plan(frame: DataFrame) -> None:
    """Make Spark plan the reads of a later action on the same data frame."""
    frame._jdf.queryExecution().toRdd().getNumPartitions()


def messages_of(frame: DataFrame) -> list[ts.Message]:
    return ts.MessageBatch.concat([ts.MessageBatch.from_arrow(b) for b in frame.toArrow().to_batches()]).to_messages()


def counted(messages: Iterable[ts.Message]) -> Counter[str]:
    return Counter(map(repr, messages))


def by_publisher(messages: Iterable[ts.Message]) -> dict[tuple[str, str], list[ts.Message]]:
    lists: dict[tuple[str, str], list[ts.Message]] = {}
    for message in messages:
        lists.setdefault((message.client_id, message.topic), []).append(message)
    return lists


def by_topic(table: pa.Table) -> pa.Table:
    """Return rows sorted by topic and publisher, and otherwise in their original order."""
    table = table.select(ts.SCHEMA.names[:-1]).cast(pa.schema(list(ts.SCHEMA)[:-1])).combine_chunks()
    codes = [pc.rank(table[name], tiebreaker="dense").to_numpy() for name in ("client_id", "topic")]
    return table.take(np.lexsort(codes))


def numbered(count: int, first: int = 0) -> list[ts.Message]:
    """Return one message for each second, from ten publishers in turn and with thirty topics."""
    return [
        ts.Message(
            f"fleet/{'eu' if n % 2 else 'us'}/bus-{n % 10}/{n % 3}",
            b"%09d" % n,
            f"bus-{n % 10}",
            timestamp=FIRST + n * 1_000_000,
        )
        for n in range(first, first + count)
    ]


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.payload)) for row in frame.select("payload").collect())


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of 1,000 messages in two generations and three shards, with positions from the messages' times."""
    path = tmp_path_factory.mktemp("there") / "db"
    with ts.open(path, shards=3, timestamps="message") as db:
        db.store(numbered(600))
        db.add_generation()
        db.store(numbered(400, 600))
    return path


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[str]:
    """Return the name of a source with condition pushdown; its tests query each data frame only once."""
    from topicstore.spark.pushdown import ENABLED
    from topicstore.spark.source import PushingSource

    class Pushing(PushingSource):
        @classmethod
        def name(cls) -> str:
            return "pushing"

    spark.dataSource.register(Pushing)
    before = str(spark.conf.get(ENABLED))
    spark.conf.set(ENABLED, "true")
    yield Pushing.name()
    spark.conf.set(ENABLED, before)


@pytest.fixture
def dying_source(spark: SparkSession, dying: Callable[..., Iterator[Any]]) -> str:
    """Return the name of a source in which one task is killed in the middle of its rows."""
    from topicstore.spark import TopicstoreSource, reading, staging
    from topicstore.spark.options import ReadSettings, WriteSettings
    from topicstore.spark.reading import TopicstoreReader
    from topicstore.spark.sink import TopicstoreWriter

    class DyingReader(TopicstoreReader):
        def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(reading, "_BATCH", 1_000)
                yield from dying(super().read(partition))

    class DyingWriter(TopicstoreWriter):
        def write(self, cursor: Iterator[pa.RecordBatch]) -> Any:
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(staging, "_RUN", 1_000)
                return super().write(dying(cursor))

    class DyingSource(TopicstoreSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def reader(self, schema: Any) -> DyingReader:
            return DyingReader(ReadSettings.of(self.options), schema)

        def writer(self, schema: Any, overwrite: bool) -> DyingWriter:
            return DyingWriter(WriteSettings.of(self.options, overwrite=overwrite))

    spark.dataSource.register(DyingSource)
    return DyingSource.name()


# --- agreement --------------------------------------------------------------------------


def test_everybody_reads_what_spark_wrote(spark: SparkSession, real: Path, tmp_path: Path) -> None:
    """Spark, the Python API and the command line read the same rows that were written, in each publisher's order."""
    path, copy = tmp_path / "db", tmp_path / "replayed.parquet"
    save(spark.read.parquet(str(real)), path, shards=3)
    source = by_topic(pq.read_table(real))
    with ts.open(path) as db:
        assert db.manifest.timestamps == "message"
        assert source.equals(by_topic(pa.Table.from_batches(list(db.replay_arrow("#")), ts.SCHEMA)))
    assert source.equals(by_topic(load(spark, path).toArrow()))
    subprocess.run([sys.executable, "-m", "topicstore.cli", "replay", str(path), "--output", str(copy)], check=True)
    assert source.equals(by_topic(pq.read_table(copy)))


def test_all_columns_survive(spark: SparkSession, tmp_path: Path) -> None:
    """All columns survive a round trip, including empty payloads and client ids, with or without properties."""
    messages = [
        ts.Message("a/b", b"", "", 0, False, FIRST, None),
        ts.Message("ä//", b"\0\xff", "c", 2, True, FIRST + 1, PROPERTIES),
        ts.Message("a/b", b"x", "d", 1, False, FIRST + 2, ts.Properties()),
    ]
    save(frame(spark, messages), tmp_path / "db", shards=2)
    assert counted(messages) == counted(messages_of(load(spark, tmp_path / "db")))
    with ts.open(tmp_path / "db") as db:
        assert counted(messages) == counted(db.replay("#"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ALONE)
def test_other_backends(spark: SparkSession, tmp_path: Path, backend: str) -> None:
    """Backends that only one process can open are written and read by one task at a time."""
    need(backend)
    save(frame(spark, numbered(500)), tmp_path / "db", backend=backend, shards=3)
    frame_ = load(spark, tmp_path / "db")
    assert numbers(frame_) == list(range(500))
    assert frame_.rdd.getNumPartitions() == 1


def test_an_empty_database_and_an_empty_write(spark: SparkSession, tmp_path: Path) -> None:
    """An empty write creates the database, stores nothing, and leaves no staging directory."""
    save(frame(spark, numbered(3)).where("qos > 2"), tmp_path / "db", shards=2)
    assert numbers(load(spark, tmp_path / "db")) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


def test_rows_are_stored_in_order(spark: SparkSession, tmp_path: Path) -> None:
    """Rows are stored in order of timestamps, then partitions, then rows; rows without a timestamp come last."""
    same = [ts.Message("a", b"%d" % n, "c", timestamp=FIRST + n // 100) for n in range(1000)]
    untimed = [ts.Message("a", b"untimed", "c")]
    save(spark.createDataFrame(table(untimed, same[::-1])).coalesce(1), tmp_path / "db")
    with ts.open(tmp_path / "db") as db:
        stored = [message.payload for message in db.replay("#", order="time")]
    expected = [b"%d" % (t * 100 + n) for t in range(10) for n in reversed(range(100))]
    assert stored == [*expected, b"untimed"]


@pytest.mark.slow
def test_spark_finds_the_source_by_itself(spark: SparkSession, there: Path) -> None:
    """A new session finds the data source without registering it."""
    assert spark.newSession().read.format("topicstore").load(str(there)).count() == 1_000


# --- what is read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("topic = 'fleet/eu/bus-1/1'", lambda m: m.topic == "fleet/eu/bus-1/1"),
        ("topic in ('fleet/eu/bus-1/1', 'no/such')", lambda m: m.topic == "fleet/eu/bus-1/1"),
        ("topic like 'fleet/eu/b%' and topic like '%2'", lambda m: m.topic[6:8] + m.topic[-1] == "eu2"),
        ("client_id = 'bus-7'", lambda m: m.client_id == "bus-7"),
        ("client_id in ('bus-7', 'bus-8') and qos = 0", lambda m: m.client_id in ("bus-7", "bus-8")),
        ("timestamp >= timestamp_micros(1700000500000000)", lambda m: m.timestamp >= FIRST + 500_000_000),
        ("timestamp < timestamp_micros(1700000500000000)", lambda m: m.timestamp < FIRST + 500_000_000),
        ("timestamp = timestamp_micros(1700000500000000)", lambda m: m.timestamp == FIRST + 500_000_000),
        ("topic is null or client_id <=> null", lambda _: False),
        ("not topic = 'fleet/eu/bus-1/1'", lambda m: m.topic != "fleet/eu/bus-1/1"),
    ],
)
def test_conditions(
    spark: SparkSession,
    there: Path,
    whole: DataFrame,
    pushing: str,
    condition: str,
    expected: Callable[[ts.Message], bool],
) -> None:
    """Conditions select the same rows with and without pushdown."""
    found = [numbers(frame.where(condition)) for frame in (whole, spark.read.format(pushing).load(str(there)))]
    assert found == [[n for n, message in enumerate(numbered(1000)) if expected(message)]] * 2


@pytest.fixture(scope="module")
def whole(spark: SparkSession, there: Path) -> DataFrame:
    """A data frame of all messages, which several tests share."""
    return load(spark, there)


@pytest.mark.parametrize("push_down", ["true", "false"])
def test_a_condition_holds_for_its_own_query(spark: SparkSession, tmp_path: Path, push_down: str) -> None:
    """A condition on a data frame doesn't affect its other queries, views, or the other side of a union or join."""
    from topicstore.spark.pushdown import ENABLED

    before = str(spark.conf.get(ENABLED))
    spark.conf.set(ENABLED, push_down)
    try:
        with ts.open(tmp_path / "db", shards=2) as db:
            db.store([ts.Message(t, b"1", f"c{n % 5}") for n, t in enumerate(["a/1", "a/2", "b/1", "c"] * 25)])
            all_ = load(spark, tmp_path / "db")
            all_.createOrReplaceTempView("messages")
            some = all_.where("topic = 'c'")
            assert [some.count(), all_.count(), spark.table("messages").count()] == [25, 100, 100]
            assert some.union(all_.where("topic = 'b/1'")).count() == 50
            assert some.alias("x").join(all_.alias("y"), "client_id").count() == 500
            assert [all_.where(f"topic like '{pattern}'").count() for pattern in ("b/%", "a__")] == [25, 50]
            db.store([ts.Message("new", b"2", "c1")] * 10)
            db.add_generation()
            db.store([ts.Message("new", b"2", "c2")] * 10)
            view, new = spark.table("messages"), "topic = 'new'"
            assert [one.count() for one in (all_, view, all_.where(new), view.where(new))] == [120, 120, 20, 20]
    finally:
        spark.conf.set(ENABLED, before)


@pytest.mark.slow
def test_pushes_down_only_where_conditions_stay_apart(spark: SparkSession, there: Path, pushing: str) -> None:
    """`conditions_stay_apart` and `can_push_down` agree with the behaviour of a union of two conditions."""
    from topicstore.spark.pushdown import can_push_down, conditions_stay_apart

    messages = spark.read.format(pushing).load(str(there))
    one, other = (messages.where(f"client_id = 'bus-{n}'") for n in (7, 8))
    apart = [one.union(other).count(), messages.count()] == [200, 1000]
    assert [apart, apart] == [conditions_stay_apart(spark), can_push_down(spark)]


def test_options_and_ids(spark: SparkSession, there: Path) -> None:
    """Options select by filter, time range and ids, and conditions on ids work, too."""
    with ts.open(there, mode="r") as db:
        batches = db.replay_arrow("fleet/eu/+/1", FIRST + 100_000_000, FIRST + 700_000_000, ids=True)
        expected = {(row["shard"], row["position"]) for batch in batches for row in batch.to_pylist()}
    end = (EPOCH + timedelta(microseconds=FIRST + 700_000_000)).isoformat()
    frame_ = load(spark, there, filter="fleet/eu/+/1", start=f"{FIRST + 100_000_000}", until=end, ids="true")
    found = {(row.shard, row.position) for row in frame_.collect()}
    assert found == expected
    middle = sorted(position for _, position in expected)[len(expected) // 2]
    narrowed = frame_.where(f"position > {middle} and shard = 1").select("shard", "position").collect()
    assert {tuple(row) for row in narrowed} == {pair for pair in expected if pair[1] > middle and pair[0] == 1}


@pytest.mark.slow
def test_by_timestamp(spark: SparkSession, tmp_path: Path) -> None:
    """With ``by="timestamp"``, ``start`` and ``until`` select late messages by their timestamps.

    Without it they select by position; conditions on the column ``timestamp`` always use timestamps.
    """
    late = [m if n % 3 else msgspec.structs.replace(m, timestamp=FIRST) for n, m in enumerate(numbered(60))]
    with ts.open(tmp_path / "db", shards=2) as db:
        for batch in (late[:30], late[30:]):
            db.store(batch)
            db.add_generation()
    wanted = [n for n, message in enumerate(late) if message.timestamp == FIRST]
    bounds = {"start": f"{FIRST}", "until": f"{FIRST + 1}"}
    assert numbers(load(spark, tmp_path / "db", by="timestamp", **bounds)) == wanted
    assert numbers(load(spark, tmp_path / "db", **bounds)) == []
    whole = load(spark, tmp_path / "db")
    assert numbers(whole.where(f"timestamp <= timestamp_micros({FIRST})")) == wanted
    assert numbers(whole.where(f"timestamp in (timestamp_micros({FIRST}), timestamp_micros(5))")) == wanted
    assert numbers(whole.where(f"timestamp > timestamp_micros({FIRST})")) == sorted(set(range(60)) - set(wanted))
    assert numbers(whole.where("timestamp < timestamp_micros(5)")) == []
    with pytest.raises(Exception, match="it is position or timestamp, not time"):
        load(spark, tmp_path / "db", by="time").collect()


@pytest.mark.slow
def test_only_what_may_match_is_read(spark: SparkSession, there: Path, pushing: str) -> None:
    """Conditions on client ids, shards, times and topics reduce the partitions that are read."""
    from pyspark.sql.datasource import (
        EqualTo,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
        StringStartsWith,
    )
    from topicstore.contract.replay_plan import TimeRange
    from topicstore.spark.options import Selection
    from topicstore.storage.directory.manifest import existing_manifest

    manifest = existing_manifest(there)
    late = "timestamp > timestamp_micros(1700000800000000) and client_id = 'bus-7'"
    for condition, partitions in (("true", 6), ("client_id = 'bus-7'", 2), (late, 1)):
        narrowed_frame = spark.read.format(pushing).options(minPartitions=9).load(str(there)).where(condition)
        assert narrowed_frame.rdd.getNumPartitions() == partitions
    chosen = Selection(filters=("fleet/+/bus-1/#",)).narrowed(
        [StringStartsWith(("topic",), "fleet/eu/bus"), In(("shard",), (0, 2)), EqualTo(("shard",), 2)], manifest
    )
    assert chosen == Selection(filters=("fleet/eu/bus-1/#",), shards=frozenset((2,)))
    assert chosen.narrowed([EqualTo(("topic",), "fleet/us/bus-1/0")], manifest).empty
    since = chosen.narrowed([GreaterThanOrEqual(("timestamp",), EPOCH + timedelta(seconds=1))], manifest)
    assert since.first == 1_000_000 << 11
    moment = [EPOCH + timedelta(microseconds=FIRST + at) for at in (0, 5)]
    narrowed = Selection().narrowed(
        [GreaterThan(("timestamp",), moment[0]), LessThan(("timestamp",), moment[1])], manifest
    )
    assert narrowed.timestamps == TimeRange(FIRST, FIRST + 5)
    assert Selection().narrowed([In(("timestamp",), tuple(moment))], manifest).timestamps == TimeRange(FIRST, FIRST + 6)
    assert narrowed.narrowed([LessThanOrEqual(("timestamp",), moment[0])], manifest).timestamps == TimeRange(
        FIRST, FIRST + 1
    )


@pytest.mark.slow
def test_without_push_down(spark: SparkSession, there: Path, pushing: str) -> None:
    """A source with pushdown also works in a session without pushdown, in which Spark applies the conditions."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    assert len(numbers(spark.read.format(pushing).load(str(there)).where("client_id = 'bus-7'"))) == 100


def test_ranges_of_several_shards_share_a_task(spark: SparkSession, there: Path) -> None:
    """As many tasks read as the session runs at a time, or as ``minPartitions`` says, whatever the number of shards."""
    assert spark.sparkContext.defaultParallelism == 2
    for options, tasks in (({}, 2), ({"minPartitions": 1}, 1), ({"minPartitions": 4}, 4), ({"minPartitions": 99}, 6)):
        frame_ = load(spark, there, **options)
        assert frame_.rdd.getNumPartitions() == tasks
        assert frame_.rdd.map(lambda row: int(bytes(row.payload))).sum() == sum(range(1_000))


@pytest.mark.slow
def test_a_schema_chooses_columns(spark: SparkSession, there: Path) -> None:
    """A schema chooses columns and their order, also shard and position."""
    columns = "payload binary, shard int, timestamp timestamp"
    frame_ = spark.read.format("topicstore").schema(columns).load(str(there))
    assert frame_.columns == ["payload", "shard", "timestamp"]
    assert numbers(frame_) == list(range(1000))


@pytest.mark.slow
def test_reads_beside_a_writer(spark: SparkSession, tmp_path: Path) -> None:
    """A query, even one planned before, reads all messages up to ``until`` that are committed before it begins."""
    with ts.open(tmp_path / "db", shards=2, timestamps="message") as db:
        db.store(numbered(100))
        planned, bounded = load(spark, tmp_path / "db"), load(spark, tmp_path / "db", until=FIRST + 150 * 1_000_000)
        plan(planned)
        plan(bounded)
        db.store(numbered(100, 100))
        assert numbers(planned) == list(range(200))
        assert numbers(bounded) == list(range(150))


# --- workers that die, and tries that are repeated --------------------------------------


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_write(spark: SparkSession, tmp_path: Path, dying_source: str) -> None:
    """A killed writing task is repeated, and every row is stored once."""
    rows = frame(spark, numbered(40_000))
    rows.write.format(dying_source).option("shards", 3).mode("append").save(str(tmp_path / "db"))
    with ts.open(tmp_path / "db", mode="r") as db:
        assert sorted(int(message.payload) for message in db.replay("#")) == list(range(40_000))
    assert not (tmp_path / ".db.staging").exists()


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_read(spark: SparkSession, tmp_path: Path, dying_source: str) -> None:
    """A killed reading task is repeated, and every row is returned once."""
    with ts.open(tmp_path / "db", shards=1, timestamps="message") as db:
        db.store(numbered(5_000))
    assert numbers(spark.read.format(dying_source).load(str(tmp_path / "db"))) == list(range(5_000))


@pytest.mark.slow
def test_the_same_batch_of_a_writer_is_stored_once(spark: SparkSession, tmp_path: Path) -> None:
    """A writer's batch is stored only if its number is higher than the numbers of that writer's stored batches."""
    for batch in (4, 4, 3, 5):
        save(frame(spark, numbered(10, 10 * batch)), tmp_path / "db", writer="job", batch=batch, late="lift")
    save(frame(spark, numbered(10, 90)), tmp_path / "db", writer="another", batch=0)
    assert numbers(load(spark, tmp_path / "db")) == [*range(40, 60), *range(90, 100)]


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_commit(spark: SparkSession, tmp_path: Path) -> None:
    """If the driver's commit is killed, the write fails; when it is repeated, every row is stored once."""
    from topicstore.spark import TopicstoreSource, promotion
    from topicstore.spark.options import WriteSettings
    from topicstore.spark.sink import TopicstoreWriter

    class DyingWriter(TopicstoreWriter):
        def commit(self, messages: Any) -> None:
            def store(self: Any, parts: Any, _store: Any = promotion.CommitJob._store_parts) -> None:
                _store(self, parts)
                os.kill(os.getpid(), signal.SIGKILL)

            promotion.CommitJob._store_parts = store  # type: ignore[method-assign]
            promotion._ROWS = 3_000
            super().commit(messages)

    class DyingSource(TopicstoreSource):
        @classmethod
        def name(cls) -> str:
            return "dying in its commit"

        def writer(self, schema: Any, overwrite: bool) -> DyingWriter:
            return DyingWriter(WriteSettings.of(self.options, overwrite=overwrite))

    spark.dataSource.register(DyingSource)
    rows, writing = frame(spark, numbered(20_000)), {"shards": 3}
    with pytest.raises(Exception, match=r"."):
        rows.write.format(DyingSource.name()).options(**writing).mode("append").save(str(tmp_path / "db"))
    assert 0 < len(numbers(load(spark, tmp_path / "db"))) < 20_000
    save(rows.repartition(3), tmp_path / "db")
    assert numbers(load(spark, tmp_path / "db")) == list(range(20_000))
    save(frame(spark, numbered(10, 20_000)), tmp_path / "db")
    assert numbers(load(spark, tmp_path / "db")) == list(range(20_010))
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


# --- errors -----------------------------------------------------------------------------


def fails(error: str, action: Callable[[], object]) -> None:
    """Check that an action raises an error whose text matches `error`."""
    with pytest.raises(Exception, match=error):
        action()


@pytest.mark.slow
def test_refused_where_a_writer_is_open(spark: SparkSession, tmp_path: Path) -> None:
    """A write to an open database raises `DatabaseLockedError`, which names the holder, and stores nothing."""
    with ts.open(tmp_path / "db", timestamps="message") as db:
        fails("DatabaseLockedError.*process", lambda: save(frame(spark, numbered(5)), tmp_path / "db"))
        assert list(db.replay("#")) == []
    save(frame(spark, numbered(5)), tmp_path / "db")
    with ts.open(tmp_path / "db") as db:
        assert len(list(db.replay("#"))) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ALONE)
def test_no_reader_beside_a_writer(spark: SparkSession, tmp_path: Path, backend: str) -> None:
    """Reading beside a writer raises `DatabaseLockedError` with the reason, if the backend doesn't allow it."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend):
        says = "DatabaseLockedError.*one process has a database at a time"
        fails(says, lambda: load(spark, tmp_path / "db").collect())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"filter": "a/#/b"}, "InvalidFilterError"),
        ({"start": "yesterday"}, "InvalidArgumentError.*start"),
        ({"ids": "maybe"}, "InvalidArgumentError.*ids"),
        ({"maxMessagesPerTrigger": "0"}, "InvalidArgumentError.*maxMessagesPerTrigger"),
        ({"filtr": "a/#"}, "InvalidArgumentError.*'filtr'.*Did you mean 'filter'"),
        ({"from": "now"}, "InvalidArgumentError.*'from'.*start, until"),
    ],
)
def test_bad_options_of_reading(spark: SparkSession, there: Path, options: dict[str, str], error: str) -> None:
    fails(error, lambda: load(spark, there, **options).collect())


@pytest.mark.slow
def test_bad_reads(spark: SparkSession, there: Path, tmp_path: Path) -> None:
    """Reading without a path, a missing database, and unknown or wrongly typed columns are refused."""
    fails("InvalidArgumentError.*directory", lambda: spark.read.format("topicstore").load().collect())
    fails("DatabaseNotFoundError", lambda: load(spark, tmp_path / "none").collect())
    assert not (tmp_path / "none").exists()
    reader = spark.read.format("topicstore")
    fails("InvalidArgumentError.*speed", lambda: reader.schema("speed int").load(str(there)).collect())
    fails("InvalidArgumentError.*qos", lambda: reader.schema("qos string").load(str(there)).collect())


@pytest.mark.slow
def test_bad_writes(spark: SparkSession, tmp_path: Path) -> None:
    """Invalid writes are refused with a reason; no row is stored, and no file is left."""
    path, good = tmp_path / "db", frame(spark, numbered(5))
    save(good, path, shards=2)
    renamed = good.withColumnRenamed("payload", "body")
    ahead = [ts.Message("a", b"", timestamp=4_000_000_000_000_000)]
    fails("InvalidMessageError.*body", lambda: save(renamed, path))
    fails("InvalidMessageError.*wildcard", lambda: save(good.selectExpr("'a/+' as topic", "payload"), path))
    fails("InvalidMessageError.*null", lambda: save(good.selectExpr("cast(null as string) as topic", "payload"), path))
    fails("LateMessageError", lambda: save(good, path))
    fails("TimestampAheadError", lambda: save(frame(spark, [*numbered(5, 50), *ahead]), path))
    fails("ManifestMismatchError.*shards", lambda: save(frame(spark, numbered(5, 50)), path, shards=3))
    fails("UnknownPluginError", lambda: save(good, tmp_path / "other", backend="nosuch"))
    fails("InvalidArgumentError.*writer", lambda: save(good, path, batch=1))
    fails("InvalidArgumentError.*shards", lambda: save(good, path, shards="many"))
    fails("InvalidArgumentError.*Did you mean 'backend'", lambda: save(good, path, backends="rocksdb"))
    overwriting = good.write.format("topicstore").mode("overwrite")
    fails("append", lambda: overwriting.save(str(path)))
    assert numbers(load(spark, path)) == list(range(5))
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


@pytest.mark.slow
def test_what_was_dropped_under_a_query(spark: SparkSession, tmp_path: Path) -> None:
    """A generation that is dropped after planning makes the query fail."""
    with ts.open(tmp_path / "db", timestamps="message") as db:
        db.store(numbered(10))
        db.add_generation()
        db.store(numbered(10, 10))
        planned = load(spark, tmp_path / "db")
        plan(planned)
        db.drop_generation(1)
        fails("GenerationDroppedError", planned.collect)
        assert numbers(load(spark, tmp_path / "db")) == list(range(10, 20))
