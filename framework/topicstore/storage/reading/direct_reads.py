"""Reading messages in their stored form, bypassing the database's plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.cursors import Cursor
from topicstore.contract.replay_plan import Order, ReplayPlan, ShardPlan
from topicstore.contract.requests import ReadResult
from topicstore.contract.topics import TopicFilter
from topicstore.shard.shard import Shard
from topicstore.storage import replays
from topicstore.storage.storage import Storage

__all__ = ["plan_generation", "run_as_stored"]

_BATCH, _BATCH_BYTES = 16_384, 8 << 20


def plan_generation(
    storage: Storage,
    shard: Shard,
    generation: int,
    topic_filter: TopicFilter,
    first: int,
    last: int,
    *,
    since: float | None,
) -> ShardPlan:
    """Return a plan that reads the matching messages of one generation, at positions ``first`` to ``last``.

    ``since`` is that of `topicstore.shard.reader.ShardReader.plan`.
    """
    plan = shard.reader.plan(storage.id, topic_filter, first, last, since=since)
    chosen = [part for part in plan.generations if part.cursors[0].generation == generation]
    return attrs.evolve(plan, generations=chosen)


def run_as_stored(
    storage: Storage, shard: Shard, plans: Sequence[ShardPlan], order: Order, rows: int | None = None
) -> Iterator[MessageBatch]:
    """Yield the batches of plans of one shard, of about ``rows`` rows each."""

    def fetch(cursor: Cursor, bound: int, limit: int) -> ReadResult:
        storage.check_open()  # raises once the database is closed, so that closing ends the run early
        return shard.reader.next(cursor, rows=limit, size=_BATCH_BYTES, bound=bound, final=True)

    return replays.run(ReplayPlan(shards=list(plans), order=order, batch_size=rows or _BATCH, timestamps=None), fetch)
