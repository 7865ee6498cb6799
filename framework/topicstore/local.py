"""The implementation behind the data-path hooks: it works on the shards of one database."""

from __future__ import annotations

import functools
import time

import numpy as np

from .batch import MessageBatch
from .errors import InvalidMessageError, TopicstoreError
from .iterators import Iterator
from .layout import Slab
from .locking import held
from .plugins import hookimpl
from .positions import first_position
from .replay import Lane, ReplayPlan, Stage
from .requests import IterateRequest, NextResult, ReplayRequest, StoreRequest, StoreResult, Stream, StreamsRequest
from .shard import Prepared, Shard
from .sharding import ShardMap
from .topics import TopicFilter

__all__ = ["LocalStore"]

BATCH_BYTES = 8 << 20
"""Payload bytes after which a batch that is read ends early, so that large payloads don't fill memory."""

_Rows = np.ndarray | None


class LocalStore:
    """Stores to, lists, reads and plans over `Database.shards`."""

    @hookimpl
    def topicstore_store(self, request: StoreRequest) -> StoreResult:
        """Commit each shard's part; all parts are checked before the first is committed."""
        parts = _parts(request)
        shards = request.db.shards
        touched = [shards[number] for number, _, _ in parts]
        with held(shard.lock for shard in touched):
            prepared = _prepare_all(parts, request)
            prepared = [shard.encode(ready) for shard, ready in zip(touched, prepared, strict=True)]
            tickets = [shard.commit(ready) for shard, ready in zip(touched, prepared, strict=True)]
        _settle_all(touched, tickets)
        rejoin = functools.partial(_rejoin, request.batch, parts, prepared)
        return StoreResult(count=len(request.batch), lifted=sum(p.lifted for p in prepared), rejoin=rejoin)

    @hookimpl
    def topicstore_streams(self, request: StreamsRequest) -> list[Stream]:
        """List every shard's live generations, but those that ended before the start."""
        first = first_position(request.start)
        return [
            Stream(
                shard=shard.number,
                generation=record.number,
                number=info.stream,
                pattern=info.pattern,
                sealed=record.sealed is not None,
            )
            for shard in request.db.shards
            for record, slab in shard.slabs()
            if record.last_position is None or record.last_position >= first
            for info in slab.streams(request.topic_filter)
        ]

    @hookimpl
    def topicstore_iterate(self, request: IterateRequest) -> NextResult:
        """Read on from the iterator's place."""
        iterator = request.iterator
        bound = request.bound
        if request.until is not None:
            before = first_position(request.until) - 1
            bound = before if bound is None else min(bound, before)
        step, ended = request.db.shards[iterator.shard].next(
            iterator.generation,
            iterator.stream,
            TopicFilter(iterator.topic_filter),
            iterator.place,
            limit=request.limit,
            limit_bytes=BATCH_BYTES,
            bound=bound,
            deadline=None if request.timeout is None else time.monotonic() + request.timeout,
        )
        moved = Iterator(
            iterator.database,
            iterator.shard,
            iterator.generation,
            iterator.stream,
            iterator.topic_filter,
            step.place,
        )
        return NextResult(batch=step.batch, iterator=moved, end_of_stream=ended, caught_up=step.exhausted)

    @hookimpl
    def topicstore_replay(self, request: ReplayRequest) -> ReplayPlan:
        """Read each shard's generations in turn, by the streams that its layout finds cheapest."""
        began = time.monotonic()
        bounds = [_bound(shard, request) for shard in request.db.shards]  # of one moment: planning may wait
        lanes = [_lane(shard, bound, request, began) for shard, bound in zip(request.db.shards, bounds, strict=True)]
        lanes = [lane for lane in lanes if lane.stages]
        return ReplayPlan(lanes=lanes, order=request.order, batch_size=request.batch_size)


def _parts(request: StoreRequest) -> list[tuple[int, _Rows, MessageBatch]]:
    """Return (shard, rows of the batch, their messages) for every shard that gets messages or state."""
    batch, shard_map = request.batch, request.db.shard_map
    parts = {shard: (rows, batch if rows is None else batch.take(rows)) for shard, rows in _split(batch, shard_map)}
    nothing = np.empty(0, dtype=np.intp)
    for shard in request.state:
        parts.setdefault(shard, (nothing, MessageBatch.empty()))
    return [(shard, rows, part) for shard, (rows, part) in sorted(parts.items())]


def _split(batch: MessageBatch, shard_map: ShardMap) -> list[tuple[int, _Rows]]:
    return shard_map.split(batch.client_ids) if len(batch) else []


def _settle_all(shards: list[Shard], tickets: list[int]) -> None:
    """Settle every shard's part, also behind one that fails: what is committed must become visible."""
    failures = []
    for shard, ticket in zip(shards, tickets, strict=True):
        try:
            shard.settle(ticket)
        except TopicstoreError as failed:
            failures.append(failed)
    if failures:
        raise failures[0]


def _prepare_all(parts: list[tuple[int, _Rows, MessageBatch]], request: StoreRequest) -> list[Prepared]:
    """Check every shard's part; of the messages that shards refuse, the first in the batch is named."""
    prepared, refused = [], []
    for number, rows, part in parts:
        try:
            prepared.append(_prepare(request.db.shards[number], part, rows, request))
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


def _rejoin(
    batch: MessageBatch, parts: list[tuple[int, _Rows, MessageBatch]], prepared: list[Prepared]
) -> MessageBatch:
    """Return the whole batch with what its shards gave it, in the order handed in."""
    stored = [ready.batch for ready in prepared if len(ready.batch)]
    if len(stored) < 2:
        return stored[0] if stored else batch
    rows = np.concatenate([rows for _, rows, part in parts if len(part) and rows is not None])
    return MessageBatch.concat(stored).take(np.argsort(rows))


def _bound(shard: Shard, request: ReplayRequest) -> int:
    """Return the highest position that the replay is to return."""
    if request.until is None:
        return shard.watermark
    return min(shard.watermark, first_position(request.until) - 1)


def _lane(shard: Shard, bound: int, request: ReplayRequest, began: float) -> Lane:
    first = first_position(request.start)
    stages = []
    for record, slab in shard.slabs() if first <= bound else ():
        if record.first_position > bound or (record.last_position is not None and record.last_position < first):
            continue
        streams = slab.cover(request.topic_filter, first)
        if record.sealed is None and any(slab.visible(stream, shard.watermark) < bound for stream in streams):
            shard.end_epoch(record.number, bound, wait=True, since=began)
        if streams:
            stages.append(Stage(_iterators(shard.number, record.number, slab, streams, first, request), slab.epoch))
    return Lane(shard=shard.number, bound=bound, stages=stages)


def _iterators(
    shard: int, generation: int, slab: Slab, streams: list[int], first: int, request: ReplayRequest
) -> list[Iterator]:
    database, topic_filter = bytes.fromhex(request.db.manifest.id), request.topic_filter
    return [
        Iterator(database, shard, generation, stream, topic_filter.text, slab.begin(stream, topic_filter, first))
        for stream in streams
    ]
