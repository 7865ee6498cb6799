"""Which streams of a shard a replay reads: its generations in turn, by the streams that layouts find cheapest."""

from __future__ import annotations

from .contract.iterators import Iterator
from .contract.layout import Slab
from .contract.replay_plan import GenerationPlan, ShardPlan
from .contract.topics import TopicFilter
from .shard import Shard

__all__ = ["plan_shard"]


def plan_shard(
    database: bytes, shard: Shard, topic_filter: TopicFilter, first: int, bound: int, *, since: float | None
) -> ShardPlan:
    """Plan to read a shard's matching messages with positions from ``first`` to ``bound``.

    Where the layout hides the epoch that is written and the bound lies in it, wait for its end, at most
    an epoch after ``since`` (of `time.monotonic`); with None don't wait, and lower the bound instead.
    """
    generations = []
    for record, slab in shard.slabs() if first <= bound else ():
        if record.first_position > bound or (record.last_position is not None and record.last_position < first):
            continue
        streams = slab.cover(topic_filter, first)
        if record.sealed is None and any(slab.visible(stream, shard.watermark) < bound for stream in streams):
            if since is None:
                bound = min(slab.visible(stream, shard.watermark) for stream in streams)
            else:
                shard.end_epoch(record.number, bound, wait=True, since=since)
        if streams:
            iterators = _iterators((database, shard.number, record.number), slab, streams, first, topic_filter)
            generations.append(GenerationPlan(iterators, slab.epoch))
    return ShardPlan(shard=shard.number, bound=bound, generations=generations)


def _iterators(
    where: tuple[bytes, int, int], slab: Slab, streams: list[int], first: int, topic_filter: TopicFilter
) -> list[Iterator]:
    return [Iterator(*where, stream, topic_filter.text, slab.begin(stream, topic_filter, first)) for stream in streams]
