"""The export of sealed generations with Spark: a task for each shard and generation.

The export writes the same files as `Archives.export` (`topicstore.lifecycle.export_format`), equally atomically. Each
attempt of a task writes under a unique name, compares every row, and then renames the result to the slab's final name.
If attempts are repeated or run at the same time, one renames its files, and the others find the slab exported. The
target, like the database, must be a directory that the driver and all workers share.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from topicstore.lifecycle.exporting import ExportedSlab, ExportReport, begin, export_slab, report_of

from .reading import open_to_read

__all__ = ["export"]

_Task = tuple[tuple[int, int], ...]
"""The slabs of a task, as pairs of generation and shard."""


def export(
    spark: SparkSession, path: str | Path, target: str | Path, *, generations: Sequence[int] | None = None
) -> ExportReport:
    """Write sealed generations of the database at ``path``, by default all, as partitioned Parquet.

    While the export is planned, the errors of `Archives.export` are raised. If a task fails more often than Spark
    retries it, Spark raises its own error, which contains the task's error. The files of other tasks then stay, and the
    next export writes only the missing ones. If only one process can have the database open, one task does all work.
    """
    began = time.perf_counter()
    source, directory = str(Path(path).resolve()), Path(target).resolve()
    with open_to_read(source) as storage:
        numbers = begin(storage, directory, generations)
        slabs = [(generation, shard.number) for generation in numbers for shard in storage.shards]
        alone = storage.mode == "owner"
    tasks: list[_Task] = [tuple(slabs)] if alone else [(slab,) for slab in slabs]
    done: list[ExportedSlab] = []
    if slabs:
        work = functools.partial(_export, source, directory)
        done = spark.sparkContext.parallelize(tasks, len(tasks)).flatMap(work).collect()
    return report_of(directory, numbers, done, began)


def _export(path: str, target: Path, slabs: _Task) -> list[ExportedSlab]:
    """Export slabs; called in a task."""
    with open_to_read(path) as storage:
        return [export_slab(storage, storage.shards[shard], generation, target) for generation, shard in slabs]
