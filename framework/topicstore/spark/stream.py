"""The reader of streaming queries, whose offsets are positions, one for each shard, and the database's id.

::

    {"database": "<32 hexadecimal digits>", "0": 3481600000000000000, "1": …}

Offsets of a stream of a cluster (`topicstore.spark.cluster_stream`) are accepted too: copies of its database have the
same positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from topicstore.contract.errors import InvalidArgumentError, WrongDatabaseError
from topicstore.contract.positions import Positions
from topicstore.storage.storage import Storage

from .options import ReadSettings, Selection
from .reading import ReadRange, open_to_read, partitions_of, read, rows_of
from .schema import Shape

__all__ = ["TopicstoreStreamReader", "check_endless", "counts_within", "position_of", "positions_in"]

Offset = dict[str, int | str]
"""The last position that was read, by shard number, and the id of the database."""
Places = dict[str, int]
"""The positions of an offset, by shard number."""
_DATABASE = "database"


def check_endless(settings: ReadSettings) -> None:
    """Raise `InvalidArgumentError` for options that only batches have."""
    if settings.ends:
        raise InvalidArgumentError("a stream has no end: the option until is for batches")
    if settings.counted is not None:
        raise InvalidArgumentError(f"a stream is of messages: the option of={settings.counted} is for batches")


class TopicstoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of new messages in micro-batches. Between these the database is closed, so that writers can open it."""

    def __init__(self, settings: ReadSettings, schema: StructType) -> None:
        check_endless(settings)
        self._path = settings.path
        self._selection = settings.selection
        self._most = settings.most_messages
        self._tasks = settings.tasks
        self._shape = Shape(schema)
        self._target: Places | None = None
        """The offset at which a query with the trigger ``availableNow`` ends."""

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the offset before the first message of the option ``start``, or before the oldest message.

        The offset is never after the newest message.
        """
        with open_to_read(self._path) as storage:
            places = {}
            for shard in storage.shards:
                first = max(shard.generations.listed()[0].first_position, self._selection.first)
                places[str(shard.number)] = min(first - 1, shard.writer.tail.last_position)
            return _offset(storage, places)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Return the end of the next micro-batch: all stored messages, or as many as the limit allows.

        Raises `WrongDatabaseError` if ``start`` belongs to another database, such as an earlier one at this path, and
        `PlaceAheadError` if the database has lost messages that were read.
        """
        with open_to_read(self._path) as storage:
            begin, latest = _places(storage, start), self._target or _latest(storage)
            # Offsets never decrease, even if messages were read after the target of `prepareForTriggerAvailableNow`.
            end = {number: max(last, latest.get(number, last)) for number, last in begin.items()}
            if isinstance(limit, ReadMaxRows):
                end = self._limited(storage, begin, end, limit.max_rows)
            return _offset(storage, end)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of the option ``maxMessagesPerTrigger``."""
        return ReadAllAvailable() if self._most is None else ReadMaxRows(self._most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Record the current end of the stored messages, at which the query is to end."""
        with open_to_read(self._path) as storage:
            self._target = _latest(storage)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the partitions of the messages between two offsets."""
        with open_to_read(self._path) as storage:
            ranges = _ranges(_places(storage, start), _places(storage, end))
            for read_range in ranges[:1]:
                storage.shards[read_range.shard].writer.open_engine()  # sets `mode` for `partitions_of`
            return partitions_of(storage, ranges, self._selection, self._tasks)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        return rows_of(self._path, partition, self._shape)

    def _limited(self, storage: Storage, start: Places, end: Places, rows: int) -> Places:
        """Return the positions after the first ``rows`` messages, in order of positions over all shards."""
        ahead = {str(p.shard): positions_in(storage, p, self._selection, rows) for p in _ranges(start, end)}
        places = dict(end)
        for (number, there), count in zip(ahead.items(), counts_within([*ahead.values()], rows), strict=True):
            # A shard whose matching messages are all in the batch is read up to ``end``: nothing else matches there.
            if count < len(there) or count == rows:
                places[number] = int(there[count - 1]) if count else start[number]
        return places


def counts_within(ahead: Sequence[Positions], rows: int) -> list[int]:
    """Return, by shard, how many of its positions are among the ``rows`` lowest positions of all shards.

    ``ahead`` has, by shard, the next positions, at most ``rows``. Equal positions are taken in order of the shards.
    """
    numbers = np.repeat(np.arange(len(ahead)), [len(positions) for positions in ahead])
    positions = np.concatenate([*ahead, np.empty(0, dtype=np.uint64)])
    chosen: list[int] = np.bincount(numbers[np.lexsort((numbers, positions))[:rows]], minlength=len(ahead)).tolist()
    return chosen


def _offset(storage: Storage, places: Places) -> Offset:
    return {_DATABASE: storage.manifest.id, **places}


def _places(storage: Storage, offset: Offset) -> Places:
    """Return the positions of an offset. Raises `WrongDatabaseError`, and `PlaceAheadError` if messages were lost."""
    database = offset.get(_DATABASE)
    if database != storage.manifest.id:
        raise WrongDatabaseError(
            f"the stream's offset is of database {database}, and {storage.path} is database {storage.manifest.id} now: "
            "begin with a new checkpoint"
        )
    places = {number: position_of(place) for number, place in offset.items() if number != _DATABASE}
    for number, last in places.items():
        storage.shards[int(number)].reader.check_reached(last)
    return places


def position_of(place: Any) -> int:
    """Return the position in a shard's entry of a stream's offset.

    The entry is the position itself, or in the offset of a cluster's stream an object with the field ``position``.
    """
    return int(place["position"] if isinstance(place, dict) else place)


def _latest(storage: Storage) -> Places:
    return {str(shard.number): shard.writer.watermark for shard in storage.shards}


def _ranges(start: Places, end: Places) -> list[ReadRange]:
    return [ReadRange(int(n), None, last + 1, end[n]) for n, last in start.items() if last < end[n]]


def positions_in(storage: Storage, read_range: ReadRange, selection: Selection, rows: int) -> Positions:
    """Return the positions of the first ``rows`` selected messages of a range, in ascending order."""
    found: list[Positions] = [np.empty(0, dtype=np.uint64)]
    for batch in read(storage, read_range, selection.filters, timestamps=selection.timestamps, order="time"):
        found.append(batch.positions)
        if sum(map(len, found)) >= rows:
            break
    return np.concatenate(found)[:rows]
