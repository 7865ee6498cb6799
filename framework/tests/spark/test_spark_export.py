"""Exports through Spark: the same files as those of `Archives.export`, exactly once after failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.lifecycle import exporting
from topicstore.lifecycle.export_format import read_contents
from topicstore.lifecycle.exporting import ExportedSlab, ExportReport

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')


def export(spark: SparkSession, path: Path, target: Path, generations: list[int] | None = None) -> ExportReport:
    from topicstore.spark.tiering import export

    return export(spark, path, target, generations=generations)


BACKENDS = ["rocksdb", "duckdb"]


@pytest.fixture(params=BACKENDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A database of two shards, with two sealed generations and the current one."""
    with ts.open(tmp_path / "db", backend=request.param, layout="block", shards=2) as db:
        for generation in range(3):
            if generation:
                db.add_generation()
            db.store(
                [ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}", properties=ts.Properties(1)) for n in range(1_000)]
            )
    return tmp_path / "db"


def contents(target: Path) -> dict[tuple[int, int], tuple[int, list[str]]]:
    """Return the number of messages and the files of each slab, by shard and generation."""
    found = {}
    for directory in target.glob("shard=*/generation=*"):
        read = read_contents(directory)
        assert read is not None
        found[read.shard, read.generation] = read.messages, [part.name for part in read.parts]
    return found


def test_it_writes_what_the_database_does(spark: SparkSession, path: Path, tmp_path: Path) -> None:
    report = export(spark, path, tmp_path / "export")
    with ts.open(path, mode="r+") as db:
        expected = db.archives.export(tmp_path / "alone")
        assert (report.messages, report.slabs, report.generations) == (2_000, 4, (1, 2))
        assert expected.messages == 2_000
        assert contents(tmp_path / "export") == contents(tmp_path / "alone")
        before = list(db.replay("#", order="time"))
        assert db.archives.archive(tmp_path / "export").slabs == 0
        assert list(db.replay("#", order="time")) == before
    frame = spark.read.parquet(str(tmp_path / "export"))
    assert Counter(row.generation for row in frame.collect()) == {1: 1_000, 2: 1_000}
    assert frame.filter("shard = 0").count() + frame.filter("shard = 1").count() == 2_000
    assert spark.read.format("topicstore").load(str(path)).count() == 3_000


def test_only_what_is_missing_is_written(spark: SparkSession, path: Path, tmp_path: Path) -> None:
    assert export(spark, path, tmp_path / "export", generations=[2]).messages == 1_000
    shutil.rmtree(tmp_path / "export" / "shard=0001")
    again = export(spark, path, tmp_path / "export")
    assert (again.slabs, again.slabs_before) == (3, 1)
    assert export(spark, path, tmp_path / "export").slabs == 0


@pytest.mark.parametrize("path", BACKENDS[:1], indirect=True)
def test_the_command_line_starts_spark_and_ends_it(path: Path, tmp_path: Path) -> None:
    """The command starts Spark in a process of its own."""
    command = [sys.executable, "-m", "topicstore.cli", *flagged(path, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_dropped(done.stdout, path, tmp_path)


@pytest.mark.parametrize("path", BACKENDS[1:], indirect=True)
def test_the_command_line_exports_what_one_process_has_open(
    spark: SparkSession, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command works with a running Spark session, whose workers open the database before the command does."""
    monkeypatch.setattr("topicstore.spark.session", lambda: spark)
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    result = CliRunner().invoke(cli, flagged(path, tmp_path), catch_exceptions=False)
    check_dropped(result.stdout, path, tmp_path)


def flagged(path: Path, tmp_path: Path) -> list[str]:
    return ["export", str(path), str(tmp_path / "cold"), "--spark", "--drop", "--json"]


def check_dropped(output: str, path: Path, tmp_path: Path) -> None:
    told = json.loads(output)
    assert (told["slabs"], told["dropped"], told["target"]) == (4, True, str(tmp_path / "cold"))
    with ts.open(path, mode="r+") as db:
        assert [one.generation for one in db.archives] == [1, 2]
        assert len(list(db.replay("#"))) == 3_000


def test_the_flag_starts_nothing_for_a_path_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    arguments = ["export", str(tmp_path / "nothing"), str(tmp_path / "cold"), "--spark"]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, "no database" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_is_killed_is_tried_again(
    spark: SparkSession, tmp_path: Path, dying: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed export task is repeated, and every slab is written once."""
    from topicstore.spark import tiering

    target, export_slabs = tmp_path / "export", tiering._export

    def export_slowly(path: str, target: Path, slabs: Any) -> list[ExportedSlab]:
        """Write small row groups, so that the process is killed between two row groups."""
        groups = exporting._tables
        with pytest.MonkeyPatch.context() as patches:  # the process may run other tasks later
            patches.setattr(exporting, "_BATCH", 100)
            patches.setattr(exporting, "_GROUP_ROWS", 100)
            patches.setattr(exporting, "_tables", lambda *arguments: dying(groups(*arguments)))
            return export_slabs(path, target, slabs)

    with ts.open(tmp_path / "db", shards=2) as db:
        db.store([ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}") for n in range(3_000)])
        db.add_generation()
    monkeypatch.setattr(tiering, "_export", export_slowly)
    report = export(spark, tmp_path / "db", target)
    assert (report.messages, report.slabs) == (3_000, 2)
    frame = spark.read.parquet(str(target))
    assert frame.count() == frame.select("shard", "position").distinct().count() == 3_000
    # the killed task left this file
    assert [file.name for file in target.glob(".unfinished-*/*")] == ["part-00000.parquet"]
    with ts.open(tmp_path / "db", mode="r+") as db:
        assert db.archives.archive(target).slabs == 0  # archiving compares every row, and writes nothing
    assert list(target.glob(".unfinished-*")) == []
