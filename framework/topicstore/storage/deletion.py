"""Deleting messages by topic and time, in all shards."""

from __future__ import annotations

from topicstore.contract.positions import first_position
from topicstore.contract.topics import TopicFilter
from topicstore.shard.generations import check_local

from .storage import Storage

__all__ = ["delete"]


def delete(storage: Storage, topic_filter: TopicFilter, start: int, until: int | None) -> int:
    """Delete the matching messages of a time; see `Database.delete`."""
    storage.check_may_write()
    first = first_position(start)
    ends = [(shard, shard.watermark) for shard in storage.shards]
    if until is not None:
        last = first_position(until) - 1
        ends = [(shard, min(mark, last)) for shard, mark in ends]
    # Of all shards, before the first deletes anything.
    check_local(found for shard, end in ends for found in shard.archived_in(first, end))
    try:
        return sum(shard.delete(topic_filter, first, end) for shard, end in ends if first <= end)
    finally:
        if storage.listener is not None:
            storage.listener.forget()
