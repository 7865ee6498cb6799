"""Whether this Spark keeps a condition that was pushed down with the scan it was meant for.

Spark 4.3.0 keeps the planned read of a Python data source with the table instead, so that the next query of the same
frame or view reads what the last one has planned (https://github.com/apache/spark/pull/50340). So conditions are pushed
down only where a test of two scans of one frame has shown that they stay apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, InputPartition

__all__ = ["ENABLED", "can_push_down", "conditions_stay_apart"]

ENABLED = "spark.sql.python.filterPushdown.enabled"
_SHARES_READS = "4.3.0"
"""A version that needs no test, which costs the start of Python workers."""
_tested: dict[str, bool] = {}
"""The results, by Spark's version."""


class _ProbeReader(DataSourceReader):
    """A reader of the numbers 1 and 2, narrowed by equality."""

    def __init__(self) -> None:
        self._numbers = [1, 2]

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._numbers = [n for n in self._numbers if all(f.value == n for f in filters if isinstance(f, EqualTo))]
        return filters

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in self._numbers]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


class _Probe(DataSource):
    @classmethod
    def name(cls) -> str:
        return "topicstore_probe"

    def schema(self) -> str:
        return "n int"

    def reader(self, schema: object) -> _ProbeReader:
        return _ProbeReader()


def can_push_down(spark: SparkSession) -> bool:
    """Return whether conditions may be pushed down in a session. Logs once for each version if they may not."""
    version = spark.version
    if version not in _tested:
        _tested[version] = version != _SHARES_READS and conditions_stay_apart(spark)
        if not _tested[version]:
            logging.getLogger(__name__).warning(
                "Spark %s shares planned reads between the queries of a frame: conditions are not pushed down to "
                "topicstore; the options filter, start and until narrow what is read",
                version,
            )
    return _tested[version]


def conditions_stay_apart(spark: SparkSession) -> bool:
    """Return whether several scans of one frame, in one query and in two, each have the rows of their own condition."""
    before = spark.conf.get(ENABLED)
    spark.conf.set(ENABLED, "true")
    try:
        spark.dataSource.register(_Probe)
        frame = spark.read.format(_Probe.name()).load()
        both = frame.where("n = 1").union(frame.where("n = 2"))
        return all(sorted(row.n for row in asked.collect()) == [1, 2] for asked in (both, frame))
    finally:
        spark.conf.set(ENABLED, str(before))
