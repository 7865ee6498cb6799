"""Replays: which streams are read in which order, and batches out of them.

A plan obeys the rules for consumers: shards are independent; within a shard a generation
comes only after the one before has been read to its end; within a generation streams are
independent, and take turns batch by batch, so that none waits for another to finish.

In order of time, streams are merged by position. Where a layout has epochs, a stream is first
sorted an epoch at a time: that is how much of it is then in memory. So are some messages of every
stream, before the first one comes out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.iterators import Iterator as StreamIterator
from topicstore.contract.replay_plan import ReplayPlan, ShardPlan
from topicstore.contract.requests import NextResult

__all__ = ["Fetch", "in_order", "run", "slices"]

Fetch = Callable[[StreamIterator, int, int], NextResult]
"""Fetches the next batch of an iterator, up to a bound, of at most so many messages."""
_LEAST = 64
"""Messages of a stream that are fetched at once at least, however many streams there are to merge."""


def run(plan: ReplayPlan, fetch: Fetch) -> Iterator[MessageBatch]:
    """Yield the non-empty batches of a replay."""
    if plan.order == "time":
        return _merge([in_order(shard, fetch, plan.batch_size) for shard in plan.shards])
    return _take_turns([_by_generation(shard, fetch, plan.batch_size) for shard in plan.shards])


def _by_generation(plan: ShardPlan, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    for generation in plan.generations:
        yield from _take_turns([_stream(iterator, plan.bound, fetch, limit) for iterator in generation.iterators])


def in_order(plan: ShardPlan, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    """Yield the non-empty batches of one shard in order of positions."""
    for generation in plan.generations:
        each = min(limit, max(limit // len(generation.iterators), _LEAST))  # of every stream some are held at a time
        streams = [_stream(iterator, plan.bound, fetch, each) for iterator in generation.iterators]
        if generation.epoch > 1:
            streams = [_by_epoch(stream, generation.epoch) for stream in streams]
        yield from _merge(streams)


def _stream(iterator: StreamIterator, bound: int, fetch: Fetch, limit: int) -> Iterator[MessageBatch]:
    ended = False
    while not ended:
        result = fetch(iterator, bound, limit)
        held, iterator, ended = [result.batch], result.iterator, result.caught_up or result.end_of_stream
        del result  # a stream that waits for its turn must not keep the batch it has handed over
        if len(held[0]):
            yield held.pop()


def _by_epoch(stream: Iterator[MessageBatch], epoch: int) -> Iterator[MessageBatch]:
    """Put a stream whose epochs follow each other in order of positions, an epoch at a time."""
    held: list[MessageBatch] = []
    for batch in stream:
        epochs = batch.positions // np.uint64(epoch)
        cut = int(np.searchsorted(epochs, epochs[-1]))  # the last epoch may go on in the next batch
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


def _merge(sources: list[Iterator[MessageBatch]]) -> Iterator[MessageBatch]:
    """Merge sources that are each in order of position; equal positions by order of the sources.

    A whole run at a time: everything up to the lowest of the heads' last positions is complete,
    whatever the sources still hold, and is put in order by one stable sort. Of thousands of
    sources, only those are looked at that have something of the run.
    """
    heads: list[tuple[int, int, MessageBatch]] = []  # by first position; each source has one head at most
    lasts: list[int] = []
    for number, source in enumerate(sources):
        _push(heads, lasts, number, next(source, None))
    while heads:
        if len(heads) == 1:
            yield heads[0][2]
            yield from sources[heads[0][1]]
            return
        safe = heapq.heappop(lasts)
        while lasts and lasts[0] == safe:  # of another shard
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


def slices(batches: Iterable[MessageBatch], rows: int) -> Iterator[MessageBatch]:
    """Cut batches so that none has more than ``rows`` rows."""
    for batch in batches:
        for start in range(0, len(batch), rows):
            yield batch[start : start + rows]
