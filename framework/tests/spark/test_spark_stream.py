"""Streaming with Spark: no message is lost or repeated, also across restarts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

FIRST = 1_700_000_000_000_000


def numbered(count: int, first: int = 0) -> list[ts.Message]:
    return [
        ts.Message(f"a/{n % 7}", b"%09d" % n, f"c{n % 10}", timestamp=FIRST + n * 1_000_000)
        for n in range(first, first + count)
    ]


def copy(spark: SparkSession, source: Path, target: Path, **options: Any) -> StreamingQuery:
    """Copy all available messages from one database to another, and return the finished query."""
    reading = spark.readStream.format("topicstore").options(**options).load(str(source))
    writing = reading.writeStream.format("topicstore").option("shards", 2).option("path", str(target))
    query = writing.option("checkpointLocation", f"{target}.checkpoint").trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE), "the copy has not ended"
    return query


def rows(query: StreamingQuery) -> list[int]:
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def numbers(path: Path) -> list[int]:
    with ts.open(path, mode="r") as db:
        return sorted(int(message.payload) for message in db.replay("#"))


def test_a_stream_continues_after_restarts(spark: SparkSession, tmp_path: Path) -> None:
    """A stream reads bounded batches beside a writer, and continues after restarts, compactions and new generations."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, shards=3, timestamps="message") as db:
        db.store(numbered(250))
        first = copy(spark, source, target, maxMessagesPerTrigger=100)
        assert rows(first) == [100, 100, 50]
        assert numbers(target) == list(range(250))
        db.compact()
        db.store(numbered(100, 250))
        db.add_generation()
        db.store(numbered(100, 350))
        second = copy(spark, source, target)
        assert rows(second) == [200]
        assert numbers(target) == list(range(450))
        assert rows(copy(spark, source, target)) == []
        db.drop_generation(1)  # the stream has read all messages of this generation
        db.store(numbered(50, 450))
        copy(spark, source, target)
        assert numbers(target) == list(range(500))


@pytest.mark.slow
def test_a_place_in_another_database_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A stream whose database was replaced by another at the same path is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, timestamps="message") as db:
        db.store(numbered(10, 1_000))
    copy(spark, source, target)
    shutil.rmtree(source)
    with ts.open(source, timestamps="message") as db:
        db.store(numbered(10))
    with pytest.raises(Exception, match=r"WrongDatabaseError.*new checkpoint"):
        copy(spark, source, target)
    assert numbers(target) == list(range(1_000, 1_010))


def test_an_offset_names_its_database(tmp_path: Path) -> None:
    """Every call refuses an offset of another database, or one without a database."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from topicstore.spark import TopicstoreSource

    offsets = []
    for name in ("one", "other"):
        with ts.open(tmp_path / name, shards=2) as db:
            db.store(numbered(10))
        source = TopicstoreSource({"path": str(tmp_path / name)})
        reader = source.streamReader(source.schema())
        begin = reader.initialOffset()
        end = reader.latestOffset(begin, ReadAllAvailable())
        assert len(reader.partitions(begin, end)) > 0
        offsets += [begin, end]
    without = {number: place for number, place in offsets[3].items() if number != "database"}
    for wrong in (offsets[1], without):
        with pytest.raises(ts.WrongDatabaseError):
            reader.latestOffset(wrong, ReadAllAvailable())
        with pytest.raises(ts.WrongDatabaseError):
            reader.partitions(offsets[2], wrong)
        with pytest.raises(ts.WrongDatabaseError):
            reader.partitions(wrong, offsets[3])


@pytest.mark.parametrize("tasks", [1, 2, 3, 9])
def test_shards_share_the_tasks_of_a_micro_batch(tmp_path: Path, tasks: int) -> None:
    """A micro-batch has as many tasks as ``minPartitions`` says; together they read each message once."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from topicstore.spark import TopicstoreSource

    with ts.open(tmp_path / "db", shards=4) as db:
        db.store(numbered(100))
    source = TopicstoreSource({"path": str(tmp_path / "db"), "minPartitions": str(tasks)})
    reader = source.streamReader(source.schema())
    begin = reader.initialOffset()
    partitions = reader.partitions(begin, reader.latestOffset(begin, ReadAllAvailable()))
    assert min(tasks, 4) == len(partitions)
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    assert list(range(100)) == sorted(int(payload) for batch in batches for payload in batch["payload"].to_pylist())


@pytest.mark.slow
def test_an_offset_in_what_was_lost_is_refused(tmp_path: Path) -> None:
    """A database that was restored from an older copy refuses offsets after its end."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from topicstore.spark import TopicstoreSource

    with ts.open(tmp_path / "db") as db:
        db.store(numbered(10))
        db.checkpoint(tmp_path / "copy")
        db.store(numbered(10))
    source = TopicstoreSource({"path": str(tmp_path / "db")})
    reader = source.streamReader(source.schema())
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ReadAllAvailable())
    source = TopicstoreSource({"path": str(tmp_path / "copy")})
    reader = source.streamReader(source.schema())
    assert 1 == len(reader.partitions(begin, reader.latestOffset(begin, ReadAllAvailable())))
    with pytest.raises(ts.PlaceAheadError):
        reader.latestOffset(end, ReadAllAvailable())
    with pytest.raises(ts.PlaceAheadError):
        reader.partitions(begin, end)
    source = TopicstoreSource({"path": str(tmp_path / "copy"), "start": "2100-01-01"})
    reader = source.streamReader(source.schema())
    # this offset is at the end of the restored database
    reader.partitions(reader.initialOffset(), reader.initialOffset())


def test_takes_what_matches_from_the_given_start(spark: SparkSession, tmp_path: Path) -> None:
    """With a filter and a start, batches count matching messages only."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, shards=2, timestamps="message") as db:
        db.store(numbered(700))
    query = copy(spark, source, target, filter="a/3", start=FIRST + 350 * 1_000_000, maxMessagesPerTrigger=20)
    assert rows(query) == [20, 20, 10]
    assert numbers(target) == [n for n in range(350, 700) if n % 7 == 3]


@pytest.mark.slow
def test_by_timestamp(spark: SparkSession, tmp_path: Path) -> None:
    """A stream that is ordered by timestamp can start at a message's time and has bounded batches.

    The option `until` is refused.
    """
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, shards=2) as db:
        for first in (60, 0, 40):
            db.store(numbered(30, first))
    ts.open(target, shards=2).close()  # accepts messages in any order of time
    bounds = {"by": "timestamp", "start": FIRST + 50 * 1_000_000}
    assert rows(copy(spark, source, target, maxMessagesPerTrigger=20, **bounds)) == [20, 20, 10]
    assert numbers(target) == sorted([*range(60, 90), *range(50, 70)])
    with pytest.raises(Exception, match=r"InvalidArgumentError.*until"):
        copy(spark, source, target, by="timestamp", until="now")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["wildcard_optimized", "skipstream"])
def test_other_layouts(spark: SparkSession, tmp_path: Path, layout: str) -> None:
    """Streaming works with layouts that don't order messages by position."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, shards=2, timestamps="message", layout=layout) as db:
        db.store(numbered(300))
        copy(spark, source, target, maxMessagesPerTrigger=70)
        db.store(numbered(300, 300))
        copy(spark, source, target)
    assert numbers(target) == list(range(600))


@pytest.mark.slow
def test_what_was_dropped_unread_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    """A generation that was dropped before it was read raises `GenerationDroppedError`."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, timestamps="message") as db:
        db.store(numbered(10))
        copy(spark, source, target)
        db.store(numbered(10, 10))
        db.add_generation()
        db.drop_generation(1)
        with pytest.raises(Exception, match="GenerationDroppedError"):
            copy(spark, source, target)
    assert numbers(target) == list(range(10))


@pytest.mark.slow
def test_a_batch_that_comes_again_is_stored_once(spark: SparkSession, tmp_path: Path) -> None:
    """If a checkpoint lost its last commit, Spark repeats that batch, and the database recognizes it."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, timestamps="message") as db:
        db.store(numbered(30))
    copy(spark, source, target, maxMessagesPerTrigger=10)
    commits = Path(f"{target}.checkpoint") / "commits"
    for file in (commits / "2", commits / ".2.crc"):
        file.unlink()
    assert rows(copy(spark, source, target)) == [10]
    assert numbers(target) == list(range(30))


@pytest.mark.slow
def test_errors(spark: SparkSession, tmp_path: Path) -> None:
    """`until` is refused, and so is a commit to a locked database."""
    source, target = tmp_path / "source", tmp_path / "target"
    with ts.open(source, timestamps="message") as db:
        db.store(numbered(30))
    with pytest.raises(Exception, match=r"InvalidArgumentError.*until"):
        copy(spark, source, target, until="now")
    with ts.open(target, shards=2, timestamps="message"), pytest.raises(Exception, match="DatabaseLockedError"):
        copy(spark, source, target)
    copy(spark, source, target)
    assert numbers(target) == list(range(30))
