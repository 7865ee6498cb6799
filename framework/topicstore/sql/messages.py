"""`MessagesTable`: the messages of a database as a table that DuckDB scans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from topicstore.contract.arrow import SCHEMA, SCHEMA_WITH_IDS
from topicstore.contract.arrow import fields_of as batch_columns
from topicstore.contract.batch import MessageBatch
from topicstore.contract.positions import COUNTER_BITS
from topicstore.contract.replay_plan import ReplayPlan, TimeRange
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.cancelling import wanted, while_wanted
from topicstore.storage import replays
from topicstore.storage.storage import Storage

from .conditions import Selection, fields_of, selection_of

__all__ = ["MESSAGES", "MessagesTable", "rows_of"]

_TIME = pa.timestamp("us", tz="UTC")
MESSAGES = pa.schema(
    [
        pa.field("time", _TIME, nullable=False),
        *(field for field in SCHEMA if field.name != "properties"),
        pa.field("payload_bytes", pa.uint32(), nullable=False),
        *map(SCHEMA_WITH_IDS.field, ("properties", "shard", "position")),
    ]
)
"""The columns of the table ``messages``: those of `topicstore.SCHEMA_WITH_IDS`, the time of the position, and the size
of the payload."""
_BATCH = 32_768
"""The maximum number of messages in a record batch, large enough to make the overhead of each batch negligible."""
_MADE_OF = {"time": "position", "payload_bytes": "payload"}
"""The columns that are computed from others."""


class MessagesTable(ds.Dataset):  # type: ignore[misc]
    """The messages that ``#`` matches and that were stored before the table was made.

    DuckDB calls `scanner` for each scan of a statement, with the columns and the condition of the scan. Only messages
    that may meet the condition are read. The errors of reading are kept, because DuckDB raises its own in their place.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._bounds = [
            shard.reader.watermark if shard.elsewhere is None else shard.elsewhere.current_watermark()
            for shard in storage.shards
        ]
        self._wanted = wanted()
        """Whether the calling thread's work is still wanted. DuckDB reads in other threads."""
        self.error: BaseException | None = None
        """The first error of reading."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return MESSAGES

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - the name that DuckDB uses
        **_: Any,
    ) -> _Scan:
        """Return a scan of some columns (None for all) of the messages that meet an expression."""
        names = MESSAGES.names if columns is None else list(columns)
        if filter is None:
            return _Scan(names, self._noting_errors(self._read(Selection(), names)))
        used = fields_of(filter)
        read = MESSAGES.names if used is None else [name for name in MESSAGES.names if name in used or name in names]
        found = self._read(selection_of(filter), read)
        return _Scan(names, self._noting_errors(batch.filter(filter).select(names) for batch in found))

    def _noting_errors(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            with nullcontext() if self._wanted is None else while_wanted(self._wanted):
                yield from batches
        except GeneratorExit:  # the statement needs no more
            raise
        except BaseException as error:
            self.error = self.error or error
            raise

    def _read(self, selection: Selection, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        needed = list(dict.fromkeys(_MADE_OF.get(name, name) for name in names))
        columns = batch_columns(pa.schema([SCHEMA_WITH_IDS.field(name) for name in needed]))
        if selection.timestamp != TimeRange():
            columns |= {"timestamps"}
        fetch = partial(self._storage.fetch, columns=columns)
        for plan in self._plans(selection):
            for batch in replays.run(plan, fetch):
                yield rows_of(batch, names)

    def _plans(self, selection: Selection) -> list[ReplayPlan]:
        """Return a plan for each filter of a selection, up to the bounds by shard."""
        storage, time = self._storage, selection.time
        if time.until is not None and time.start >= time.until:
            return []
        plans = [storage.plan(self._request(topic_filter, selection)) for topic_filter in selection.filters()]
        shards = selection.shards
        if selection.clients is not None:
            of_clients = frozenset(map(storage.shard_of, selection.clients))
            shards = of_clients if shards is None else shards & of_clients
        return [
            attrs.evolve(
                plan,
                shards=[
                    attrs.evolve(part, bound=min(part.bound, self._bounds[part.shard]))
                    for part in plan.shards
                    if shards is None or part.shard in shards
                ],
            )
            for plan in plans
        ]

    def _request(self, topic_filter: TopicFilter, selection: Selection) -> ReplayRequest:
        own = selection.timestamp
        return ReplayRequest(
            db=self._storage,
            topic_filter=topic_filter,
            start=selection.time.start,
            until=selection.time.until,
            order="any",
            batch_size=_BATCH,
            timestamps=None if own == TimeRange() else own,
        )


class _Scan:
    """A scan, in the form in which DuckDB requests its batches."""

    def __init__(self, names: Sequence[str], batches: Iterator[pa.RecordBatch]) -> None:
        self._schema = pa.schema([MESSAGES.field(name) for name in names])
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of the batches."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches)


def rows_of(batch: MessageBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return the named columns of the table ``messages`` for stored messages."""
    needed = list(dict.fromkeys(_MADE_OF.get(name, name) for name in names))
    found = batch.to_arrow(columns=needed)
    columns = {name: found.column(name) for name in needed}
    if "time" in names:
        columns["time"] = pa.array((batch.positions >> np.uint64(COUNTER_BITS)).view(np.int64)).cast(_TIME)
    if "payload_bytes" in names:
        columns["payload_bytes"] = pc.binary_length(columns["payload"]).cast(pa.uint32())
    schema = pa.schema([MESSAGES.field(name) for name in names])
    return pa.RecordBatch.from_arrays([columns[name] for name in names], schema=schema)
