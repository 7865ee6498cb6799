"""`Following`: polling a database that is open read-only for newly stored messages."""

from __future__ import annotations

from collections.abc import Iterator

from topicstore.contract.batch import MessageBatch
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.topics import TopicFilter
from topicstore.storage.storage import Storage

__all__ = ["Following"]


class Following:
    """A reader of the matching messages at or after a time, as they become visible. It is not thread-safe."""

    def __init__(self, storage: Storage, topic_filter: TopicFilter, start: int) -> None:
        self._storage = storage
        self._filter = topic_filter
        own = storage.manifest.timestamps == "message" and start > 0
        self._timestamps = TimeRange(start) if own else None
        self._next = [first_position(start)] * len(storage.shards)
        """By shard, the first position that was not read yet."""

    def look(self, rows: int) -> Iterator[MessageBatch]:
        """Refresh the database, and yield the messages that became visible since the last call, in order of positions.

        Batches have about ``rows`` rows. The caller must exhaust the iterator before the next call. Messages of an
        epoch that hasn't ended are yielded by a later call. Raises the errors of refreshing and replaying.
        """
        self._storage.refresh()
        plans = [self._storage.plan_shard(shard, self._filter, first, None) for shard, first in enumerate(self._next)]
        yield from self._storage.run_shards(plans, rows, timestamps=self._timestamps)
        self._next = [max(first, plan.bound + 1) for first, plan in zip(self._next, plans, strict=True)]
