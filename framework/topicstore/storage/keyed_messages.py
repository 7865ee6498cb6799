"""Keyed messages: messages under a key, of which the last one counts, beside a shard's streams.

Retained messages and wills are such. They outlive generations, and are no part of any replay. They go in
through ``topicstore_store`` and come out through ``topicstore_iterate``, so that plugins which transform
messages see them too: there, they are the messages of generation 0, in order of their keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.model import Message
from topicstore.contract.requests import Destinations, StoreResult
from topicstore.contract.state import StateWrite

from .keyed_message_records import iterator_over, key_in, state_key
from .storage import Storage

__all__ = ["batches_between", "message_under", "messages_under", "state_key", "store_under"]

_LIMIT = 1_024
"""Messages fetched at a time."""


def store_under(
    storage: Storage,
    messages: Iterable[Message] | MessageBatch,
    keys: Sequence[bytes | None],
    *,
    shards: Sequence[int] | None = None,
    stored: Sequence[bool] | None = None,
    state: Mapping[int, Sequence[StateWrite]] | None = None,
) -> StoreResult:
    """Store messages under keys, each in place of the one that was there.

    keys:   by message; None: under none.
    shards: by message, where it is kept under its key; by default in the shard of its client id.
    stored: by message, whether it also goes to the streams; by default none does.
    state:  writes by shard; all of a shard is committed in one engine write.
    """
    batch = MessageBatch.of(messages)
    for name, column in (("keys", keys), ("shards", shards), ("stored", stored)):
        if column is not None and len(column) != len(batch):
            raise InvalidArgumentError(f"{name} has {len(column)} entries for {len(batch)} messages")
    keyed = {}
    for row, key in enumerate(keys):
        if key is not None:
            if not isinstance(key, bytes) or not key:
                raise InvalidArgumentError(f"the key of a message is bytes, not {key!r}")
            keyed[row] = (storage.shard_of(batch.client_ids[row]) if shards is None else shards[row], key)
    for shard, _ in keyed.values():
        storage.check_shard(shard)
    flags = np.zeros(len(batch), np.bool_) if stored is None else np.array(stored, np.bool_)
    return storage.write(batch, state or {}, Destinations(stored=flags, keyed=keyed))


def message_under(storage: Storage, shard: int, key: bytes) -> Message | None:
    """Return the message that a shard has under a key; None if there is none."""
    batch = storage.next(iterator_over(storage.id, shard, key, key + b"\0"), 1).batch
    return batch.to_messages()[0] if len(batch) else None


def messages_under(storage: Storage, shard: int, prefix: bytes) -> Iterator[tuple[bytes, Message]]:
    """Yield (key, message) of all that a shard has under keys that begin with ``prefix``, in order of keys.

    One at a time, so that keys are right whatever a plugin leaves out or changes; for few messages.
    """
    for under, _ in storage.state(shard).scan(state_key(prefix)):
        key = key_in(under)
        message = message_under(storage, shard, key)
        if message is not None:
            yield key, message


def batches_between(storage: Storage, shard: int, start: bytes, end: bytes) -> Iterator[MessageBatch]:
    """Yield the messages that a shard has under keys from ``start`` to before ``end``, in order of keys."""
    iterator, ended = iterator_over(storage.id, shard, start, end), False
    while not ended:
        result = storage.next(iterator, _LIMIT)
        iterator, ended = result.iterator, result.end_of_stream
        yield result.batch
