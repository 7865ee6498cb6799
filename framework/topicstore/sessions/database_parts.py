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

__all__ = ["DatabaseParts", "KeyedMessages", "Publish"]


class Publish(Protocol):
    """Publishes messages, and commits state in one engine write with those of the same shard."""

    def __call__(
        self, messages: Iterable[Message], *, state: Mapping[int, Sequence[StateWrite]] | None = None
    ) -> PublishResult:
        """Do it; nothing is handed on before it is committed."""


class KeyedMessages(Protocol):
    """Messages under keys, beside the streams; the last one of a key counts (`topicstore.storage.keyed`)."""

    def store_kept(
        self,
        messages: Iterable[Message],
        keys: Sequence[bytes],
        *,
        shards: Sequence[int],
        state: Mapping[int, Sequence[StateWrite]],
    ) -> object:
        """Commit messages under keys, each in a shard, together with state."""

    def kept_get(self, shard: int, key: bytes) -> Message | None:
        """Return the message under a key."""


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
    keyed: KeyedMessages
