"""Repeated tasks, concurrent jobs and cancelled jobs: each row is stored once, or the write fails clearly.

Tasks and commits run in other processes, so they synchronize by files that one process creates and another waits for.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import PATIENCE

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

FIRST = 1_700_000_000_000_000
NAMED = pytest.mark.parametrize("writer", [{}, {"writer": "w"}], ids=["nameless", "named"])


def frame(spark: SparkSession, first: int, count: int, partitions: int = 2) -> DataFrame:
    """Return numbered rows, one in each millisecond."""
    columns = (
        "concat('a/', id % 7) as topic",
        "cast(id as string) as client_id",
        f"timestamp_micros({FIRST} + id * 1000) as timestamp",
        "cast(cast(id as string) as binary) as payload",
    )
    return spark.range(first, first + count, 1, partitions).selectExpr(*columns)


def numbers(path: Path) -> list[int]:
    with ts.open(path, mode="r") as db:
        return sorted(int(message.payload) for message in db.replay("#"))


class Job(threading.Thread):
    """A write in a thread of its own."""

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self._write = write
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except Exception as failure:  # noqa: BLE001 - what it is, is asked
            self.failure = failure


def passes(gate: Path, job: Job | None = None) -> None:
    """Wait until a file exists, which a running job must create; fail after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not gate.exists():
        assert time.monotonic() < end, f"{gate} was never made"
        assert job is None or job.is_alive(), str(job.failure)
        time.sleep(0.01)


@pytest.fixture
def save(spark: SparkSession, tmp_path: Path) -> Callable[..., None]:
    """Return a function that writes rows to the database ``db``; given functions run in its tasks and its commit."""
    from pyspark import cloudpickle
    from topicstore.spark import TopicstoreSource
    from topicstore.spark.options import WriteSettings
    from topicstore.spark.sink import TopicstoreWriter

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes can't import this module

    def save(
        rows: DataFrame,
        in_task: Callable[[], object] = int,
        in_commit: Callable[[], object] = int,
        *,
        copied: bool = False,
        **options: Any,
    ) -> None:
        name = f"gated {uuid.uuid4().hex}"

        class GatedWriter(TopicstoreWriter):
            def write(self, cursor: Iterator[pa.RecordBatch]) -> Any:
                batches = list(cursor)
                if copied:
                    super().write(iter(batches))
                written = super().write(iter(batches))
                in_task()
                return written

            def commit(self, messages: Any) -> None:
                from topicstore.spark.promotion import CommitJob

                def run(self: Any, _run: Any = CommitJob.run) -> None:
                    in_commit()
                    _run(self)

                with pytest.MonkeyPatch.context() as patches:  # the process serves other writes afterwards
                    patches.setattr(CommitJob, "run", run)
                    super().commit(messages)

        class GatedSource(TopicstoreSource):
            @classmethod
            def name(cls) -> str:
                return name

            def writer(self, schema: Any, overwrite: bool) -> GatedWriter:
                return GatedWriter(WriteSettings.of(self.options, overwrite=overwrite))

        jvm: Any = spark._jvm
        # without an active session in this thread, Spark doesn't find the registered source
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
        spark.dataSource.register(GatedSource)
        rows.write.format(GatedSource.name()).options(**options).mode("append").save(str(tmp_path / "db"))

    return save


@NAMED
def test_a_task_that_fails_is_tried_again(
    spark: SparkSession, tmp_path: Path, save: Callable[..., None], writer: dict[str, str]
) -> None:
    """If each task fails once after staging its rows, the rows of one attempt are stored."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def fails_once() -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        (marks / f"{context.partitionId()}-{context.attemptNumber()}").touch()
        if context.attemptNumber() == 0:
            raise RuntimeError("the first try fails")

    save(frame(spark, 0, 500), fails_once, **writer)
    assert sorted(mark.name for mark in marks.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    assert numbers(tmp_path / "db") == list(range(500))
    assert not (tmp_path / ".db.staging").exists()


def test_a_task_that_another_one_has_overtaken(spark: SparkSession, tmp_path: Path, save: Callable[..., None]) -> None:
    """If two attempts of a task have staged rows, as with Spark's speculation on several hosts, only one is stored."""
    save(frame(spark, 0, 500), copied=True)
    assert numbers(tmp_path / "db") == list(range(500))
    assert not (tmp_path / ".db.staging").exists()


@NAMED
def test_two_jobs_at_once(
    spark: SparkSession, tmp_path: Path, save: Callable[..., None], writer: dict[str, str]
) -> None:
    """A write that begins during another write's commit waits, and both are stored; a writer's repeated batch isn't."""
    save(frame(spark, 0, 10), batch=0, writer="before")
    committing, go = tmp_path / "committing", tmp_path / "go"

    def waits() -> None:
        committing.touch()
        passes(go)

    rows = 0 if writer else 100
    one = Job(lambda: save(frame(spark, 100, 100), in_commit=waits, **writer))
    passes(committing, one)
    two = Job(lambda: save(frame(spark, 100 + rows, 100), **writer))
    go.touch()
    one.join()
    two.join()
    assert (one.failure, two.failure) == (None, None)
    assert numbers(tmp_path / "db") == [*range(10), *range(100, 200 + rows)]
    assert not (tmp_path / ".db.staging").exists()


def test_two_jobs_whose_tasks_run_at_once(spark: SparkSession, tmp_path: Path, save: Callable[..., None]) -> None:
    """If two jobs have staged rows, the job that commits later is refused as a whole if its rows are older."""
    old, go = tmp_path / "old", tmp_path / "go"

    def waits() -> None:
        old.touch()
        passes(go)

    one = Job(lambda: save(frame(spark, 0, 100, 1), waits))
    passes(old, one)
    save(frame(spark, 100, 100, 1))
    go.touch()
    one.join()
    assert "LateMessageError" in str(one.failure)
    assert numbers(tmp_path / "db") == list(range(100, 200))
    assert not (tmp_path / ".db.staging").exists()


@NAMED
def test_a_job_that_is_cancelled(
    spark: SparkSession, tmp_path: Path, save: Callable[..., None], writer: dict[str, str]
) -> None:
    """A job that is cancelled after staging rows stores none of them, and can be repeated."""
    staged, never = tmp_path / "staged", tmp_path / "never"

    def waits() -> None:
        staged.touch()
        passes(never)

    job = Job(lambda: save(frame(spark, 0, 100), waits, **writer))
    passes(staged, job)
    spark.sparkContext.cancelAllJobs()
    job.join()
    never.touch()
    assert "cancel" in str(job.failure).lower()
    assert not (tmp_path / "db").exists()
    save(frame(spark, 0, 100), **writer)
    assert numbers(tmp_path / "db") == list(range(100))
