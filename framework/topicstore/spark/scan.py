"""The reader of batch queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from topicstore.contract.replay_plan import TimeRange
from topicstore.storage.manifest import existing_manifest
from topicstore.storage.storage import Storage

from .access import Piece, open_to_read, pieces_of, read
from .schema import Shape
from .selection import Selection
from .settings import ReadSettings

__all__ = ["PiecesPartition", "PushingReader", "TopicstoreReader", "partitions_of", "rows_of"]


class PiecesPartition(InputPartition):
    """The work of one task: its pieces, with the topic filters and the times of the query."""

    def __init__(self, pieces: tuple[Piece, ...], filters: tuple[str, ...], timestamps: TimeRange | None) -> None:
        super().__init__((pieces, filters, timestamps))
        self.pieces = pieces
        self.filters = filters
        self.timestamps = timestamps


def partitions_of(storage: Storage, pieces: Sequence[Piece], selection: Selection) -> list[InputPartition]:
    """Return a partition for each piece, or one for all if only one process can have the database open.

    There is always at least one, because Spark can't plan without any.
    """
    if storage.mode == "owner" or not pieces:
        return [PiecesPartition(tuple(pieces), selection.filters, selection.timestamps)]
    return [PiecesPartition((piece,), selection.filters, selection.timestamps) for piece in pieces]


def rows_of(path: str, partition: InputPartition, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition, in a task."""
    assert isinstance(partition, PiecesPartition)  # noqa: S101 - Spark hands back what it was given
    if not partition.pieces:
        return
    with open_to_read(path) as storage:
        for piece in partition.pieces:
            for batch in read(storage, piece, partition.filters, timestamps=partition.timestamps):
                yield shape.of(batch.to_arrow(ids=shape.ids))


class TopicstoreReader(DataSourceReader):
    """A reader of the messages that are there when the query is planned, and of those that come until it is run."""

    def __init__(self, settings: ReadSettings, schema: StructType) -> None:
        self.path = settings.path
        self.selection = settings.selection
        self._least = settings.least_partitions
        self._shape = Shape(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return the pieces that there are at this moment."""
        with open_to_read(self.path) as storage:
            return partitions_of(storage, pieces_of(storage, self.selection, self._least), self.selection)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        return rows_of(self.path, partition, self._shape)


class _Pushing:
    """A method that takes conditions, but looks to Spark as if it were not overridden.

    Without ``spark.sql.python.filterPushdown.enabled`` Spark refuses readers that override `pushFilters`, because
    conditions could be lost (https://github.com/apache/spark/pull/49961). Here Spark gets all of them back.
    """

    def __init__(self, reader: PushingReader) -> None:
        self.__func__ = DataSourceReader.pushFilters  # Spark compares this attribute
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        self._reader.narrow(filters)
        return filters


class PushingReader(TopicstoreReader):
    """A reader that leaves out messages that can't meet the query's conditions."""

    @property
    def pushFilters(self) -> _Pushing:  # noqa: N802 - Spark's name
        """Narrow the read to messages that may meet the conditions."""
        return _Pushing(self)

    def narrow(self, conditions: Iterable[Filter]) -> None:
        """Leave out messages that can't meet the conditions."""
        self.selection = self.selection.narrowed(conditions, existing_manifest(Path(self.path)))
