"""``/learned-topics/counts``: the messages of each slab, counted by topic."""

from __future__ import annotations

from typing import Annotated

import attrs
from litestar import get
from litestar.params import QueryParameter

from topicstore.contract.topics import TopicFilter
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.storage.learned_counts import counts_by_slab

__all__ = ["ROUTES"]


@attrs.frozen(kw_only=True)
class SlabCounts:
    """The messages of one generation of a shard."""

    shard: int
    generation: int
    topics: dict[str, int]
    """How many messages each topic has."""


@get("/learned-topics/counts", guards=[needs("read")], tags=["topics"], sync_to_thread=True)
def learned_counts(
    context: TheContext,
    topic_filters: Annotated[
        list[str], QueryParameter(name="filter", description="A topic matches one of these filters at most.")
    ],
    generation: Annotated[int | None, QueryParameter(description="Only this generation.")] = None,
) -> list[SlabCounts]:
    """Read the messages of the slabs whose layouts learned topics, and count them. It takes as long as a replay."""
    slabs, filters = context.db.learned_topics(generation), list(map(TopicFilter, topic_filters))
    return [
        SlabCounts(shard=shard, generation=number, topics=topics)
        for (shard, number), topics in counts_by_slab(context.db.storage, slabs, filters)
    ]


ROUTES = [learned_counts]
