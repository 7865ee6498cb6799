"""A run from its plan to its results: Spark generates the messages, runs the trials, and summarizes the results.

All missing trials are one Spark job, with a task for each. A task takes all cores of an executor and holds a lock of
its machine, so that a machine runs one trial at a time. On a single machine Spark isolates and resumes trials, but
doesn't make them faster. A task is tried once, because a failure is a result. Each trial writes its own file by rename;
an interrupted run continues with the trials that have no file. Spark SQL joins and summarizes the files. All machines
must see the directory of a run under the same path.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from topicstore.contract.errors import InvalidArgumentError
from topicstore.storage.directory.directory_lock import DirectoryLock

from topicstore_benchmarks.results import SCHEMA
from topicstore_benchmarks.timing import Progress
from topicstore_benchmarks.workloads.workload import WorkloadError

from .dataset import Dataset, Tasks, make
from .plan import Plan, PlanMismatchError, Run, Trial
from .trial import LEFT_OUT, SCRATCH, run_trial, skipped_row, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RESULTS", "SUMMARY", "begin", "drive", "machine_lock", "share", "spark_tasks"]

RESULTS, SUMMARY, WORKLOADS = "results.parquet", "summary.parquet", "workloads"


def begin(directory: Path, run: Run) -> Run:
    """Return the run in a directory if it has the same plan; otherwise write this run there and return it.

    An existing run with another plan is replaced only if none of its trials was measured; else raises
    `PlanMismatchError`. Raises `DatabaseLockedError` while another process measures in the directory.
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


def drive(directory: Path, run: Run, master: str | None, progress: Progress) -> Path:
    """Measure the missing trials; return the path of the file with the rows of all trials.

    Raises `WorkloadError`, and `DatabaseLockedError` while another process measures in the directory.
    """
    lock = DirectoryLock(directory)
    try:
        missing = [trial for trial in run.plan.trials() if not _file(directory, trial).exists()]
        if missing or not (directory / RESULTS).exists():
            _measure(directory.absolute(), run, missing, master, progress)
        return directory / RESULTS
    finally:
        lock.release()


def _measure(directory: Path, run: Run, missing: list[Trial], master: str | None, progress: Progress) -> None:
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
    budget = run.plan.settings.budget
    deadline = math.inf if budget is None else time.time() + budget
    data: dict[str, Dataset] = {}
    with _spark(master) as spark:
        for workload in run.plan.workloads:
            progress(f"{workload.name}: messages")
            data[workload.name] = make(workload, directory / WORKLOADS, spark_tasks(spark))
        cores = spark.conf.get("spark.executor.cores", None) or spark.sparkContext.defaultParallelism
    _write_skipped(directory, run, data)
    places = {name: one.directory for name, one in data.items()}
    with _spark(master, spark_task_cpus=cores) as spark:
        if missing:
            _run_all(spark, missing, run.plan, places, directory, deadline, progress)
        progress("results")
        _write_results(spark, directory)


def _run_all(
    spark: SparkSession,
    missing: list[Trial],
    plan: Plan,
    data: Mapping[str, Path],
    directory: Path,
    deadline: float,
    progress: Progress,
) -> None:
    """Measure trials as one Spark job, in their order on each machine."""

    def work(number: int) -> bool:
        trial = missing[number]
        with machine_lock():
            seconds = share(deadline - time.time(), missing[number:])
            if seconds <= 0:
                return False
            _progress_from_task(f"trial {number + 1} of {len(missing)}: {trial.name}")
            outcome = run_trial(trial, plan, data[trial.workload], directory, _progress_from_task, seconds)
        for line in outcome.lines():
            _progress_from_task(line)
        return True

    progress(f"{len(missing)} trials")
    measured = spark.sparkContext.parallelize(range(len(missing)), len(missing)).map(work).collect()
    if not all(measured):
        progress(f"{measured.count(False)} trials are left out: {LEFT_OUT}")


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the lock by which this user's trials on this machine exclude each other; wait for it if necessary."""
    path = Path(tempfile.gettempdir()) / f"topicstore-bench-{os.getuid()}.lock"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def share(seconds: float, trials: Sequence[Trial]) -> float:
    """Return the seconds for the first of the remaining trials.

    The remaining time is divided equally among the trials of the first repetition; later ones may use all of it.
    """
    return seconds / max(1, sum(trial.repetition == 1 for trial in trials))


def spark_tasks(spark: SparkSession) -> Tasks:
    """Return a `Tasks` function that runs Spark tasks on all cores.

    An `InvalidArgumentError` in a task is raised as a `WorkloadError`.
    """

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


def _progress_from_task(text: str) -> None:
    """Print progress to standard error, which on a single machine is that of the run."""
    print(f"          {text}", file=sys.stderr, flush=True)


@contextmanager
def _spark(master: str | None, **settings: object) -> Iterator[SparkSession]:
    """Yield a Spark session in which each task is tried once, because a retry would measure a trial twice."""
    from topicstore.spark import session

    settings |= {"spark_master": master} if master else {}
    # Idle workers that are kept for reuse (https://github.com/apache/spark/pull/2259) end with a traceback.
    settings["spark.python.worker.reuse"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark doesn't close its sockets
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
    """Write the rows of contenders that are skipped, in all trials or with one of the durabilities."""
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


_RESULTS = "SELECT * FROM results ORDER BY repetition, trial, started"
_SUMMARY = """
SELECT workload, durability, contender, phase, metric, unit, count(*) AS trials, percentile(value, 0.5) AS median,
  min(value) AS least, max(value) AS most, map_from_entries(collect_list(struct(trial, value))) AS by_trial
FROM results WHERE status = 'ok'
GROUP BY workload, durability, contender, phase, metric, unit
ORDER BY workload, durability, min(started), contender, metric
"""


def _write_results(spark: SparkSession, directory: Path) -> None:
    """Join the rows of all measured trials into one file, and write the median and range of each value."""
    spark.read.parquet(str(directory / "trials")).createOrReplaceTempView("results")
    for name, table in (
        (SUMMARY, spark.sql(_SUMMARY).toArrow()),
        (RESULTS, spark.sql(_RESULTS).toArrow().cast(SCHEMA)),
    ):
        making = directory / f".{name}"
        pq.write_table(table, making)
        making.rename(directory / name)
