"""A test whether this version of Spark keeps pushed-down conditions separate for each scan.

Spark 4.3.0 caches the planned read of a Python data source with the table, so that the next query of the same frame or
view reuses the plan of the previous one (https://github.com/apache/spark/pull/50340). So conditions are pushed down
only if a test has shown that two scans of one frame keep their own conditions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, InputPartition

__all__ = ["ENABLED", "can_push_down", "conditions_stay_apart"]

ENABLED = "spark.sql.python.filterPushdown.enabled"
_SHARES_READS = "4.3.0"
"""A version that is known to share reads. It is not tested, because a test has to start Python workers."""
_tested: dict[str, bool] = {}
"""Whether conditions may be pushed down, by version of Spark."""


class _ProbeReader(DataSourceReader):
    """A reader of the rows 1 and 2, to which equality conditions can be pushed down."""

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
    """Return whether conditions may be pushed down in a session. If not, log a warning once per version of Spark."""
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
    """Return whether two scans of one frame, in one query or in two, each return the rows of their own condition."""
    before = spark.conf.get(ENABLED)
    spark.conf.set(ENABLED, "true")
    try:
        spark.dataSource.register(_Probe)
        frame = spark.read.format(_Probe.name()).load()
        both = frame.where("n = 1").union(frame.where("n = 2"))
        return all(sorted(row.n for row in asked.collect()) == [1, 2] for asked in (both, frame))
    finally:
        spark.conf.set(ENABLED, str(before))
