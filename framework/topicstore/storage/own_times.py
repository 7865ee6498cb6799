"""Ranges of time where positions go by the messages' own times (``timestamps="message"``).

A position's time is that of its message or later: later if more than 2,048 messages have one microsecond, or if the
message was late and took the next position. The shard knows the most by which it is later
(`topicstore.shard.displacement`). A range of times reads so many positions more, and keeps the messages whose own time
lies in it. Where every position has its message's time, which is usual, nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import numpy as np

from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import By, TimeRange
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.shard import Shard

from .as_stored import plan_generation, run_as_stored
from .storage import Storage

__all__ = ["displacement", "judged_by", "runs_of"]


def displacement(storage: Storage) -> int:
    """Return the most microseconds by which the time of a position is later than its message's own.

    It is 0 where positions go by the time of storing.
    """
    return max(shard.displacement for shard in storage.shards)


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
    storage: Storage, shard: Shard, topic_filter: TopicFilter, start: int, until: int | None, bound: int
) -> Iterator[tuple[int, int]]:
    """Yield spans of positions, ascending and up to ``bound``, that have the matching messages of a range of times.

    They have no other matching messages. With displaced positions, the matching messages around the range are read. An
    epoch that hides some of them is waited for, as by a replay.
    """
    times, displaced = TimeRange(start, until), shard.displacement
    last = bound if until is None else min(bound, first_position(until + displaced) - 1)
    first = first_position(start)
    if not displaced or times == TimeRange():
        if first <= last:
            yield first, last
        return
    begun, end, since = None, 0, time.monotonic()
    for record in shard.generations():
        plan = plan_generation(storage, shard, record.number, topic_filter, first, last, since=since)
        for batch in run_as_stored(storage, shard, [plan] if plan.generations else [], "time"):
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
