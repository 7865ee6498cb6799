"""Reading a database in Spark's processes, and the reader of batch queries.

The driver plans ranges from one snapshot of the database; each task reads its ranges from a snapshot of the same time
or later. Spark may reuse a plan for later queries. So the last range of each shard is open-ended, and its task also
reads messages stored after planning. All other ranges are bounded by positions.

Spark needs tens of milliseconds for a task that reads nothing. So there are only as many tasks as the query asks for,
each of which reads the ranges of several shards and generations, one after the other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from topicstore.contract.arrow import fields_of, selected
from topicstore.contract.batch import ALL_FIELDS, MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.replay_plan import Order, TimeRange
from topicstore.contract.topics import TopicFilter
from topicstore.opening import open_lazily
from topicstore.shard.shard import Shard
from topicstore.storage.directory.manifest import existing_manifest
from topicstore.storage.storage import Storage

from .options import ReadSettings, Selection
from .schema import Shape

__all__ = [
    "PushingReader",
    "RangesPartition",
    "ReadRange",
    "TopicstoreReader",
    "open_to_read",
    "partitions_of",
    "ranges_of",
    "read",
    "rows_of",
]

_BATCH = 32_768
"""The maximum number of messages in a record batch, large enough to make the overhead of each batch negligible."""
_WORTH_CUTTING = 65_536
"""The minimum number of messages in a part of a divided range, if they are evenly distributed."""


@attrs.frozen
class ReadRange:
    """The positions of a shard from ``first`` to ``last``, both inclusive."""

    shard: int
    generation: int | None
    """The generation to read; None for all live ones. Reading fails if a generation that it needs was dropped."""
    first: int
    last: int
    messages: int = 0
    """The approximate number of messages of all topics in the range; 0 if it is unknown."""


def open_to_read(path: str) -> AbstractContextManager[Storage]:
    """Open a database for reading; each shard is opened on first use."""
    return closing(open_lazily(Path(path)))


def ranges_of(storage: Storage, selection: Selection, tasks: int = 1) -> list[ReadRange]:
    """Return the ranges of a selection: one for each shard and generation; the last of each shard is open-ended.

    A range with more messages than each of ``tasks`` tasks should read is divided into equal spans of positions.
    """
    numbers = [number for number in range(storage.manifest.shards) if selection.of_shard(number)]
    found = [read_range for number in numbers for read_range in _ranges_of_shard(storage.shards[number], selection)]
    share = sum(read_range.messages for read_range in found) / tasks
    return [
        part
        for read_range in found
        for part in _cut(
            storage, read_range, min(read_range.messages // _WORTH_CUTTING, round(read_range.messages / (share or 1)))
        )
    ]


def _ranges_of_shard(shard: Shard, selection: Selection) -> Iterator[ReadRange]:
    for record in shard.generations.listed():
        current = record.last_position is None
        end = selection.last if record.last_position is None else record.last_position
        first, last = max(selection.first, record.first_position), min(selection.last, end)
        if selection.timestamps is not None and not current:
            spans = shard.reader.spans(selection.timestamps, first, last)
            first, last = (spans[0][0], spans[-1][1]) if spans else (1, 0)
        if first <= last:
            yield ReadRange(shard.number, None if current else record.number, first, last, record.messages)


def _cut(storage: Storage, read_range: ReadRange, parts: int) -> Iterator[ReadRange]:
    """Divide a range into ``parts`` ranges of equal spans, from its oldest to its newest message."""
    end = min(read_range.last, storage.shards[read_range.shard].writer.watermark)
    if parts < 2 or end < read_range.first:
        yield read_range
        return
    oldest = next((int(batch.positions[0]) for batch in read(storage, read_range, ("#",), order="time")), end)
    starts = [read_range.first, *(oldest + (end - oldest) * part // parts for part in range(1, parts))]
    for start, after in pairwise([*starts, read_range.last + 1]):
        if start < after:
            yield attrs.evolve(read_range, first=start, last=after - 1, messages=read_range.messages // parts)


def read(
    storage: Storage,
    read_range: ReadRange,
    filters: tuple[str, ...],
    *,
    timestamps: TimeRange | None = None,
    order: Order = "any",
    columns: frozenset[str] = ALL_FIELDS,
) -> Iterator[MessageBatch]:
    """Yield the messages of a range that match one of ``filters``, which are disjoint, one filter after the other.

    ``timestamps``: only messages whose own time is within this range. ``order``: as for `Database.replay`.
    ``columns``: the columns to read; others may be missing.
    Raises `GenerationDroppedError` if messages were dropped after the range was planned.
    """
    shard = storage.shards[read_range.shard]
    _check_there(shard, read_range)
    for text in filters:
        parsed, began = TopicFilter(text), time.monotonic()
        whole = storage.plan_shard(
            read_range.shard, parsed, read_range.first, read_range.last, since=began, timestamps=timestamps
        )
        chosen = [part for part in whole.generations if read_range.generation in (None, part.cursors[0].generation)]
        plans = [attrs.evolve(whole, generations=chosen)]
        yield from storage.run_shards(plans, _BATCH, order, timestamps, columns)


def _check_there(shard: Shard, read_range: ReadRange) -> None:
    if read_range.generation is not None:
        shard.generations.slab(read_range.generation)  # raises an error if it was dropped
        return
    oldest = shard.generations.listed()[0]
    if oldest.number > 1 and read_range.first < oldest.first_position:
        raise GenerationDroppedError(
            f"shard {shard.number}: messages that were not read yet have been dropped with their generation"
        )


class RangesPartition(InputPartition):
    """The input of one task: its ranges, and the query's topic filters and time range."""

    def __init__(self, ranges: tuple[ReadRange, ...], filters: tuple[str, ...], timestamps: TimeRange | None) -> None:
        super().__init__((ranges, filters, timestamps))
        self.ranges = ranges
        self.filters = filters
        self.timestamps = timestamps


def partitions_of(
    storage: Storage, ranges: Sequence[ReadRange], selection: Selection, tasks: int
) -> list[InputPartition]:
    """Return at most ``tasks`` partitions with about the same number of messages each.

    Neighbouring ranges share a partition, so that few tasks have to open the same shard. There is a single partition
    if only one process can have the database open. There is always at least one, because Spark can't plan a query
    without partitions.
    """
    most = 1 if storage.mode == "owner" else tasks
    groups: defaultdict[int, list[ReadRange]] = defaultdict(list)
    total, done = sum(read_range.messages + 1 for read_range in ranges), 0
    for read_range in ranges:
        size = read_range.messages + 1  # empty ranges need a size, too, by which they are put into one group
        groups[(2 * done + size) * most // (2 * total)].append(read_range)
        done += size
    chosen = list(map(tuple, groups.values())) or [()]
    return [RangesPartition(group, selection.filters, selection.timestamps) for group in chosen]


def rows_of(path: str, partition: InputPartition, shape: Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition; called in a task."""
    assert isinstance(partition, RangesPartition)  # noqa: S101 - Spark passes the same object
    if not partition.ranges:
        return
    times = partition.timestamps
    columns = fields_of(selected(shape.names)) | ({"timestamps"} if times is not None else set())
    with open_to_read(path) as storage:
        for read_range in partition.ranges:
            for batch in read(storage, read_range, partition.filters, timestamps=times, columns=columns):
                yield shape.of(batch.to_arrow(columns=shape.names))


class TopicstoreReader(DataSourceReader):
    """A reader of the messages stored when the query is planned, and of later ones until its tasks begin."""

    def __init__(self, settings: ReadSettings, schema: StructType) -> None:
        self.path = settings.path
        self.selection = settings.selection
        self._tasks = settings.tasks
        self._shape = Shape(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return the partitions of the messages stored at this moment."""
        with open_to_read(self.path) as storage:
            ranges = ranges_of(storage, self.selection, self._tasks)
            return partitions_of(storage, ranges, self.selection, self._tasks)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        return rows_of(self.path, partition, self._shape)


class _Pushing:
    """A ``pushFilters`` that accepts conditions, but that Spark doesn't recognize as an override.

    Without ``spark.sql.python.filterPushdown.enabled`` Spark refuses readers that override ``pushFilters``, because
    conditions could be lost (https://github.com/apache/spark/pull/49961). This one returns all conditions to Spark.
    """

    def __init__(self, reader: PushingReader) -> None:
        self.__func__ = DataSourceReader.pushFilters  # Spark detects overrides by this attribute
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        self._reader.narrow(filters)
        return filters


class PushingReader(TopicstoreReader):
    """A reader that skips messages that can't meet the query's conditions."""

    @property
    def pushFilters(self) -> _Pushing:  # noqa: N802 - Spark's name
        """Narrow the read to messages that may meet the conditions."""
        return _Pushing(self)

    def narrow(self, conditions: Iterable[Filter]) -> None:
        """Exclude messages that can't meet the conditions from the selection."""
        self.selection = self.selection.narrowed(conditions, existing_manifest(Path(self.path)))
