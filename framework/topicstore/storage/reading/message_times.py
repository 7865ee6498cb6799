"""Ranges of time where positions go by the messages' own times (``timestamps="message"``).

A position's time is that of its message or later: later if more than 2,048 messages have one microsecond, or if the
message was late and took the next position. The shard knows the most by which it is later
(`topicstore.shard.writer`). A range of times reads so many positions more, and keeps the messages whose own time
lies in it. Where every position has its message's time, which is usual, nothing changes.
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

__all__ = ["displacement", "judged_by", "runs_of"]


def displacement(storage: Storage) -> int:
    """Return the most microseconds by which the time of a position is later than its message's own.

    It is 0 where positions go by the time of storing.
    """
    return max(shard.writer.displacement for shard in storage.shards)


def judged_by(storage: Storage, request: ReplayRequest, by: By) -> ReplayRequest:
    """Return a request whose range of time is compared with ``by``.

    By position, messages are judged by their own times where some positions are later than those.
    """
    times, displaced = TimeRange(request.start, request.until), displacement(storage)
    if by == "timestamp":
        return attrs.evolve(request, start=0, until=None, timestamps=times)
    if not displaced or times == TimeRange():
        return request
    return attrs.evolve(request, until=None if times.until is None else times.until + displaced, timestamps=times)


def runs_of(
    storage: Storage, shard: Shard, request: ReplayRequest, bound: int, generations: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield spans of positions, ascending and up to ``bound``, that have the matching messages of a request.

    They have no other matching messages. If the request judges messages by their own times, those that match the
    filter are read: of all generations, or only of some. An epoch that hides some of them is waited for, as by a
    replay. What the spans hold may be deleted meanwhile.
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
            with suppress(GenerationDroppedError):  # meanwhile: nothing of it is left
                plan = plan_generation(storage, shard, record.number, request.topic_filter, *span, since=since)
                if plan.generations:
                    yield from _runs(run_as_stored(storage, shard, [plan], "time"), request.timestamps)


def _runs(batches: Iterable[MessageBatch], times: TimeRange) -> Iterator[tuple[int, int]]:
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
