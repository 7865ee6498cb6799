"""The reader of a cluster's messages in Spark: straight from the log store, without any site.

A task reads one shard. It makes a copy of the shard in a temporary directory, as a new site would: from the newest
base, and the log's entries after it. Then it reads the copy like a database. So deletes, dropped generations and
takeovers of shards count as on every site. The copy lies in Spark's own directory for temporary files
(``spark.local.dir``), which Spark removes even if the task was killed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from topicstore.opening import copy_shard, shared_manifest
from topicstore.replication.settings import Cluster
from topicstore.storage.directory.manifest import Manifest

from .options import ReadSettings
from .reading import TopicstoreReader
from .schema import Shape

__all__ = ["ClusterReader", "copy_of"]


@contextmanager
def copy_of(cluster: Cluster, manifest: Manifest, number: int) -> Iterator[str]:
    """Return the path of a database that has a copy of one shard, until the block ends; empty if the shard has no log.

    Raises the errors of `topicstore.opening.copy_shard`.
    """
    with tempfile.TemporaryDirectory(prefix="topicstore-", dir=_local_directory()) as path:
        yield path if copy_shard(cluster, manifest, number, Path(path)) else ""


class _ShardPartition(InputPartition):
    """The input of one task: a shard, and the manifest of the copies of its database."""

    def __init__(self, shard: int, manifest: Manifest) -> None:
        super().__init__((shard, manifest))
        self.shard = shard
        self.manifest = manifest


class ClusterReader(DataSourceReader):
    """A reader of the messages acknowledged when the query began, and of later messages until its tasks begin."""

    def __init__(self, settings: ReadSettings, cluster: Cluster, schema: StructType) -> None:
        Shape(schema)  # raises an error for an unknown column
        self._settings = settings
        self._cluster = cluster
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return a partition for each shard. Raises the errors of `topicstore.opening.shared_manifest`."""
        manifest = shared_manifest(self._cluster)
        return [_ShardPartition(number, manifest) for number in range(manifest.shards)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard; called in a task. Raises the errors of `topicstore.opening.copy_shard`."""
        assert isinstance(partition, _ShardPartition)  # noqa: S101 - Spark passes the same object
        number = partition.shard
        with copy_of(self._cluster, partition.manifest, number) as path:
            if not path:
                return
            selection = attrs.evolve(self._settings.selection, shards=frozenset((number,)))
            copy = TopicstoreReader(attrs.evolve(self._settings, path=path, selection=selection), self._schema)
            for part in copy.partitions():
                yield from copy.read(part)


def _local_directory() -> str | None:
    """Return the first of the directories that Spark has for temporary files; None in a process without them."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None
