"""The reader of a cluster's messages as a stream: straight from the log store, without any site.

An offset has a place in each shard's log (`topicstore.replication.log_messages`), and the database's id::

    {"database": "<32 hexadecimal digits>",
     "0": {"position": 3481600000000000000, "entry": 17, "epoch": 3, "checksum": "<32 hexadecimal digits>",
           "last": 3481600000000000000, "deleted": -1}, …}

All messages up to ``position`` were read, as in the stream of a directory. So each message is returned once, even if
the shard's owner changes or its log is truncated. ``entry`` is the index of the entry to be read next, so that a
micro-batch doesn't search the log for the position. ``epoch``, ``checksum`` and ``last`` are the owner's fencing token,
the checksum and the last position before this entry. By these a reader detects entries of fenced owners, and a
different log.
``deleted`` is the last entry before ``entry`` that is known to delete messages. An offset of a stream that reads a
directory of the same database, such as a site's, has positions only, and is accepted.

The driver reads the entries after an offset to find the next offset, and each task reads the entries of one shard
again, for their messages. If the log is truncated after the offset, the task reads the messages from a copy of the
shard, like a task of a batch query (`topicstore.spark.cluster`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import WrongDatabaseError
from topicstore.contract.log_store import LogStore
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter, matches_any
from topicstore.opening import shared_manifest
from topicstore.replication.heads import BEGINNING, Progress
from topicstore.replication.log_messages import (
    Limited,
    MessagesBetween,
    Place,
    latest,
    limited,
    rows_of_topics,
    sought,
)
from topicstore.replication.log_stores import open_for_reading
from topicstore.replication.settings import Cluster
from topicstore.storage.directory.manifest import Manifest

from .cluster import copy_of
from .options import ReadSettings
from .reading import ReadRange, open_to_read, read
from .schema import Shape
from .stream import check_endless, counts_within, position_of, positions_in

__all__ = ["ClusterStreamReader"]

T = TypeVar("T")
Offset = dict[str, Any]
"""The place in each shard's log, by shard number, and the id of the database."""
Places = dict[int, Place]
_DATABASE = "database"
_AT_ONCE = 4
"""The number of shards that the driver reads at the same time, because it mostly waits for the log store."""
_ROWS = 32_768
"""The maximum number of messages in a record batch."""


class _SpanPartition(InputPartition):
    """The input of one task: the messages of a shard between two places; None for no messages."""

    def __init__(self, manifest: Manifest, span: tuple[int, Place, Place] | None) -> None:
        super().__init__((manifest, span))
        self.manifest = manifest
        self.span = span


class ClusterStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of a cluster's new messages in micro-batches, with a task for each shard that has any."""

    def __init__(self, settings: ReadSettings, cluster: Cluster, schema: StructType) -> None:
        check_endless(settings)
        self._cluster = cluster
        self._selection = settings.selection
        self._most = settings.most_messages
        self._shape = Shape(schema)
        self._filters = [*map(TopicFilter, self._selection.filters)]
        self._target: Places | None = None
        """The places at which a query with the trigger ``availableNow`` ends, empty until they are known; else None."""

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the offset before the first message of the option ``start``, or before the oldest message.

        The offset is never after the newest message. Raises the errors of `topicstore.opening.shared_manifest`.
        """
        manifest = shared_manifest(self._cluster)
        return _offset(manifest, self._of_shards(range(manifest.shards), lambda s, n: self._first(s, manifest, n)))

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch: all that is acknowledged, or as much as the limit allows.

        Raises `WrongDatabaseError` if ``start`` belongs to another database, and `PlaceAheadError` if the log store has
        lost messages that were read.
        """
        manifest = shared_manifest(self._cluster)
        begin = _places(manifest, start)
        if not isinstance(limit, ReadMaxRows):
            return _offset(manifest, self._ends(begin))
        ends: Places | None = self._ends(begin) if self._target is not None else None
        return _offset(manifest, self._limited(manifest, begin, ends, limit.max_rows))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of the option ``maxMessagesPerTrigger``."""
        return ReadAllAvailable() if self._most is None else ReadMaxRows(self._most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Make the query end at the ends that the logs have when Spark requests the first offset."""
        self._target = {}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the partitions of the messages between two offsets. Raises `WrongDatabaseError`."""
        manifest = shared_manifest(self._cluster)
        begin, after = _places(manifest, start), _places(manifest, end)
        spans = [(number, begin[number], place) for number, place in after.items()]
        there = [_SpanPartition(manifest, span) for span in spans if span[1].position < span[2].position]
        return there or [_SpanPartition(manifest, None)]  # without partitions, Spark can't plan a query

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition; called in a task.

        Raises `PlaceAheadError` if the log store has lost messages, `GenerationDroppedError` if messages that only a
        base has were dropped, and the errors of `topicstore.opening.copy_shard`.
        """
        assert isinstance(partition, _SpanPartition)  # noqa: S101 - Spark passes the same object
        if partition.span is None:
            return
        number, start, end = partition.span
        with closing(open_for_reading(self._cluster.url, self._cluster.options)) as store:
            there = MessagesBetween(store, number, start, end)
            for batch in there.batches():
                chosen = self._wanted(batch)
                for first in range(0, len(chosen), _ROWS):
                    yield self._shape.of(chosen[first : first + _ROWS].to_arrow(columns=self._shape.names))
        if there.cut:
            rest, times = ReadRange(number, None, there.position + 1, end.position), self._selection.timestamps
            with copy_of(self._cluster, partition.manifest, number) as path, open_to_read(path) as storage:
                for batch in read(storage, rest, self._selection.filters, timestamps=times, order="time"):
                    yield self._shape.of(batch.to_arrow(columns=self._shape.names))

    def _first(self, store: LogStore, manifest: Manifest, number: int) -> Place:
        """Return the place before a shard's first message of the selection."""
        before = max(self._selection.first - 1, 0)
        place = sought(store, number, before)
        if place is not None:
            return place
        with copy_of(self._cluster, manifest, number) as path, open_to_read(path) as storage:
            shard = storage.shards[number]
            first = max(shard.generations.listed()[0].first_position, self._selection.first)
            return Place(position=min(first - 1, shard.writer.tail.last_position), progress=BEGINNING)

    def _ends(self, begin: Places) -> Places:
        """Return the ends of the logs, or those at which a query with the trigger ``availableNow`` ends."""
        if self._target:
            return self._target
        ends = self._of_shards(begin, lambda store, number: latest(store, number, begin[number]))
        if self._target is not None:
            self._target = ends
        return ends

    def _limited(self, manifest: Manifest, begin: Places, ends: Places | None, rows: int) -> Places:
        """Return the places after the first ``rows`` messages, in order of positions over all shards."""

        def copied(number: int, first: int, last: int) -> Positions:
            with copy_of(self._cluster, manifest, number) as path, open_to_read(path) as storage:
                return positions_in(storage, ReadRange(number, None, first, last), self._selection, rows)

        def ahead(store: LogStore, number: int) -> Limited:
            target = None if ends is None else ends[number]
            return limited(store, number, begin[number], target, rows, self._wanted, partial(copied, number))

        found = self._of_shards(begin, ahead)
        counts = counts_within([one.positions for one in found.values()], rows)
        # A shard whose matching messages are all in the batch is read up to its end: nothing else matches there.
        return {
            number: one.place(count) if count < len(one.positions) or count == rows else one.end
            for (number, one), count in zip(found.items(), counts, strict=True)
        }

    def _of_shards(self, shards: Iterable[int], read: Callable[[LogStore, int], T]) -> dict[int, T]:
        """Return a function's results, one for each shard. Several are read at the same time."""
        with (
            closing(open_for_reading(self._cluster.url, self._cluster.options)) as store,
            ThreadPoolExecutor(_AT_ONCE, "topicstore-shards") as threads,
        ):
            return dict(zip(shards, threads.map(lambda number: read(store, number), shards), strict=True))

    def _wanted(self, batch: MessageBatch) -> MessageBatch:
        """Return the messages of a batch that the selection has."""
        rows = rows_of_topics(batch.topics, partial(matches_any, self._filters))
        batch = batch if rows.all() else batch.take(np.flatnonzero(rows))
        times = self._selection.timestamps
        among = None if times is None else times.rows(batch.timestamps)
        return batch if among is None else batch.take(among)


def _offset(manifest: Manifest, places: Places) -> Offset:
    return {_DATABASE: manifest.id} | {str(number): _stored(place) for number, place in places.items()}


def _stored(place: Place) -> dict[str, int | str]:
    before = place.progress
    return {
        "position": place.position,
        "entry": before.next,
        "epoch": before.epoch,
        "checksum": before.before.hex(),
        "last": before.last_position,
        "deleted": place.deleted,
    }


def _place(stored: Any) -> Place:
    """Return a place of an offset; of a position without a prefix, which a stream of a directory has written, too."""
    position = position_of(stored)
    if not isinstance(stored, dict):
        return Place(position=position, progress=BEGINNING)
    before = Progress(stored["entry"], stored["epoch"], bytes.fromhex(stored["checksum"]), stored["last"])
    return Place(position=position, progress=before, deleted=stored["deleted"])


def _places(manifest: Manifest, offset: Offset) -> Places:
    """Return the places of an offset. Raises `WrongDatabaseError`."""
    database = offset.get(_DATABASE)
    if database != manifest.id:
        raise WrongDatabaseError(
            f"the stream's offset is of database {database}, and {manifest.cluster} holds database {manifest.id} now: "
            "begin with a new checkpoint"
        )
    return {int(number): _place(stored) for number, stored in offset.items() if number != _DATABASE}
