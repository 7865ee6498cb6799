"""Keyed messages: messages that a shard stores under keys, outside its streams; each key holds the last message stored.

They are used for retained messages (MQTT 5, section 3.3.1.3) and wills (section 3.1.2.5). They are independent of
generations, and not part of any replay. They are stored through ``topicstore_store`` and read through
``topicstore_read``, so plugins that transform messages process them, too: in these hooks they are the messages of
generation 0, in order of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch, Messages
from topicstore.contract.columns import to_list
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.model import Message
from topicstore.contract.requests import Destinations, StoreResult
from topicstore.contract.state import StateWrite

from .keyed_message_records import cursor_over, key_in, next_key, state_key
from .storage import Storage

__all__ = [
    "KeyedRead",
    "batches_between",
    "message_under",
    "messages_under",
    "read_between",
    "state_key",
    "store_under",
]

_LIMIT = 1_024
"""The number of messages fetched at a time."""


def store_under(
    storage: Storage,
    messages: Messages,
    keys: Sequence[bytes | None],
    *,
    shards: Sequence[int] | None = None,
    stored: Sequence[bool] | None = None,
    state: Mapping[int, Sequence[StateWrite]] | None = None,
) -> StoreResult:
    """Store messages under keys; each replaces the previous message under its key.

    keys:   the key of each message; None for a message without a key.
    shards: the shard that stores each message under its key; by default that of its client id.
    stored: whether each message is also stored in the streams; by default none is.
    state:  state writes by shard; they are committed in the same engine write as the messages of the shard.
    """
    batch = MessageBatch.of(messages)
    for name, column in (("keys", keys), ("shards", shards), ("stored", stored)):
        if column is not None and len(column) != len(batch):
            raise InvalidArgumentError(f"{name} has {len(column)} entries for {len(batch)} messages")
    client_ids = to_list(batch.client_ids)
    keyed = {}
    for row, key in enumerate(keys):
        if key is not None:
            if not isinstance(key, bytes) or not key:
                raise InvalidArgumentError(f"the key of a message is bytes, not {key!r}")
            keyed[row] = (storage.shard_of(client_ids[row]) if shards is None else shards[row], key)
    for shard, _ in keyed.values():
        storage.check_shard(shard)
    flags = np.zeros(len(batch), np.bool_) if stored is None else np.array(stored, np.bool_)
    return storage.write(batch, state or {}, Destinations(stored=flags, keyed=keyed))


def message_under(storage: Storage, shard: int, key: bytes) -> Message | None:
    """Return the message that a shard has under a key, or None."""
    batch = storage.read(cursor_over(storage.id, shard, key, key + b"\0"), 1).batch
    return batch.to_messages()[0] if len(batch) else None


def messages_under(storage: Storage, shard: int, prefix: bytes) -> Iterator[tuple[bytes, Message]]:
    """Yield (key, message) of all messages that a shard has under keys that begin with ``prefix``, in order of keys.

    Each message is read individually, because otherwise keys and messages couldn't be matched if a plugin removes
    messages. This is slow for many messages.
    """
    for under, _ in storage.state(shard).scan(state_key(prefix)):
        key = key_in(under)
        message = message_under(storage, shard, key)
        if message is not None:
            yield key, message


@attrs.frozen
class KeyedRead:
    """A batch of a shard's keyed messages, in order of their keys."""

    batch: MessageBatch
    following: bytes | None
    """The key from which to continue; None at the end of the range."""


def read_between(storage: Storage, shard: int, start: bytes, end: bytes, limit: int) -> KeyedRead:
    """Read at most ``limit`` messages under keys from ``start`` (inclusive) to ``end`` (exclusive).

    The batch may have fewer messages, or none, although others follow: it ends after some megabytes, and plugins may
    remove messages.
    """
    result = storage.read(cursor_over(storage.id, shard, start, end), limit)
    return KeyedRead(result.batch, None if result.end_of_stream else next_key(result.cursor))


def batches_between(storage: Storage, shard: int, start: bytes, end: bytes) -> Iterator[MessageBatch]:
    """Yield a shard's messages under keys from ``start`` (inclusive) to ``end`` (exclusive), in order of keys."""
    following: bytes | None = start
    while following is not None:
        read = read_between(storage, shard, following, end, _LIMIT)
        following = read.following
        yield read.batch
