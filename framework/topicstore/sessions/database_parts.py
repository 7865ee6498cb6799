"""`DatabaseParts`: the parts of an open database that its sessions need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from topicstore.contract.batch import MessageBatch, Messages
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.contract.times import Time, instant
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.persistence_rules import PersistenceRules
from topicstore.pubsub.publish import PublishResult, publish
from topicstore.pubsub.retained_lookup import RetainedPage, any_retained, retained_of, retained_page, retained_places
from topicstore.shard.state import ShardState
from topicstore.storage.storage import Storage

from .clock import SessionClock
from .durable_filters import DurableFilters

__all__ = ["DatabaseParts", "Messages", "Publish", "RetainedMessages", "StateWrites"]


StateWrites = Mapping[int, Sequence[StateWrite]]
"""State writes by shard number."""
_PEEK = 16
"""Number of retained messages that are read to find out whether some match."""


class Publish(Protocol):
    """Publishes messages, and commits state in the same engine write as the messages of the same shard."""

    def __call__(self, messages: Messages, *, state: StateWrites | None = None) -> PublishResult:
        """Publish the messages; none is delivered before the commit."""


@attrs.frozen
class RetainedMessages:
    """Look-ups of a database's retained messages. No look-up takes a lock."""

    _storage: Callable[[], Storage]
    _clock: Callable[[], int]

    def page(self, topic_filter: TopicFilter, start: str, limit: int, now: int) -> RetainedPage:
        """Return a page of the matching retained messages (`topicstore.pubsub.retained_lookup.retained_page`).

        About ``limit`` messages are read for it, whether they match or not.
        """
        return retained_page(self._storage(), topic_filter, now, start, limit, examine=limit)

    def any(self) -> bool:
        """Return whether there are retained messages. Reads at most one of each shard."""
        return any_retained(self._storage())

    def may_match(self, topic_filter: TopicFilter) -> bool:
        """Return whether retained messages may match. Reads only a few, and returns True if they don't decide it."""
        page = retained_page(self._storage(), topic_filter, self._clock(), "", 1, examine=_PEEK)
        return bool(page.messages) or page.following is not None

    def of(self, topics: Sequence[str]) -> list[Message | None]:
        """Return, for each topic, its retained message, or None if it has none or the message has expired."""
        return retained_of(self._storage(), topics, self._clock())

    def places(self, topics: Sequence[str]) -> list[tuple[int, int]]:
        """Return, for each topic, where its retained message is in the streams (`retained_places`)."""
        return retained_places(self._storage(), topics)


@attrs.frozen(kw_only=True)
class DatabaseParts:
    """The parts of an open database that its sessions need.

    The database is referenced weakly, so that a database without other references closes itself. Afterwards, methods
    that need the database raise `DatabaseClosedError`.
    """

    states: Sequence[ShardState]
    """The states of all shards, by shard number."""
    shard_of: Callable[[str], int]
    """Returns the number of the shard that keeps the state of a client id or of a group."""
    clock: Callable[[], int]
    """Returns the wall clock's time in microseconds since the epoch, as in positions. Messages expire by it."""
    steady: SessionClock
    """The clock by which sessions expire and wills are due."""
    hub: Hub
    rules: PersistenceRules
    _storage: weakref.ref[Storage]

    @classmethod
    def of(cls, storage: Storage, hub: Hub, rules: PersistenceRules) -> DatabaseParts:
        """Return the parts of a database."""
        return cls(
            states=[_state(storage, shard) for shard in range(len(storage.shards))],
            shard_of=storage.shard_map.of,
            clock=storage.clock,
            steady=SessionClock(storage.steady, storage.state(0)),
            hub=hub,
            rules=rules,
            storage=weakref.ref(storage),
        )

    def storage(self) -> Storage:
        """Return the database's storage. Raises `DatabaseClosedError`."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    def instant(self, when: Time) -> int:
        """Convert a time, in the forms that `Database.replay` accepts, to microseconds since the epoch."""
        return instant(when, self.clock, allow_ancient=self.storage().allow_ancient)

    def publish(self, messages: Messages, state: StateWrites | None, filters: DurableFilters) -> PublishResult:
        """Publish messages as `Database.publish` does; ``filters`` are those of the durable subscriptions."""
        storage = self.storage()
        storage.check_may_write()
        batch = MessageBatch.of(messages)
        return publish(
            storage,
            batch,
            state or {},
            rules=self.rules,
            wanted=lambda: filters.wants,
            store_qos0=lambda: filters.store_qos0,
            hub=lambda: self.hub,
        )

    def retained(self) -> RetainedMessages:
        """Return the retained messages of the database."""
        return RetainedMessages(self.storage, self.clock)


def _state(storage: Storage, shard: int) -> ShardState:
    """Return the state of a shard. In a read-only database, the clean-up on loading is not written."""
    if storage.mode is None:
        return storage.state(shard)
    return ShardState(shard, storage.shards[shard].writer.open_engine, _write_nothing)


def _write_nothing(writes: Iterable[StateWrite]) -> None:
    """Discard the clean-up of a read-only database; a process that opens it for writing repeats the clean-up."""
