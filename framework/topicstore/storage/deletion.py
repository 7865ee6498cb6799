"""Deleting messages by topic and time, in all shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from topicstore.contract.topics import TopicFilter
from topicstore.releasing import guarded
from topicstore.shard.generations import check_local
from topicstore.shard.shard import Shard

from .own_times import runs_of
from .storage import Storage

__all__ = ["delete", "delete_local"]


def delete(storage: Storage, topic_filter: TopicFilter, start: int, until: int | None) -> int:
    """Delete the matching messages of a range of times; see `Database.delete`."""
    storage.check_may_write()
    bounds = [shard.watermark for shard in storage.shards]
    runs = [
        (shard, *run)
        for shard, bound in zip(storage.shards, bounds, strict=True)
        for run in runs_of(storage, shard, topic_filter, start, until, bound)
    ]
    # All shards are checked before the first one deletes anything.
    check_local(found for shard, first, last in runs for found in shard.archived_in(first, last))
    return guarded(
        lambda: sum(shard.delete(topic_filter, first, last) for shard, first, last in runs),
        partial(_forget_what_was_read, storage),
    )


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
