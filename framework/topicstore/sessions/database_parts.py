"""`DatabaseParts`: what sessions need of the open database that they belong to, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.publishing import PublishResult
from topicstore.shard.state import ShardState
from topicstore.storage.storage import Storage

__all__ = ["DatabaseParts", "Publish"]


class Publish(Protocol):
    """Publishes messages, and commits state in one engine write with those of the same shard."""

    def __call__(
        self, messages: Iterable[Message], *, state: Mapping[int, Sequence[StateWrite]] | None = None
    ) -> PublishResult:
        """Do it; nothing is handed on before it is committed."""


@attrs.frozen(kw_only=True)
class DatabaseParts:
    """What sessions need of an open database."""

    states: Sequence[ShardState]
    """Those of all shards, in their order."""
    shard_of: Callable[[str], int]
    """Says in which shard what belongs to a client id, or to a group, is kept."""
    clock: Callable[[], int]
    """Microseconds since the epoch."""
    hub: Hub
    publish: Publish
    retained: Callable[[str], list[Message]]
    """Returns the retained messages that match a filter, in order of topics, but those that expired."""
    storage: Callable[[], Storage]
    """Returns the shards behind their hooks, or raises `DatabaseClosedError` if nobody holds the database any more."""
