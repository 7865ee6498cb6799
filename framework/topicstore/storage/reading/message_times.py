"""Ranges of time in databases whose positions follow the messages' own times (``timestamps="message"``).

The time of a position is at or after its message's own time. It is later if more than 2,048 messages have the same
microsecond, or if the message was late and took the next free position. Each shard stores the maximum difference,
the displacement (`topicstore.shard.writer`). A read of a range of times extends the range of positions by the
displacement, and keeps the messages whose own time lies in the range. Usually the displacement is 0.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import By, TimeRange
from topicstore.contract.requests import ReplayRequest
from topicstore.shard.shard import Shard
from topicstore.storage.storage import Storage

from .direct_reads import plan_generation, run_as_stored

__all__ = ["displacement", "judged_by", "position_ranges"]


def displacement(storage: Storage) -> int:
    """Return the maximum, in microseconds, by which a position's time is later than its message's own time.

    It is 0 if positions follow the time of storing.
    """
    return max(shard.reader.displacement for shard in storage.shards)


def judged_by(storage: Storage, request: ReplayRequest, by: By) -> ReplayRequest:
    """Return the request with its range of time compared with the kind of times that ``by`` names.

    With ``by="position"``, messages are still compared by their own times if the displacement isn't 0.
    """
    times, displaced = TimeRange(request.start, request.until), displacement(storage)
    if by == "timestamp":
        return attrs.evolve(request, start=0, until=None, timestamps=times)
    if not displaced or times == TimeRange():
        return request
    return attrs.evolve(request, until=None if times.until is None else times.until + displaced, timestamps=times)


def position_ranges(
    storage: Storage, shard: Shard, request: ReplayRequest, bound: int, generations: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of positions, inclusive and ascending up to ``bound``, in which a request's messages are.

    All messages in the ranges that match the filter are the request's. If the request compares the messages' own times,
    the matching messages are read, of all generations or only of ``generations``. Like a replay, the function waits for
    the end of the layout's current epoch. The caller may delete the messages of a range during the iteration.
    """
    last = bound if request.until is None else min(bound, first_position(request.until) - 1)
    first = first_position(request.start)
    if first > last:
        return
    if request.timestamps is None:
        yield first, last
        return
    since = time.monotonic()
    for record in shard.generations.listed():
        if generations is not None and record.number not in generations:
            continue
        for span in shard.reader.spans(request.timestamps, first, last):
            with suppress(GenerationDroppedError):  # a generation that was dropped meanwhile has no messages to delete
                plan = plan_generation(storage, shard, record.number, request.topic_filter, *span, since=since)
                if plan.generations:
                    yield from _ranges(run_as_stored(storage, shard, [plan], "time"), request.timestamps)


def _ranges(batches: Iterable[MessageBatch], times: TimeRange) -> Iterator[tuple[int, int]]:
    """Yield the first and last position of each run of messages whose own times are in a range."""
    begun, end = None, 0
    for batch in batches:
        rows = times.rows(batch.timestamps)
        among = np.ones(len(batch), np.bool_) if rows is None else np.isin(np.arange(len(batch)), rows)
        edges = np.flatnonzero(np.diff(among)) + 1
        for part in np.split(np.arange(len(batch)), edges):
            if among[part[0]]:
                begun = int(batch.positions[part[0]]) if begun is None else begun
                end = int(batch.positions[part[-1]])
            elif begun is not None:
                yield begun, end
                begun = None
    if begun is not None:
        yield begun, end
