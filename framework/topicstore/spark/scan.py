"""Batch reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from topicstore.storage.manifest import existing_manifest
from topicstore.storage.storage import Storage

from .access import Piece, open_to_read, pieces_of, read
from .schema import Shape
from .settings import ReadSettings

__all__ = ["PiecesPartition", "TopicstoreReader", "partitions_of", "rows_of"]


class PiecesPartition(InputPartition):
    """What one task reads: the pieces, with the topic filters of the query."""

    def __init__(self, pieces: tuple[Piece, ...], filters: tuple[str, ...]) -> None:
        super().__init__((pieces, filters))
        self.pieces = pieces
        self.filters = filters


def partitions_of(storage: Storage, pieces: Sequence[Piece], filters: tuple[str, ...]) -> list[InputPartition]:
    """Return a partition a piece, or one for all where only one process can have the database open.

    Never none at all, which Spark can't plan.
    """
    if storage.mode == "owner" or not pieces:
        return [PiecesPartition(tuple(pieces), filters)]
    return [PiecesPartition((piece,), filters) for piece in pieces]


def rows_of(path: str, partition: InputPartition, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition. In a task."""
    assert isinstance(partition, PiecesPartition)  # noqa: S101 - Spark hands back what it was given
    if not partition.pieces:
        return
    with open_to_read(path) as storage:
        for piece in partition.pieces:
            for batch in read(storage, piece, partition.filters):
                yield shape.of(batch.to_arrow(ids=shape.ids))


class _Pushing:
    """Takes conditions, but looks to Spark as if it were not there.

    Without ``spark.sql.python.filterPushdown.enabled`` Spark refuses readers that have a `pushFilters` of
    their own, lest conditions be lost. Here none can be: Spark gets all of them back.
    """

    def __init__(self, reader: TopicstoreReader) -> None:
        self.__func__ = DataSourceReader.pushFilters  # by which Spark tells
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        self._reader.narrow(filters)
        return filters


class TopicstoreReader(DataSourceReader):
    """Reads what is there when the query is planned."""

    def __init__(self, settings: ReadSettings, schema: StructType) -> None:
        self._path = settings.path
        self._selection = settings.selection
        self._least = settings.least_partitions
        self._shape = Shape(schema)

    @property
    def pushFilters(self) -> _Pushing:  # noqa: N802 - Spark's name
        """Narrow what is read to what may meet the conditions."""
        return _Pushing(self)

    def narrow(self, conditions: Iterable[Filter]) -> None:
        """Leave out what can't meet the conditions."""
        self._selection = self._selection.narrowed(conditions, existing_manifest(Path(self._path)))

    def partitions(self) -> Sequence[InputPartition]:
        """Return the pieces that are there now."""
        with open_to_read(self._path) as storage:
            return partitions_of(storage, pieces_of(storage, self._selection, self._least), self._selection.filters)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        return rows_of(self._path, partition, self._shape)
