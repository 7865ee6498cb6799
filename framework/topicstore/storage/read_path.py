"""Planning a replay over all shards, and fetching the next batch of a cursor."""

from __future__ import annotations

import time
from collections.abc import Sequence

from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import ReplayPlan
from topicstore.contract.requests import ReadRequest, ReadResult, ReplayRequest
from topicstore.shard.shard import Shard

from .keyed_message_records import GENERATION as KEYED
from .keyed_message_records import read_keyed

__all__ = ["BATCH_BYTES", "plan_replay", "read_batch"]

BATCH_BYTES = 8 << 20
"""The maximum size of a batch's payloads in bytes, approximately, which bounds the memory of reads."""


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
