"""Reading a cluster with Spark, from its log store alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import topicstore as ts
from topicstore.replication import names
from topicstore.replication.counted_store import CountedLogStore
from topicstore.replication.heads import Head, Kind
from topicstore.replication.log_stores import open_log_store
from topicstore.replication.objects import GenerationPlan, encode_entry
from topicstore.replication.site import Site
from topicstore.storage.directory.manifest import new_manifest, shared_fields
from topicstore_conformance.faults.threads import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from topicstore.spark.cluster import ClusterReader
from topicstore.spark.options import ReadSettings
from topicstore.spark.schema import MESSAGES

from .conftest import FIRST, Sites, numbered


def load(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.read.format("topicstore").option("cluster", url).options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.payload) for row in frame.collect())


def files(directory: Path) -> set[Path]:
    """Return the files of a log store except the heartbeats of sites, which come and go."""
    return {path for path in directory.rglob("*") if path.is_file() and "beats" not in path.parts}


def test_a_query_reads_what_sites_have_acknowledged(spark: SparkSession, sites: Sites) -> None:
    """A query returns each acknowledged message once, of all shards, beside sites that write and after they closed."""
    with sites.open("a", shards=3) as a:
        a.store(numbered(0, 300))
        assert numbers(load(spark, sites.url)) == [*range(300)]
        a.store(numbered(300, 320))
        there = files(sites.log)
        frame = load(spark, sites.url, filter="a/3", ids="true")
        assert numbers(frame) == [n for n in range(320) if n % 7 == 3]
        assert {(row.client_id, row.shard) for row in frame.collect()} == {
            (f"c{n % 10}", a.shard_of(f"c{n % 10}")) for n in range(320) if n % 7 == 3
        }
        assert files(sites.log) == there, "reading changed the log store"
    assert numbers(load(spark, sites.url)) == [*range(320)]


def test_a_query_reads_bases_and_the_log_after_them(spark: SparkSession, sites: Sites) -> None:
    """A query reads a base and the entries after it, without deleted or dropped messages, whoever owned the shards."""
    with sites.open("a", timestamps="message") as a:
        a.store(numbered(0, 100))
        a.add_generation()
        a.store(numbered(100, 200))
        a.add_generation()
        a.store(numbered(200, 300))
        for replica in a.cluster.replicas:
            replica.write_base()
        a.delete("a/1")
        a.drop_generation(1)
        wait_until(lambda: [generation.number for generation in a.generations()] == [2, 3], "generation 1 to go")
    with sites.open("b") as b:
        wait_until(lambda: all(replica.owned for replica in b.cluster.replicas), "site b to own the shard")
        b.store(numbered(300, 400))
        expected = [n for n in range(100, 400) if n % 7 != 1 or n >= 300]
        assert sorted(int(message.payload) for message in b.replay("#")) == expected
    assert numbers(load(spark, sites.url)) == expected
    until = str(FIRST + 250 * 1_000_000)
    assert numbers(load(spark, sites.url, start=str(FIRST + 150 * 1_000_000), until=until)) == [
        n for n in expected if 150 <= n < 250
    ]


def test_a_shard_without_a_log_has_no_rows(spark: SparkSession, sites: Sites) -> None:
    """Shards that no site has written are empty: one without an entry, and one with a fence only."""
    store = open_log_store(sites.url)
    site = Site(ts.Cluster(sites.url), "a", CountedLogStore(store))
    fields = shared_fields(new_manifest({}, (), {}))
    site.found(b"\1" * 16, 2, fields, (GenerationPlan(1, "block", {}),))
    head = Head(index=0, kind=Kind.FENCE, epoch=1, id=b"\2" * 16, site="a", before=b"", checksum=b"", fence=-1)
    store.create(names.entry(1, 0), encode_entry(1, head, ())[1])
    assert load(spark, sites.url).collect() == []


def test_a_task_removes_its_copy(sites: Sites) -> None:
    """A task keeps its copy in Spark's directory for temporary files, and removes it, also if reading it fails."""
    with sites.open("a") as a:
        a.store(numbered(0, 100))
    settings = ReadSettings.of({"cluster": sites.url})
    assert settings.cluster is not None
    reader = ClusterReader(settings, settings.cluster, MESSAGES)
    (partition,) = reader.partitions()
    local = sites.log.parent / "local"
    local.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_LOCAL_DIRS", f"{local},/elsewhere")
        rows = reader.read(partition)
        assert next(rows).num_rows > 0
        assert len([*local.iterdir()]) == 1
        with pytest.raises(RuntimeError, match="the task was cancelled"):
            rows.throw(RuntimeError("the task was cancelled"))  # type: ignore[attr-defined]
        assert [*local.iterdir()] == []


def test_options_of_the_log_store_have_a_prefix() -> None:
    """An option ``cluster.a`` is an option of the log store, and ``cluster.a.b`` is entry ``b`` of option ``a``.

    Options of both forms with the same name are refused.
    """
    options = {"cluster": "s3://b/p", "cluster.timeout": "5", "cluster.config.region": "eu", "cluster.config.a.b": "c"}
    cluster = ReadSettings.of(options).cluster
    assert cluster is not None
    assert cluster.options == {"timeout": "5", "config": {"region": "eu", "a.b": "c"}}
    with pytest.raises(ts.InvalidArgumentError, match=r"cluster\.config, which is given as a value"):
        ReadSettings.of(options | {"cluster.config": "text"})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cluster": "file:///nowhere/log"}, "DatabaseNotFoundError.*file:///nowhere/log holds no cluster"),
        ({"cluster": "ftp://host/log"}, "UnknownPluginError.*there is no log store 'ftp'"),
        ({"cluster": "log"}, "InvalidArgumentError.*a log store is named by a URL"),
        ({"cluster": "file:///log", "path": "data"}, "InvalidArgumentError.*not both"),
        ({"cluster": "file:///log", "of": "topics"}, "InvalidArgumentError.*there is no option 'of'"),
        ({"cluster": "file:///log", "cluster.timeout": "5"}, "InvalidOptionError.*'file' has no option 'timeout'"),
        ({"cluster": "s3://log", "cluster.timeout": "soon"}, "InvalidOptionError.*options of 's3'"),
        ({"cluster.timeout": "5"}, "InvalidArgumentError.*whose URL is the option cluster"),
    ],
)
def test_bad_options_are_refused(spark: SparkSession, options: dict[str, str], error: str) -> None:
    """Options that name no cluster raise an error that names the fault, and nothing is created."""
    with pytest.raises(Exception, match=f"(?s){error}"):
        spark.read.format("topicstore").options(**options).load().collect()
    assert not Path("/nowhere").exists()


def test_a_log_store_that_refuses_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """A log store that can't be read raises the store's refusal, not that there is no cluster."""
    (tmp_path / "log").symlink_to("log")
    with pytest.raises(Exception, match=r"(?s)LogStoreRefusedError.*symbolic links"):
        load(spark, (tmp_path / "log").as_uri()).collect()
