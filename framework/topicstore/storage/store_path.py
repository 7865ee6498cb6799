"""The implementation behind the data-path hooks: it works on the shards of one database."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.engine import STATE
from topicstore.contract.errors import InvalidMessageError, PluginError
from topicstore.contract.hookspecs import hookimpl
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import ReplayPlan
from topicstore.contract.requests import (
    ReadRequest,
    ReadResult,
    ReplayRequest,
    StoreRequest,
    StoreResult,
)
from topicstore.runtime.locks import holding
from topicstore.shard.shard import Shard
from topicstore.shard.write_path import Prepared
from topicstore.shard.writer import Ticket

from .keyed_message_records import GENERATION as KEYED
from .keyed_message_records import encode_keyed, read_keyed
from .shard_map import ShardMap

__all__ = ["DataPath"]

BATCH_BYTES = 8 << 20
"""The number of payload bytes after which a batch that is read ends early, so that large payloads don't fill memory."""

_Rows = np.ndarray | None


class DataPath:
    """The implementation of the data-path hooks over the shards of one database."""

    def __init__(self, database: bytes, shard_map: ShardMap, clock: Callable[[], int]) -> None:
        self._database = database
        self.shards: Sequence[Shard] = ()
        """The shards, set when they are open. Unsuitable plugins are refused before that, and before a file is made."""
        self._shard_map = shard_map
        self._clock = clock

    @hookimpl
    def topicstore_store(self, request: StoreRequest) -> StoreResult:
        """Commit each shard's part of the batch; all parts are checked before the first is committed."""
        started = time.perf_counter()
        parts = _parts(request, self._shard_map)
        touched = [self.shards[number] for number, _, _ in parts]
        tickets: list[Ticket] = []

        def commit() -> list[Prepared]:
            try:
                prepared = _prepare_all(parts, touched, request)
                _add_keyed(request, parts, prepared, self._clock)
                _submit(touched, prepared, tickets)
            except BaseException:
                for shard in touched[len(tickets) :]:
                    shard.counters.failed_batches += 1
                raise
            return prepared

        try:
            prepared = holding((shard.lock for shard in touched), commit)
        finally:  # even if a shard failed, because others have committed
            _settle_all(touched[: len(tickets)], tickets)
        seconds = time.perf_counter() - started
        for shard in touched:
            shard.latencies.store.observe(seconds)
        rejoin = functools.partial(_rejoin, parts, prepared)
        count = sum(len(part) for _, _, part in parts)
        return StoreResult(count=count, lifted=sum(p.lifted for p in prepared), rejoin=rejoin)

    @hookimpl
    def topicstore_read(self, request: ReadRequest) -> ReadResult:
        """Return the next batch of the cursor."""
        cursor = request.cursor
        if cursor.generation == KEYED:
            return read_keyed(request, self.shards[cursor.shard])
        bound = request.bound
        if request.until is not None:
            before = first_position(request.until) - 1
            bound = before if bound is None else min(bound, before)
        return self.shards[cursor.shard].next(
            cursor,
            rows=request.limit,
            size=BATCH_BYTES,
            bound=bound,
            deadline=None if request.timeout is None else time.monotonic() + request.timeout,
            final=request.bound is not None,
        )

    @hookimpl
    def topicstore_replay(self, request: ReplayRequest) -> ReplayPlan:
        """Return a plan of each shard's generations in turn, each with the streams that its layout finds cheapest."""
        began = time.monotonic()
        bounds = [_bound(shard, request) for shard in self.shards]  # all at one moment, because planning may wait
        first = first_position(request.start)
        plans = [
            shard.plan(self._database, request.topic_filter, first, bound, since=began, timestamps=request.timestamps)
            for shard, bound in zip(self.shards, bounds, strict=True)
        ]
        plans = [plan for plan in plans if plan.generations]
        return ReplayPlan(
            shards=plans, order=request.order, batch_size=request.batch_size, timestamps=request.timestamps
        )


def _parts(request: StoreRequest, shard_map: ShardMap) -> list[tuple[int, _Rows, MessageBatch]]:
    """Return (shard, rows of the batch, their messages) for every shard that gets messages or state."""
    chosen, batch = _to_streams(request)
    parts = {
        shard: (_within(chosen, rows), batch if rows is None else batch.take(rows))
        for shard, rows in _split(batch, shard_map)
    }
    nothing = np.empty(0, dtype=np.intp)
    keyed = () if request.destinations is None else request.destinations.keyed.values()
    for shard in (*request.state, *(shard for shard, _ in keyed)):
        parts.setdefault(shard, (nothing, MessageBatch.empty()))
    return [(shard, rows, part) for shard, (rows, part) in sorted(parts.items())]


def _to_streams(request: StoreRequest) -> tuple[_Rows, MessageBatch]:
    """Return the rows and messages of the batch that go to the streams; the rows are None if all messages do."""
    batch, destinations = request.batch, request.destinations
    if destinations is None:
        return None, batch
    if len(batch) != len(destinations.stored):
        raise PluginError("a plugin changed the number of messages, some of which are to be kept or only routed")
    rows = np.flatnonzero(destinations.stored)
    return (None, batch) if len(rows) == len(batch) else (rows, batch.take(rows))


def _within(chosen: _Rows, rows: _Rows) -> _Rows:
    """Return the indices in the whole batch of ``rows`` of the chosen rows. None stands for all rows."""
    if chosen is None or rows is None:
        return chosen if rows is None else rows
    return chosen[rows]


def _add_keyed(
    request: StoreRequest,
    parts: list[tuple[int, _Rows, MessageBatch]],
    prepared: list[Prepared],
    clock: Callable[[], int],
) -> None:
    """Add the messages that are stored under a key to the writes of their shards."""
    if request.destinations is not None and request.destinations.keyed:
        writes = {shard: ready.write for (shard, _, _), ready in zip(parts, prepared, strict=True)}
        placed = _rejoin(parts, prepared)
        for shard, key, value in encode_keyed(request.batch, request.destinations, placed, clock()):
            writes[shard].put(STATE, key, value)


def _split(batch: MessageBatch, shard_map: ShardMap) -> list[tuple[int, _Rows]]:
    return shard_map.split(batch.client_ids) if len(batch) else []


def _submit(shards: list[Shard], prepared: list[Prepared], tickets: list[Ticket]) -> None:
    """Encode every shard's part, then commit them all.

    Each ticket is added when its part is committed, so that those before a failed one are settled too.
    """
    for number, shard in enumerate(shards):
        prepared[number] = shard.encode(prepared[number])
    for shard, ready in zip(shards, prepared, strict=True):
        tickets.append(shard.commit(ready))


def _settle_all(shards: list[Shard], tickets: list[Ticket]) -> None:
    """Settle every shard's part, even after one that fails, because committed messages must become visible."""
    failures: list[BaseException] = []
    for shard, ticket in zip(shards, tickets, strict=True):
        try:
            shard.settle(ticket)
        except BaseException as failed:  # noqa: BLE001 - the first one is raised when all are settled
            shard.counters.failed_batches += 1
            failures.append(failed)
    if failures:
        raise failures[0]


def _prepare_all(
    parts: list[tuple[int, _Rows, MessageBatch]], shards: list[Shard], request: StoreRequest
) -> list[Prepared]:
    """Check every shard's part. The error names the first message in the batch that a shard refuses."""
    prepared, refused = [], []
    for shard, (_, rows, part) in zip(shards, parts, strict=True):
        try:
            prepared.append(_prepare(shard, part, rows, request))
        except InvalidMessageError as bad:
            refused.append(bad)
    if refused:
        raise min(refused, key=lambda bad: -1 if bad.index is None else bad.index)
    return prepared


def _prepare(shard: Shard, batch: MessageBatch, rows: _Rows, request: StoreRequest) -> Prepared:
    try:
        return shard.prepare(batch, request.state.get(shard.number, ()))
    except InvalidMessageError as bad:
        if bad.index is None or rows is None:
            raise
        raise type(bad)(bad.reason, int(rows[bad.index])) from bad


def _rejoin(parts: list[tuple[int, _Rows, MessageBatch]], prepared: list[Prepared]) -> MessageBatch:
    """Return all messages that went to streams, with their shards, positions and times, in the order of the batch."""
    stored = [ready.batch for ready in prepared if len(ready.batch)]
    if len(stored) < 2:
        return stored[0] if stored else MessageBatch.empty()
    rows = np.concatenate([rows for _, rows, part in parts if len(part) and rows is not None])
    return MessageBatch.concat(stored).take(np.argsort(rows))


def _bound(shard: Shard, request: ReplayRequest) -> int:
    """Return the highest position that the replay may return."""
    if request.until is None:
        return shard.watermark
    return min(shard.watermark, first_position(request.until) - 1)
