"""Replays: planning over all shards, fetching the next batch of a cursor, and yielding batches in the plan's order.

Shards are independent of each other. Within a shard, a generation is read only after the end of the previous one.
Within a generation, streams are independent, and take turns batch by batch, so that none waits for another to finish.

In order of time, streams are merged by position. If a layout has epochs, each stream is first
sorted one epoch at a time, which holds an epoch of each stream in memory. The merge holds some messages of every stream
in memory before it returns the first message.

The plan of a replay by timestamp omits the ranges that are known to have no message of the requested times. From each
fetched batch, only messages of these times are kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.cursors import Cursor
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import ReplayPlan, ShardPlan, TimeRange
from topicstore.contract.requests import ReadRequest, ReadResult, ReplayRequest
from topicstore.shard.shard import Shard

from .keyed_message_records import GENERATION as KEYED
from .keyed_message_records import read_keyed

__all__ = ["BATCH_BYTES", "Fetch", "in_order", "limited", "merge", "plan_replay", "read_batch", "run", "slices"]

Fetch = Callable[[Cursor, int, int], ReadResult]
"""A function that fetches the next batch of a cursor, up to a bound, of at most the given number of messages."""
_LEAST = 64
"""The minimum number of messages of a stream to fetch at once, however many streams are merged."""
BATCH_BYTES = 8 << 20
"""The maximum size of a batch's payloads in bytes, approximately, which bounds the memory of reads."""


def run(plan: ReplayPlan, fetch: Fetch) -> Iterator[MessageBatch]:
    """Yield the non-empty batches of a replay. If the plan has timestamps, ``fetch`` must read that column."""
    if plan.timestamps is not None:
        fetch = _only(plan.timestamps, fetch)
    if plan.order == "time":
        return merge([in_order(shard, fetch, plan.batch_size) for shard in plan.shards])
    return _take_turns([_by_generation(shard, fetch, plan.batch_size) for shard in plan.shards])


def _only(timestamps: TimeRange, fetch: Fetch) -> Fetch:
    """Return a function that fetches batches and removes the messages outside of the range of timestamps."""

    def fetch_only(cursor: Cursor, bound: int, limit: int) -> ReadResult:
        result = fetch(cursor, bound, limit)
        rows = timestamps.rows(result.batch.timestamps)
        return result if rows is None else attrs.evolve(result, batch=result.batch.take(rows))

    return fetch_only


def _by_generation(plan: ShardPlan, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    for generation in plan.generations:
        bound = min(plan.bound, generation.bound)
        yield from _take_turns([_stream(cursor, bound, fetch, limit) for cursor in generation.cursors])


def in_order(plan: ShardPlan, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    """Yield the non-empty batches of one shard in order of positions."""
    for generation in plan.generations:
        each = min(limit, max(limit // len(generation.cursors), _LEAST))  # some messages of every stream are held
        bound = min(plan.bound, generation.bound)
        streams = [_stream(cursor, bound, fetch, each) for cursor in generation.cursors]
        if generation.epoch > 1:
            streams = [_by_epoch(stream, generation.epoch) for stream in streams]
        yield from merge(streams)


def _stream(cursor: Cursor, bound: int, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    ended = False
    while not ended:
        result = fetch(cursor, bound, limit)
        held, cursor, ended = [result.batch], result.cursor, result.caught_up or result.end_of_stream
        del result  # a suspended stream must not hold the batch that it has yielded in memory
        if len(held[0]):
            yield held.pop()


def _by_epoch(stream: Iterator[MessageBatch], epoch: int) -> Iterator[MessageBatch]:
    """Sort a stream by position, one epoch at a time; the stream's epochs must be in order."""
    held: list[MessageBatch] = []
    for batch in stream:
        epochs = batch.positions // np.uint64(epoch)
        cut = int(np.searchsorted(epochs, epochs[-1]))  # the last epoch may continue in the next batch
        if cut or (held and held[-1].positions[-1] // np.uint64(epoch) != epochs[-1]):
            yield _sorted([*held, batch[:cut]])
            held = []
        held.append(batch[cut:])
    if held:
        yield _sorted(held)


def _take_turns(sources: list[Iterator[MessageBatch]]) -> Iterator[MessageBatch]:
    while sources:
        left = []
        for source in sources:
            held = list(islice(source, 1))
            if held:
                left.append(source)
                yield held.pop()
        sources = left


def merge(sources: list[Iterator[MessageBatch]]) -> Iterator[MessageBatch]:
    """Merge sources that are each in order of position; equal positions are in the order of the sources.

    The merge processes a whole run at a time. All messages up to the lowest last position of the sources' current
    batches are known, and are ordered by one stable sort. Of thousands of
    sources, only those with messages in the run are examined.
    """
    heads: list[tuple[int, int, MessageBatch]] = []  # a heap by first position, with at most one batch of each source
    lasts: list[int] = []
    for number, source in enumerate(sources):
        _push(heads, lasts, number, next(source, None))
    while heads:
        if len(heads) == 1:
            yield heads[0][2]
            yield from sources[heads[0][1]]
            return
        safe = heapq.heappop(lasts)
        while lasts and lasts[0] == safe:  # equal positions of different shards
            heapq.heappop(lasts)
        ready: list[tuple[int, MessageBatch]] = []
        while heads and heads[0][0] <= safe:
            _, number, head = heapq.heappop(heads)
            cut = int(np.searchsorted(head.positions, np.uint64(safe), side="right"))
            ready.append((number, head[:cut]))
            if cut < len(head):
                heapq.heappush(heads, (int(head.positions[cut]), number, head[cut:]))
            else:
                _push(heads, lasts, number, next(sources[number], None))
        ready.sort(key=itemgetter(0))
        yield _sorted([batch for _, batch in ready])


def _push(heads: list[tuple[int, int, MessageBatch]], lasts: list[int], number: int, head: MessageBatch | None) -> None:
    if head is not None:
        heapq.heappush(heads, (int(head.positions[0]), number, head))
        heapq.heappush(lasts, int(head.positions[-1]))


def _sorted(batches: list[MessageBatch]) -> MessageBatch:
    joined = MessageBatch.concat(batches)
    positions = joined.positions
    if (positions[1:] >= positions[:-1]).all():
        return joined
    return joined.take(np.argsort(positions, kind="stable"))


def limited(batches: Iterator[MessageBatch], limit: int) -> Iterator[MessageBatch]:
    """Yield the first ``limit`` rows, without requesting further batches."""
    while limit > 0 and (batch := next(batches, None)) is not None:
        yield batch[:limit]
        limit -= len(batch)


def slices(batches: Iterable[MessageBatch], rows: int) -> Iterator[MessageBatch]:
    """Yield the batches, split so that none has more than ``rows`` rows."""
    for batch in batches:
        for start in range(0, len(batch), rows):
            yield batch[start : start + rows]


def plan_replay(request: ReplayRequest, shards: Sequence[Shard], database: bytes) -> ReplayPlan:
    """Return a plan of each shard's generations in order, each with the streams that its layout chose as cheapest.

    ``database`` is the database's id, which becomes part of the plan's cursors.
    """
    began = time.monotonic()
    last = None if request.until is None else first_position(request.until) - 1
    bounds = [
        shard.writer.watermark if shard.elsewhere is None else shard.elsewhere.current_watermark() for shard in shards
    ]  # before planning, which may wait
    if last is not None:
        bounds = [min(bound, last) for bound in bounds]
    first, timestamps = first_position(request.start), request.timestamps
    plans = [
        shard.reader.plan(database, request.topic_filter, first, bound, since=began, timestamps=timestamps)
        for shard, bound in zip(shards, bounds, strict=True)
    ]
    plans = [plan for plan in plans if plan.generations]
    return ReplayPlan(shards=plans, order=request.order, batch_size=request.batch_size, timestamps=timestamps)


def read_batch(request: ReadRequest, shards: Sequence[Shard]) -> ReadResult:
    """Return the next batch of a cursor."""
    cursor, bound = request.cursor, request.bound
    shard = shards[cursor.shard]
    if cursor.generation == KEYED and shard.elsewhere is None:
        return read_keyed(request, shard)
    if request.until is not None:
        before = first_position(request.until) - 1
        bound = before if bound is None else min(bound, before)
    return shard.reader.next(
        cursor,
        rows=request.limit,
        size=BATCH_BYTES,
        bound=bound,
        deadline=None if request.timeout is None else time.monotonic() + request.timeout,
        final=request.bound is not None,
        columns=request.columns,
    )
