"""Streaming from a cluster's log store alone: acknowledged messages come once, whoever owned the shards."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore.replication import names
from topicstore.replication.bases import cut_log
from topicstore.replication.counted_store import CountedLogStore
from topicstore.replication.heads import Head
from topicstore.replication.log_stores import open_log_store
from topicstore.replication.objects import Entry, GenerationPlan, decode_entry, encode_entry
from topicstore.replication.site import Site
from topicstore.shard.writer import Delete
from topicstore.storage.directory.manifest import new_manifest, shared_fields
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.replication.site_processes import Processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from topicstore.spark import TopicstoreSource

from .conftest import FIRST, Sites, numbered

Offset = dict[str, Any]


class Stream:
    """A streaming query's reader without Spark; offsets pass through JSON, partitions through Spark's serializer."""

    def __init__(self, url: str, offset: Offset | None = None, **options: str) -> None:
        source = TopicstoreSource({"cluster": url, "ids": "true", **options})
        self.reader: Any = source.streamReader(source.schema())
        self.offset = self.reader.initialOffset() if offset is None else offset

    def end(self, rows: int | None = None) -> Offset:
        limit = ReadAllAvailable() if rows is None else ReadMaxRows(rows)
        found: Offset = json.loads(json.dumps(self.reader.latestOffset(self.offset, limit)))
        return found

    def between(self, start: Offset, end: Offset) -> list[int]:
        """Return the sorted numbers of the messages between two offsets; check that each shard's positions ascend."""
        found: list[int] = []
        serializer = CPickleSerializer()
        for partition in self.reader.partitions(start, end):
            batches: list[pa.RecordBatch] = [*self.reader.read(serializer.loads(serializer.dumps(partition)))]
            positions = [position for batch in batches for position in batch["position"].to_pylist()]
            assert positions == sorted(positions)
            found += [int(payload) for batch in batches for payload in batch["payload"].to_pylist()]
        return sorted(found)

    def next(self, rows: int | None = None) -> list[int]:
        """Return the numbers of the next micro-batch."""
        start, self.offset = self.offset, self.end(rows)
        return self.between(start, self.offset)


def cut(db: ts.Database, url: str) -> None:
    """Write a base of each shard, and truncate the log before the base."""
    with closing(open_log_store(url)) as store:
        for replica in db.cluster.replicas:
            replica.write_base()
            cut_log(store, replica.shard.number, "a", replica.base)


def test_each_micro_batch_has_what_is_new(sites: Sites) -> None:
    """Micro-batches have each acknowledged message once, across generations, changes of owners, and restarts."""
    with sites.open("a", shards=3) as a:
        stream = Stream(sites.url)
        assert [] == stream.next()
        a.store(numbered(0, 300))
        first = stream.offset
        assert [*range(300)] == stream.next()
        assert [] == stream.next()
        a.add_generation()
        a.store(numbered(300, 320))
        assert [*range(300, 320)] == Stream(sites.url, stream.offset).next()
        a.compact()
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shards")
        b.store(numbered(320, 400))
        assert [*range(300, 400)] == stream.next()
    assert [] == stream.next()
    assert [*range(400)] == stream.between(first, stream.offset)


def test_a_limit_counts_matching_messages(sites: Sites) -> None:
    """A limited micro-batch has the first matching messages by position over all shards, also within an entry."""
    with sites.open("a", shards=3, timestamps="message") as a:
        a.store(numbered(0, 350))
        a.store(numbered(350, 700))
    stream = Stream(sites.url, filter="a/3", start=str(FIRST + 350 * 1_000_000))
    expected = [n for n in range(350, 700) if n % 7 == 3]
    assert [expected[:20], expected[20:40], expected[40:], []] == [stream.next(20) for _ in range(4)]
    whole = Stream(sites.url)
    assert [50] * 14 == [len(whole.next(50)) for _ in range(14)]
    assert [] == whole.next(50)


def test_a_limit_over_many_entries(sites: Sites) -> None:
    """A limited micro-batch continues near the end of the last one, and skips long parts of the log without a match."""
    with sites.open("a") as a:
        for number in range(60):  # an entry each, of 64 KiB
            a.store([ts.Message("a/1", (b"%d" % number).ljust(65_536), "c0")])
        a.store([ts.Message("b", b"9999", "c0")])
    stream = Stream(sites.url)
    assert [*range(40)] == stream.next(40)
    assert 20 < stream.offset["0"]["entry"] < 40
    assert stream.offset["0"]["last"] < stream.offset["0"]["position"]
    assert [*range(40, 60), 9_999] == [*stream.next(10), *stream.next(20)]
    rare = Stream(sites.url, filter="b")
    assert [9_999] == rare.next(1)
    assert rare.offset["0"]["entry"] > 40
    assert [] == rare.next(1)


def test_a_query_that_takes_what_is_available_ends(sites: Sites) -> None:
    """With the trigger ``availableNow``, a query reads up to the ends that the logs had when the query was prepared."""
    with sites.open("a", shards=2) as a:
        a.store(numbered(0, 100))
        stream = Stream(sites.url)
        stream.reader.prepareForTriggerAvailableNow()
        assert 30 == len(stream.next(30))
        a.store(numbered(100, 200))
        assert [30, 30, 10, 0] == [len(stream.next(30)) for _ in range(4)]
        later = Stream(sites.url, stream.offset)
        later.reader.prepareForTriggerAvailableNow()
        assert [*range(100, 200)] == later.next()
        a.store(numbered(200, 210))
        assert [] == later.next()


def test_a_start_in_time_skips_what_is_older(sites: Sites) -> None:
    """A stream can start at a time, or after all messages; ``by`` compares the time with the messages' own times."""
    with sites.open("a", shards=2) as a:
        for first in (60, 0, 40):
            a.store(numbered(first, first + 30))
        own = Stream(sites.url, by="timestamp", start=str(FIRST + 50 * 1_000_000))
        assert sorted([*range(60, 90), *range(50, 70)]) == own.next()
        future = Stream(sites.url, start="2100-01-01")
        assert [] == future.next()
        a.store(numbered(200, 210))
        assert [*range(200, 210)] == future.next()
        for replica in a.cluster.replicas:
            replica.write_base()
        a.store(numbered(210, 220))
        assert [] == Stream(sites.url, start="2100-01-01").next()


@pytest.mark.parametrize("layout", ["block", "wildcard_optimized"])
def test_a_log_that_is_cut_is_read_from_a_base(sites: Sites, layout: str) -> None:
    """If log entries after an offset were truncated, messages come from a base and then from the log, each once."""
    with sites.open("a", shards=2, layout=layout) as a:
        a.store(numbered(0, 100))
        stream = Stream(sites.url)
        assert 40 == len(first := stream.next(40))
        planned = stream.offset, stream.end()
        a.store(numbered(100, 200))
        cut(a, sites.url)
        a.store(numbered(200, 220))
        assert sorted({*range(100)} - {*first}) == stream.between(*planned)  # as after a restart
        rest = [stream.next(70) for _ in range(4)]
        assert [70, 70, 40, 0] == [*map(len, rest)]
        assert sorted({*range(220)} - {*first}) == sorted(chain(*rest))
        a.store(numbered(220, 230))
        assert [*range(220, 230)] == stream.next()
        assert [*range(230)] == Stream(sites.url).next()
        assert 230 == len(Stream(sites.url, filter="a/+").next())
        assert [n for n in range(230) if n % 7 == 3] == Stream(sites.url, filter="a/3").next()


@pytest.mark.parametrize("rows", [None, 10])
def test_a_cut_behind_what_was_read_costs_no_copy(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, rows: int | None
) -> None:
    """If a stream has read all messages of truncated entries, it continues in the log, without a copy of a shard."""
    with sites.open("a") as a:
        a.store(numbered(0, 10))
        stream = Stream(sites.url)
        assert [*range(10)] == stream.next()
        a.state(0).write([ts.StateWrite(b"key", b"value")])  # an entry without messages
        cut(a, sites.url)
        monkeypatch.setenv("SPARK_LOCAL_DIRS", "/nowhere")
        assert [] == stream.next(rows)
        a.store(numbered(10, 20))
        assert [*range(10, 20)] == stream.next(rows)


def test_a_log_that_is_cut_under_a_task_is_continued_in_a_base(sites: Sites) -> None:
    """A task whose log is truncated while the task reads gets the remaining messages from a base, each message once."""
    with sites.open("a") as a:
        for first in range(0, 600, 2):  # more entries than a reader keeps in memory
            a.store(numbered(first, first + 2))
        stream = Stream(sites.url)
        (partition,) = stream.reader.partitions(stream.offset, stream.end())
        rows = stream.reader.read(partition)
        found = [*next(rows)["payload"].to_pylist()]
        cut(a, sites.url)
        found += [payload for batch in rows for payload in batch["payload"].to_pylist()]
    assert [*range(600)] == [int(payload) for payload in found]


def test_deleted_messages_do_not_come(sites: Sites) -> None:
    """A stream omits messages deleted before their micro-batch ends, and returns messages that the deletion spares."""
    with sites.open("a") as a:
        a.store(numbered(0, 70))
        stream = Stream(sites.url)
        a.delete("a/1")
        a.store(numbered(70, 140))
        expected = [n for n in range(140) if n % 7 != 1 or n >= 70]
        end = stream.end()
        assert expected == stream.between(stream.offset, end)
        a.delete("a/+")
        assert [] == stream.next()
        assert expected == stream.between(Stream(sites.url).offset, end)  # a repeated micro-batch is the same
        a.store(numbered(140, 147))
        assert [*range(140, 147)] == stream.next()


def test_dropped_generations(sites: Sites) -> None:
    """A new stream begins after dropped generations; a stream that lags reads them from the log, or raises an error."""
    with sites.open("a") as a, sites.open("b", poll_interval=3_600.0):  # site b keeps the log from being truncated
        stream = Stream(sites.url)
        a.store(numbered(0, 10))
        a.add_generation()
        a.store(numbered(10, 20))
        drop(a, 1)
        behind = stream.offset
        assert [*range(10, 20)] == Stream(sites.url).next()
        assert [*range(20)] == stream.next()
        cut(a, sites.url)
        assert [*range(10, 20)] == Stream(sites.url).next()
        assert [] == stream.next()
        with pytest.raises(ts.GenerationDroppedError):
            Stream(sites.url, behind).next()


def test_a_start_before_a_generation_that_was_dropped(sites: Sites) -> None:
    """A stream whose start lies in a remaining generation begins there, even if a later generation was dropped."""
    with sites.open("a", timestamps="message") as a, sites.open("b", poll_interval=3_600.0):
        a.store(numbered(0, 10))
        a.cluster.replicas[0].write_base()
        for first in (10, 20):
            a.store(numbered(first, first + 10))
            a.add_generation()
        a.store(numbered(30, 40))
        drop(a, 2)
        found = Stream(sites.url, start=str(FIRST + 10 * 1_000_000)).next()
    assert {*range(10, 20), *range(30, 40)} <= {*found} <= {*range(10, 40)}


def drop(db: ts.Database, number: int) -> None:
    """Drop a generation, and return when it is gone."""
    db.drop_generation(number)
    wait_until(lambda: number not in [one.number for one in db.generations()], "the generation to go")


def entries(url: str) -> list[Entry]:
    """Return the entries of shard 0."""
    with closing(open_log_store(url)) as store:
        there = chain(*store.names(names.entries(0)))
        return [decode_entry(0, number, store.get(name), "log") for number, name in enumerate(there)]


def append(url: str, head: Head, change: bytes, first_position: int = 0, last_position: int = 0) -> None:
    """Append an entry with one change to the log of shard 0; its kind, epoch and site are those of a head."""
    last = entries(url)[-1].head
    new = msgspec.structs.replace(
        head,
        index=last.index + 1,
        before=last.checksum,
        fence=last.fence,
        first_position=first_position,
        last_position=last_position,
    )
    with closing(open_log_store(url)) as store:
        store.create(names.entry(0, new.index), encode_entry(0, new, (change,))[1])


def test_an_entry_of_a_fenced_owner_never_counts(sites: Sites) -> None:
    """An entry of a lower epoch than one before it is skipped, also if an offset lies between the two."""
    with sites.open("a") as a:
        a.store(numbered(0, 5))
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shard")
        b.store(numbered(5, 10))
    stream = Stream(sites.url)
    assert [*range(10)] == stream.next()
    place = stream.offset["0"]
    old = [one for one in entries(sites.url) if one.head.site == "a" and one.head.last_position][-1]
    fields = msgspec.msgpack.decode(old.changes[0][1:])
    first, last = place["position"] + 1, place["position"] + 5
    fields[1], fields[4][7] = last, [5, first]  # the last position, and a column of consecutive positions
    for _ in range(2):
        append(sites.url, old.head, old.changes[0][:1] + msgspec.msgpack.encode(fields), first, last)
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shard")
        b.store(numbered(10, 15))
        assert [*range(15)] == sorted(int(message.payload) for message in b.replay("#"))
    assert [*range(10, 15)] == stream.next()
    assert [*range(15)] == Stream(sites.url).next()


def test_a_delete_spares_what_a_site_spares(sites: Sites) -> None:
    """A delete removes no messages of the filters that it spares, and none that were stored after it."""
    with sites.open("a") as a:
        stream = Stream(sites.url)
        a.store(numbered(0, 70))
    owner = next(one.head for one in reversed(entries(sites.url)) if one.head.last_position)
    delete = Delete("a/+", 0, (1 << 63) - 1, ("a/3", "b/#"))
    append(sites.url, owner, b"\1" + msgspec.msgpack.encode(delete))
    with sites.open("a") as a:
        a.store(numbered(70, 140))
        expected = [n for n in range(140) if n % 7 == 3 or n >= 70]
        assert expected == sorted(int(message.payload) for message in a.replay("#"))
    assert expected == stream.next()


def test_a_log_store_that_has_lost_what_was_read_is_refused(sites: Sites, tmp_path: Path) -> None:
    """An offset after the end of a restored log, or in a log that has other entries since, raises `PlaceAheadError`."""
    with sites.open("a") as a:
        a.store(numbered(0, 10))
    shutil.copytree(sites.log, tmp_path / "old")
    stream = Stream(sites.url)
    with sites.open("a") as a:
        a.store(numbered(10, 20))
        partition = stream.reader.partitions(stream.offset, stream.end())[0]
        stream.next()
    shutil.rmtree(sites.log)
    (tmp_path / "old").rename(sites.log)
    with pytest.raises(ts.PlaceAheadError):
        stream.next()
    with pytest.raises(ts.PlaceAheadError):
        [*stream.reader.read(partition)]
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shard")
        b.store(numbered(10, 40))
        for batch in range(10):
            b.store(numbered(40 + batch, 41 + batch))
    with pytest.raises(ts.PlaceAheadError):
        stream.next()


def test_an_offset_names_its_database(sites: Sites, tmp_path: Path) -> None:
    """Every call refuses an offset of another database."""
    with sites.open("a") as a:
        a.store(numbered(0, 10))
    other = Sites(tmp_path / "other")
    with other.open("a") as a:
        a.store(numbered(0, 10))
    stream, wrong = Stream(sites.url), Stream(other.url).offset
    calls: list[Callable[[], object]] = [
        lambda: stream.reader.latestOffset(wrong, ReadAllAvailable()),
        lambda: stream.reader.partitions(wrong, stream.offset),
        lambda: stream.reader.partitions(stream.offset, wrong),
    ]
    for call in calls:
        with pytest.raises(ts.WrongDatabaseError):
            call()


def test_a_stream_of_a_copy_continues_in_the_log(sites: Sites, tmp_path: Path) -> None:
    """An offset of a stream that reads a site's directory is valid for the cluster, and the other way round."""
    with sites.open("a", shards=2) as a:
        a.store(numbered(0, 100))
    source = TopicstoreSource({"path": str(tmp_path / "a")})
    reader = source.streamReader(source.schema())
    offset = reader.latestOffset(reader.initialOffset(), ReadMaxRows(60))
    with sites.open("a") as a:
        a.store(numbered(100, 110))
    stream = Stream(sites.url, offset)
    assert 30 == len(first := stream.next(30))
    partitions = reader.partitions(stream.offset, reader.latestOffset(stream.offset, ReadAllAvailable()))
    rest = [
        int(payload) for one in partitions for batch in reader.read(one) for payload in batch["payload"].to_pylist()
    ]
    assert sorted([*first, *rest]) == Stream(sites.url, offset).next()
    assert 50 == len({*first, *rest})
    with pytest.raises(ts.PlaceAheadError):
        Stream(sites.url, {**offset, "0": offset["0"] + (1 << 50)}).end()


def test_a_shard_without_a_log_has_no_rows(sites: Sites) -> None:
    """A stream of a cluster in which nothing was written is empty, and has the messages written later."""
    with closing(open_log_store(sites.url)) as store:
        site = Site(ts.Cluster(sites.url), "a", CountedLogStore(store))
        fields = shared_fields(new_manifest({}, (), {}))
        site.found(b"\1" * 16, 2, fields, (GenerationPlan(1, "block", {}),))
    stream = Stream(sites.url)
    assert [] == stream.next()
    assert [] == stream.next(10)
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shards")
        b.store(numbered(0, 10))
    assert [*range(10)] == stream.next()


def test_a_stream_has_no_end(sites: Sites) -> None:
    """The option ``until`` is refused, and so is ``of``."""
    with sites.open("a"):
        for option in ({"until": "now"}, {"of": "topics"}):
            with pytest.raises(ts.InvalidArgumentError):
                Stream(sites.url, **option)


def copy(spark: SparkSession, url: str, target: Path, **options: Any) -> StreamingQuery:
    """Copy all available messages of a cluster to a database, and return the finished query."""
    reading = spark.readStream.format("topicstore").option("cluster", url).options(**options).load()
    writing = reading.writeStream.format("topicstore").option("shards", 2).option("path", str(target))
    query = writing.option("checkpointLocation", f"{target}.checkpoint").trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE), "the copy has not ended"
    return query


def stored(path: Path) -> list[int]:
    with ts.open(path, mode="r") as db:
        return sorted(int(message.payload) for message in db.replay("#"))


def test_spark_continues_from_its_checkpoint(spark: SparkSession, sites: Sites, tmp_path: Path) -> None:
    """A query copies a cluster in bounded micro-batches beside a site, and continues from its checkpoint."""
    target = tmp_path / "target"
    with sites.open("a", shards=3, timestamps="message") as a:
        a.store(numbered(0, 250))
        query = copy(spark, sites.url, target, maxMessagesPerTrigger=100)
        assert [100, 100, 50] == [one.numInputRows for one in query.recentProgress if one.numInputRows]
        a.store(numbered(250, 300))
        copy(spark, sites.url, target)
    assert [*range(300)] == stored(target)


def acknowledged(processes: Processes) -> list[int]:
    """Return the numbers of all messages whose store has returned, in any process."""
    done = [one for site in processes.all for one in list(site.operations) if one.kind == "store"]
    return sorted(chain.from_iterable(one.numbers for one in done if one.outcome == "stored"))


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 2), *(pytest.param(seed, 4, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_a_stream_under_load_misses_and_repeats_nothing(processes: Processes, seed: int, rounds: int) -> None:
    """With owners killed, generations sealed and logs truncated, micro-batches have each acknowledged message once."""
    chance = random.Random(seed)
    url = (processes.root / "log").as_uri()
    for name in "ab":
        processes.start(name)
    stream = Stream(url)
    found: list[int] = []
    cluster = ts.Cluster(url, beat_interval=0.1, takeover_after=3_600.0, replication_factor=None)
    with ts.open(processes.root / "c", cluster=cluster, site="c") as beside:
        for _ in range(rounds):
            name = chance.choice(sorted(processes.running))
            processes.kill(name)
            processes.progress("stores after a site was killed")
            before = acknowledged(processes)
            found += stream.next(chance.choice([None, 7, 100]))
            stream = Stream(url, stream.offset)
            beside.add_generation()
            processes.start(name)
            processes.progress("stores of all sites")
            found += stream.next()
            assert {*before} <= {*found}
        for name in [*processes.running]:
            processes.kill(name)
        found += stream.next()
        assert [] == stream.next()
        assert sorted(found) == sorted(int(message.payload) for message in beside.replay("#"))
    assert len(found) == len({*found})
    assert {*acknowledged(processes)} <= {*found}
    assert any((processes.root / "log").rglob("cuts/*")), "no log was cut"


@pytest.mark.slow
def test_spark_streams_while_owners_are_killed(spark: SparkSession, processes: Processes, tmp_path: Path) -> None:
    """A running query, stopped and restarted, copies each acknowledged message once while owners are killed."""
    url, target = (tmp_path / "log").as_uri(), tmp_path / "target"

    def start() -> StreamingQuery:
        reading = spark.readStream.format("topicstore").option("cluster", url).load()
        writing = reading.writeStream.format("topicstore").option("path", str(target))
        return writing.option("checkpointLocation", f"{target}.checkpoint").start()

    def grown(before: int) -> bool:
        return len(stored(target)) > before

    for name in "ab":
        processes.start(name)
    ts.open(target, shards=2).close()
    query = start()
    for number, name in enumerate("abab"):
        processes.kill(name)
        processes.progress("stores after a site was killed")
        before = len(stored(target))
        wait_until(partial(grown, before), "a micro-batch")
        if number % 2:
            query.stop()
            query = start()
        processes.start(name)
    for name in [*processes.running]:
        processes.kill(name)
    query.processAllAvailable()
    query.stop()
    there = stored(target)
    assert len(there) == len({*there})
    assert {*acknowledged(processes)} <= {*there}
