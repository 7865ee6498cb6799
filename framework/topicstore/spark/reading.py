"""How Spark's processes read a part of a database, and the reader of batch queries.

The driver plans pieces as of one moment; tasks read them, each in its own view of the database, of that
moment or a later one. Spark may keep a plan for later queries, so the last piece of each shard has no end of its own:
its task also reads what was stored since. Positions bound all other pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.replay_plan import Order, TimeRange
from topicstore.contract.topics import TopicFilter
from topicstore.opening import open_lazily
from topicstore.shard.shard import Shard
from topicstore.storage.manifest import existing_manifest
from topicstore.storage.storage import Storage

from .options import ReadSettings, Selection
from .schema import Shape

__all__ = [
    "Piece",
    "PiecesPartition",
    "PushingReader",
    "TopicstoreReader",
    "open_to_read",
    "partitions_of",
    "pieces_of",
    "read",
    "rows_of",
]

_BATCH = 32_768
"""The most messages in a record batch: enough that the cost of Python and of Spark's socket is negligible."""
_WORTH_CUTTING = 65_536
"""The least messages of a part, if they are evenly distributed."""


@attrs.frozen
class Piece:
    """Positions from ``first`` to ``last`` of a shard, both inclusive."""

    shard: int
    generation: int | None
    """The generation. None: all live ones; it is then an error if one that the piece needs was dropped."""
    first: int
    last: int


def open_to_read(path: str) -> AbstractContextManager[Storage]:
    """Open a database to read it; each shard is opened only when it is needed."""
    return closing(open_lazily(Path(path)))


def pieces_of(storage: Storage, selection: Selection, least: int = 1) -> list[Piece]:
    """Return the pieces of a selection: one for each shard and generation, the last of a shard without an end.

    If there are less than ``least`` pieces, those of many messages are cut into equal spans of positions.
    """
    numbers = [number for number in range(storage.manifest.shards) if selection.of_shard(number)]
    found = [piece for number in numbers for piece in _pieces_of_shard(storage.shards[number], selection)]
    if len(found) >= least:
        return [piece for piece, _ in found]
    messages = sum(count for _, count in found)
    return [
        part
        for piece, count in found
        for part in _cut(storage, piece, min(count // _WORTH_CUTTING, -(-least * count // max(messages, 1))))
    ]


def _pieces_of_shard(shard: Shard, selection: Selection) -> Iterator[tuple[Piece, int]]:
    """Yield pieces, each with the number of messages in its generation."""
    for record in shard.generations():
        current = record.last_position is None
        end = selection.last if record.last_position is None else record.last_position
        first, last = max(selection.first, record.first_position), min(selection.last, end)
        if selection.timestamps is not None and not current:
            spans = shard.spans(selection.timestamps, first, last)
            first, last = (spans[0][0], spans[-1][1]) if spans else (1, 0)
        if first <= last:
            yield Piece(shard.number, None if current else record.number, first, last), record.messages


def _cut(storage: Storage, piece: Piece, parts: int) -> Iterator[Piece]:
    """Yield ``parts`` pieces that together are ``piece``, with equal spans from its oldest to its newest message."""
    end = min(piece.last, storage.shards[piece.shard].watermark)
    if parts < 2 or end < piece.first:
        yield piece
        return
    oldest = next((int(batch.positions[0]) for batch in read(storage, piece, ("#",), order="time")), end)
    starts = [piece.first, *(oldest + (end - oldest) * part // parts for part in range(1, parts))]
    for start, after in pairwise([*starts, piece.last + 1]):
        if start < after:
            yield attrs.evolve(piece, first=start, last=after - 1)


def read(
    storage: Storage,
    piece: Piece,
    filters: tuple[str, ...],
    *,
    timestamps: TimeRange | None = None,
    order: Order = "any",
) -> Iterator[MessageBatch]:
    """Yield the messages of a piece that match one of ``filters``, which don't overlap, filter by filter.

    ``timestamps``: only messages whose own time is within this range. ``order``: as for `Database.replay`.
    Raises `GenerationDroppedError` if some of them were dropped since the piece was planned.
    """
    shard = storage.shards[piece.shard]
    _check_there(shard, piece)
    for text in filters:
        parsed, began = TopicFilter(text), time.monotonic()
        whole = storage.plan_shard(piece.shard, parsed, piece.first, piece.last, since=began, timestamps=timestamps)
        chosen = [part for part in whole.generations if piece.generation in (None, part.cursors[0].generation)]
        yield from storage.run_shards([attrs.evolve(whole, generations=chosen)], _BATCH, order, timestamps)


def _check_there(shard: Shard, piece: Piece) -> None:
    if piece.generation is not None:
        shard.slab(piece.generation)  # raises if the generation was dropped
        return
    oldest = shard.generations()[0]
    if oldest.number > 1 and piece.first < oldest.first_position:
        raise GenerationDroppedError(
            f"shard {shard.number}: messages that were not read yet have been dropped with their generation"
        )


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
