"""Exports through Spark: what `Database.export` writes, exactly once whatever fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.tiering.exporting import ExportReport
from topicstore.tiering.format import read_contents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')


def export(spark: SparkSession, path: Path, target: Path, generations: list[int] | None = None) -> ExportReport:
    from topicstore.spark.tiering import export

    return export(spark, path, target, generations=generations)


@pytest.fixture(params=["rocksdb", "duckdb"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two shards, two sealed generations and one that is written; of DuckDB one process at a time has it open."""
    with ts.open(tmp_path / "db", backend=request.param, layout="block", shards=2) as db:
        for generation in range(3):
            if generation:
                db.add_generation()
            db.store(
                [ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}", properties=ts.Properties(1)) for n in range(1_000)]
            )
    return tmp_path / "db"


def contents(target: Path) -> dict[tuple[int, int], tuple[int, list[str]]]:
    """What each shard and generation holds, without what differs between two writings of the same rows."""
    found = {}
    for directory in target.glob("shard=*/generation=*"):
        read = read_contents(directory)
        assert read is not None
        found[read.shard, read.generation] = read.messages, [part.name for part in read.parts]
    return found


def test_it_writes_what_the_database_does(spark: SparkSession, path: Path, tmp_path: Path) -> None:
    report = export(spark, path, tmp_path / "export")
    with ts.open_existing(path) as db:
        expected = db.export(tmp_path / "alone")
        assert (report.messages, report.slabs, report.generations) == (2_000, 4, (1, 2))
        assert expected.messages == 2_000
        assert contents(tmp_path / "export") == contents(tmp_path / "alone")
        before = list(db.replay("#", order="time"))
        assert db.archive(tmp_path / "export").slabs == 0
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


def test_the_command_line_has_a_flag_for_it(path: Path, tmp_path: Path) -> None:
    """In a process of its own, which starts Spark and ends it."""
    command = [sys.executable, "-m", "topicstore.cli", "export", path, tmp_path / "cold", "--spark", "--drop", "--json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["slabs"], told["dropped"], told["target"]) == (4, True, str(tmp_path / "cold"))
    with ts.open_existing(path) as db:
        assert list(db.archived()) == [1, 2]
        assert len(list(db.replay("#"))) == 3_000


def test_the_flag_starts_nothing_for_a_path_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    arguments = ["export", str(tmp_path / "nothing"), str(tmp_path / "cold"), "--spark"]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, "no database" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_is_killed_is_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    """It had begun to write; in the end every slab is there once, and nothing else."""
    target = tmp_path / "export"
    with ts.open(tmp_path / "db", shards=2) as db:
        for first in range(0, 300_000, 50_000):
            db.store([ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}") for n in range(first, first + 50_000)])
        db.add_generation()
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        killing = pool.submit(kill_a_writer, target, stop)
        report = export(spark, tmp_path / "db", target)
        stop.set()
    assert killing.result() is not None
    assert (report.messages, report.slabs) == (300_000, 2)
    frame = spark.read.parquet(str(target))
    assert frame.count() == frame.select("shard", "position").distinct().count() == 300_000
    with ts.open_existing(tmp_path / "db") as db:
        assert db.archive(target).slabs == 0  # which compares every row
    assert list(target.glob(".unfinished-*")) == []


def kill_a_writer(target: Path, stop: threading.Event) -> int | None:
    """Kill the first of Spark's processes that writes in the target; return which it was."""
    while not stop.is_set():
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if int(process.name) == os.getpid() or b"pyspark" not in (process / "cmdline").read_bytes():
                    continue
                files = [str(file.readlink()) for file in (process / "fd").iterdir()]
                if any(file.startswith(f"{target}/.unfinished-") and file.endswith(".parquet") for file in files):
                    os.kill(int(process.name), signal.SIGKILL)
                    return int(process.name)
    return None
