"""Deleting messages by topic and time, in all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.releasing import guarded
from topicstore.shard.generations import check_local
from topicstore.shard.shard import Shard

from .own_times import runs_of
from .storage import Storage

__all__ = ["delete", "delete_local"]


def delete(storage: Storage, request: ReplayRequest) -> int:
    """Delete the messages that a replay would return; see `Database.delete`."""
    storage.check_may_write()
    bounds = [(shard, shard.watermark) for shard in storage.shards]
    # All shards are checked before the first one deletes anything.
    check_local(found for shard, bound in bounds for found in _archived(storage, shard, request, bound))
    return guarded(
        lambda: sum(
            shard.delete(request.topic_filter, first, last)
            for shard, bound in bounds
            for first, last in runs_of(storage, shard, request, bound)
        ),
        partial(_forget_what_was_read, storage),
    )


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
    spared = [*map(TopicFilter, spare)]
    return guarded(
        lambda: shard.delete_local(topic_filter, first, last, spared), partial(_forget_what_was_read, storage)
    )


def _forget_what_was_read(storage: Storage) -> None:
    if storage.listener is not None:
        storage.listener.forget()
