"""Deleting messages by topic and time, in all shards."""

from __future__ import annotations

from collections.abc import Sequence

from topicstore.contract.positions import first_position
from topicstore.contract.topics import TopicFilter
from topicstore.shard.generations import check_local
from topicstore.shard.shard import Shard

from .storage import Storage

__all__ = ["delete", "delete_local"]


def delete(storage: Storage, topic_filter: TopicFilter, start: int, until: int | None) -> int:
    """Delete the matching messages of a range of times; see `Database.delete`."""
    storage.check_may_write()
    first = first_position(start)
    ends = [(shard, shard.watermark) for shard in storage.shards]
    if until is not None:
        last = first_position(until) - 1
        ends = [(shard, min(mark, last)) for shard, mark in ends]
    # All shards are checked before the first one deletes anything.
    check_local(found for shard, end in ends for found in shard.archived_in(first, end))
    try:
        return sum(shard.delete(topic_filter, first, end) for shard, end in ends if first <= end)
    finally:
        if storage.listener is not None:
            storage.listener.forget()


def delete_local(
    storage: Storage, shard: Shard, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[str]
) -> int:
    """Delete messages of a shard in a range of positions that don't match ``spare`` and aren't archived.

    Without a filter, messages of all topics are deleted.
    """
    storage.check_may_write()
    try:
        return shard.delete_local(topic_filter, first, last, [*map(TopicFilter, spare)])
    finally:
        if storage.listener is not None:
            storage.listener.forget()
