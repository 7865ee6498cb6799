"""Replays: which streams are read in which order, and batches out of them.

A plan obeys the rules for consumers: shards are independent; within a shard a generation
comes only after the one before has been read to its end; within a generation streams are
independent, and take turns batch by batch, so that none waits for another to finish.

In order of time, streams are merged by position. Where a layout has epochs, a stream is first
sorted an epoch at a time: that is how much of it is then in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import attrs
import numpy as np

from .batch import MessageBatch
from .iterators import Iterator as StreamIterator
from .requests import NextResult

__all__ = ["Fetch", "Lane", "Order", "ReplayPlan", "Stage", "run", "slices"]

Order = Literal["time"]

Fetch = Callable[[StreamIterator, int], NextResult]
"""Fetches the next batch of an iterator, up to a bound."""


@attrs.frozen
class Stage:
    """One generation's part of a replay."""

    iterators: list[StreamIterator]
    epoch: int
    """Positions within which its streams are not in order (`topicstore.layout.Slab.epoch`)."""


@attrs.frozen(kw_only=True)
class Lane:
    """One shard's part of a replay."""

    shard: int
    bound: int
    """The highest position to return."""
    stages: list[Stage]
    """By generation; a stage begins when the one before has ended."""


@attrs.frozen(kw_only=True)
class ReplayPlan:
    """What a replay reads. Fixed when the replay is asked for."""

    lanes: list[Lane]
    order: str | None
    """``"time"`` merges everything by position; None gives each publisher's and topic's own order."""


def run(plan: ReplayPlan, fetch: Fetch) -> Iterator[MessageBatch]:
    """Yield the non-empty batches of a replay."""
    if plan.order == "time":
        return _merge([_in_order(lane, fetch) for lane in plan.lanes])
    return _take_turns([_staged(lane, fetch) for lane in plan.lanes])


def _staged(lane: Lane, fetch: Fetch) -> Iterator[MessageBatch]:
    for stage in lane.stages:
        yield from _take_turns([_stream(iterator, lane.bound, fetch) for iterator in stage.iterators])


def _in_order(lane: Lane, fetch: Fetch) -> Iterator[MessageBatch]:
    for stage in lane.stages:
        streams = [_stream(iterator, lane.bound, fetch) for iterator in stage.iterators]
        if stage.epoch > 1:
            streams = [_by_epoch(stream, stage.epoch) for stream in streams]
        yield from _merge(streams)


def _stream(iterator: StreamIterator, bound: int, fetch: Fetch) -> Iterator[MessageBatch]:
    while True:
        result = fetch(iterator, bound)
        if len(result.batch):
            yield result.batch
        if result.caught_up or result.end_of_stream:
            return
        iterator = result.iterator


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
        ended = []
        for source in sources:
            batch = next(source, None)
            if batch is None:
                ended.append(source)
            else:
                yield batch
        sources = [source for source in sources if source not in ended]


def _merge(sources: list[Iterator[MessageBatch]]) -> Iterator[MessageBatch]:
    """Merge sources that are each in order of position; equal positions by order of the sources.

    A whole run at a time: everything up to the lowest of the heads' last positions is complete,
    whatever the sources still hold, and is put in order by one stable sort.
    """
    heads = [(head, source) for source in sources if (head := next(source, None)) is not None]
    while len(heads) > 1:
        safe = min(head.positions[-1] for head, _ in heads)
        ready: list[MessageBatch] = []
        kept: list[tuple[MessageBatch, Iterator[MessageBatch]]] = []
        for head, source in heads:
            cut = int(np.searchsorted(head.positions, safe, side="right"))
            if cut:
                ready.append(head[:cut])
            rest = head[cut:] if cut < len(head) else next(source, None)
            if rest is not None:
                kept.append((rest, source))
        yield _sorted(ready)
        heads = kept
    for head, source in heads:
        yield head
        yield from source


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
