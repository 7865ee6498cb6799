"""Replays: which streams are read in which order, and batches out of them.

A plan obeys the rules for consumers: shards are independent; within a shard a generation
comes only after the one before has been read to its end; within a generation streams are
independent, and take turns batch by batch, so that none waits for another to finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import attrs
import numpy as np

from .batch import MessageBatch
from .iterators import Iterator as StreamIterator
from .requests import NextResult

__all__ = ["Fetch", "Lane", "Order", "ReplayPlan", "run"]

Order = Literal["time"]

Fetch = Callable[[StreamIterator, int], NextResult]
"""Fetches the next batch of an iterator, up to a bound."""


@attrs.frozen(kw_only=True)
class Lane:
    """One shard's part of a replay."""

    shard: int
    bound: int
    """The highest position to return."""
    stages: list[list[StreamIterator]]
    """Iterators by generation; a stage begins when the one before has ended."""


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
        yield from _take_turns([_stream(iterator, lane.bound, fetch) for iterator in stage])


def _in_order(lane: Lane, fetch: Fetch) -> Iterator[MessageBatch]:
    for stage in lane.stages:
        yield from _merge([_stream(iterator, lane.bound, fetch) for iterator in stage])


def _stream(iterator: StreamIterator, bound: int, fetch: Fetch) -> Iterator[MessageBatch]:
    while True:
        result = fetch(iterator, bound)
        if len(result.batch):
            yield result.batch
        if result.caught_up or result.end_of_stream:
            return
        iterator = result.iterator


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
    if len(batches) == 1:
        return joined
    return joined.take(np.argsort(joined.positions, kind="stable"))


def slices(batches: Iterable[MessageBatch], rows: int) -> Iterator[MessageBatch]:
    """Cut batches so that none has more than ``rows`` rows."""
    for batch in batches:
        for start in range(0, len(batch), rows):
            yield batch[start : start + rows]
