"""`DatabaseParts`: what sessions need of the open database that they belong to, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.persistence_rules import PersistenceRules
from topicstore.pubsub.publishing import PublishResult, publish
from topicstore.pubsub.retained import retained
from topicstore.shard.state import ShardState
from topicstore.storage.storage import Storage

__all__ = ["DatabaseParts", "Messages", "Publish", "StateWrites"]


Messages = Iterable[Message] | MessageBatch
StateWrites = Mapping[int, Sequence[StateWrite]]
"""By shard."""


class Publish(Protocol):
    """Publishes messages, and commits state in one engine write with those of the same shard."""

    def __call__(self, messages: Messages, *, state: StateWrites | None = None) -> PublishResult:
        """Do it; nothing is handed on before it is committed."""


@attrs.frozen(kw_only=True)
class DatabaseParts:
    """What sessions need of an open database.

    They hold it weakly, else one that nobody holds would not be closed. Once nobody does, what needs it raises
    `DatabaseClosedError`.
    """

    states: Sequence[ShardState]
    """Those of all shards, in their order."""
    shard_of: Callable[[str], int]
    """Says in which shard what belongs to a client id, or to a group, is kept."""
    clock: Callable[[], int]
    """Microseconds since the epoch, as positions have them: by it messages expire."""
    steady: Callable[[], int]
    """Microseconds since the epoch that never jump: all that sessions wait for goes by it."""
    hub: Hub
    rules: PersistenceRules
    _storage: weakref.ref[Storage]

    @classmethod
    def of(cls, storage: Storage, hub: Hub, rules: PersistenceRules) -> DatabaseParts:
        """Return the parts of a database."""
        return cls(
            states=[storage.state(shard) for shard in range(len(storage.shards))],
            shard_of=storage.shard_map.of,
            clock=storage.clock,
            steady=storage.steady,
            hub=hub,
            rules=rules,
            storage=weakref.ref(storage),
        )

    def storage(self) -> Storage:
        """Return the shards behind their hooks."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    def publish(self, messages: Messages, state: StateWrites | None, wanted: Callable[[str], bool]) -> PublishResult:
        """Publish messages as `Database.publish` does; ``wanted`` says which topics durable subscriptions match."""
        storage = self.storage()
        storage.check_may_write()
        batch = MessageBatch.of(messages)
        return publish(storage, batch, state or {}, rules=self.rules, wanted=lambda: wanted, hub=lambda: self.hub)

    def retained(self, topic_filter: str) -> list[Message]:
        """Return the retained messages that match, in order of topics; those that expired are left out."""
        return retained(self.storage(), TopicFilter(topic_filter), self.clock())
