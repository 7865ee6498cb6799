"""The export of sealed generations with Spark: a task for each shard and generation.

It writes the same files as `Archives.export` (`topicstore.lifecycle.export_format`), just as complete: each attempt of
a task writes under a name of its own, compares every row, and gives the slab its name by one rename. Of attempts
that are tried again, or run side by side, one does that, and the others find it done. So the target must be a
directory that driver and workers share, like the database.
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
"""The slabs of a task, each as its generation and shard."""


def export(
    spark: SparkSession, path: str | Path, target: str | Path, *, generations: Sequence[int] | None = None
) -> ExportReport:
    """Write sealed generations of the database at ``path``, by default all, as partitioned Parquet.

    Raises the errors of `Archives.export` while the export is planned; if a task fails more often than Spark
    tries it, Spark's own error, which shows that of the task. The files of other tasks then stay, and the next
    export continues with the missing ones. If only one process can have the database open, one task does it all.
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
    """Export some slabs, in a task."""
    with open_to_read(path) as storage:
        return [export_slab(storage, storage.shards[shard], generation, target) for generation, shard in slabs]
