"""A run from its plan to its results: Spark makes the data, and runs the trials one after the other.

A trial is a Spark job of one task, so that nothing else uses the machine meanwhile, and is tried once: a failure is a
result. Each trial writes its own file; an interrupted run continues with the trials that have none. All machines that
run tasks must see the directory of a run under the same path.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from topicstore.contract.errors import InvalidArgumentError
from topicstore.storage.directory_lock import DirectoryLock

from topicstore_benchmarks.results import SCHEMA
from topicstore_benchmarks.workloads.workload import WorkloadError

from .dataset import Dataset, Tasks, make
from .plan import Plan, PlanMismatchError, Run, Trial
from .trial import LEFT_OUT, SCRATCH, Outcome, run_trial, skipped_row, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RESULTS", "begin", "drive", "spark_tasks", "write_results"]

RESULTS = "results.parquet"

Tell = Callable[[str], None]


def begin(directory: Path, run: Run) -> Run:
    """Return the run of a directory: the one that is there, if it has the same plan, or else this one, written.

    A run with another plan gives way if none of its trials was measured. Raises `PlanMismatchError`, and
    `DatabaseLockedError` while another process measures there.
    """
    there = Run.load(directory)
    differing = [] if there is None else there.plan.differences(run.plan)
    if there is not None and not differing:
        return there
    directory.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(directory)
    try:
        if there is not None and any(_file(directory, trial).exists() for trial in there.plan.trials()):
            raise PlanMismatchError(
                f"{directory} has another run: {', '.join(differing)} differ; give no options to continue it, "
                "or take another directory"
            )
        run.save(directory)
    finally:
        lock.release()
    return run


def drive(directory: Path, run: Run, cache: Path, master: str | None, tell: Tell) -> Path:
    """Measure the trials that are missing; return the file with the rows of all.

    Raises `WorkloadError`, and `DatabaseLockedError` while another process measures there.
    """
    lock = DirectoryLock(directory)
    try:
        _measure(directory, run, cache, master, tell)
        return write_results(directory, run.plan)
    finally:
        lock.release()


def _measure(directory: Path, run: Run, cache: Path, master: str | None, tell: Tell) -> None:
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
    missing = [trial for trial in run.plan.trials() if not _file(directory, trial).exists()]
    if not missing:
        return
    budget = run.plan.settings.budget
    deadline = math.inf if budget is None else time.monotonic() + budget
    with _spark(master) as spark:
        data: dict[str, Dataset] = {}
        for workload in run.plan.workloads:
            tell(f"{workload.name}: messages")
            data[workload.name] = make(workload.definition, workload.messages, cache, spark_tasks(spark))
        _write_skipped(directory, run, data)
        for number, trial in enumerate(missing):
            seconds = _share(deadline - time.monotonic(), missing[number:])
            if seconds <= 0:
                tell(f"{len(missing) - number} trials are left out: {LEFT_OUT}")
                break
            tell(f"trial {number + 1} of {len(missing)}: {trial.name}")
            outcome = _run_in_spark(spark, trial, run.plan, data[trial.workload].directory, directory, seconds)
            tell(f"{outcome.trial}: {outcome.seconds:.0f} s" + "".join(f"\n    {line}" for line in outcome.failed))
            if outcome.left_out:
                tell(f"{outcome.trial}: without {', '.join(outcome.left_out)}: {LEFT_OUT}")


def spark_tasks(spark: SparkSession) -> Tasks:
    """Return what makes the parts of data: tasks for all cores; a bad message comes back as `WorkloadError`."""

    def run(work: Callable[[int], Any], items: Sequence[int]) -> list[Any]:
        def guarded(item: int) -> tuple[Any, str | None]:
            try:
                return work(item), None
            except InvalidArgumentError as bad:
                return None, str(bad)

        context = spark.sparkContext
        found = context.parallelize(items, min(len(items), context.defaultParallelism)).map(guarded).collect()
        for _, reason in found:
            if reason is not None:
                raise WorkloadError(reason)
        return [value for value, _ in found]

    return run


def _share(seconds: float, trials: Sequence[Trial]) -> float:
    """Return what the first trial may take: in the first repetition as much as others, so that each has some."""
    return seconds / max(1, sum(trial.repetition == 1 for trial in trials))


def _run_in_spark(
    spark: SparkSession, trial: Trial, plan: Plan, data: Path, directory: Path, seconds: float
) -> Outcome:
    place = directory.absolute()

    def work(item: Trial) -> Outcome:
        return run_trial(item, plan, data, place, _tell_from_task, seconds)

    found: list[Outcome] = spark.sparkContext.parallelize([trial], 1).map(work).collect()
    return found[0]


def _tell_from_task(text: str) -> None:
    """Report progress: on a single machine, a task's standard error is that of the run."""
    print(f"          {text}", file=sys.stderr, flush=True)


@contextmanager
def _spark(master: str | None) -> Iterator[SparkSession]:
    """Return a session; each task is tried once, because a trial that is tried again would be measured twice."""
    from topicstore.spark import session

    settings: dict[str, object] = {"spark_master": master} if master else {}
    # Idle workers that are kept for reuse (https://github.com/apache/spark/pull/2259) end with a traceback.
    settings["spark.python.worker.reuse"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark's own sockets
        spark = session(spark_app_name="topicstore bench", spark_task_maxFailures=1, **settings)
        try:
            yield spark
        finally:
            spark.stop()


def _file(directory: Path, trial: Trial) -> Path:
    return directory / "trials" / f"{trial.name}.parquet"


def _skipped(directory: Path) -> Path:
    return directory / "trials" / "skipped.parquet"


def _write_skipped(directory: Path, run: Run, data: dict[str, Dataset]) -> None:
    """Write the rows of contenders that take no part in anything, or not with one of the durabilities."""
    rows = []
    for trial in (trial for trial in run.plan.trials() if trial.repetition == 1):
        skipped = [(spec, run.skipped_contenders[spec.name]) for spec in run.left_out]
        skipped += [
            (spec, f"it has no durability {trial.durability!r}")
            for spec in run.plan.contenders
            if trial.durability not in spec.durabilities
        ]
        rows += [skipped_row(spec, reason, trial, data[trial.workload], directory.name) for spec, reason in skipped]
    write_rows(rows, _skipped(directory))


def write_results(directory: Path, plan: Plan) -> Path:
    """Write the rows of all trials that are there into one file; return it."""
    files: Sequence[Path] = [
        path for path in (*(_file(directory, trial) for trial in plan.trials()), _skipped(directory)) if path.exists()
    ]
    tables = [pq.read_table(path, schema=SCHEMA) for path in files]
    making = directory / f".{RESULTS}"
    pq.write_table(pa.concat_tables(tables) if tables else SCHEMA.empty_table(), making)
    making.rename(directory / RESULTS)
    return directory / RESULTS
