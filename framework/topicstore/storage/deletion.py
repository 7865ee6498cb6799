"""Deleting messages by topic and time, in all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.generations import check_local
from topicstore.shard.shard import Shard

from .own_times import runs_of
from .storage import Storage

__all__ = ["delete", "delete_local"]


def delete(storage: Storage, request: ReplayRequest) -> int:
    """Delete the messages that a replay would return; see `Database.delete`."""
    storage.check_may_write()
    bounds = [(shard, shard.watermark) for shard in storage.shards]
    check_local(found for shard, bound in bounds for found in _archived(storage, shard, request, bound))
    deleted = 0
    try:
        for shard, bound in bounds:
            for first, last in runs_of(storage, shard, request, bound):
                deleted += shard.delete(request.topic_filter, first, last)
        return deleted
    finally:
        if storage.listener is not None:
            storage.listener.forget()


def _archived(storage: Storage, shard: Shard, request: ReplayRequest, bound: int) -> Iterator[tuple[int, int]]:
    """Yield the number and last position of archived generations with messages to delete."""
    archived = {number for number, _ in shard.archived_in(0, bound)}
    if archived:
        for first, last in runs_of(storage, shard, request, bound, archived):
            yield from shard.archived_in(first, last)


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
