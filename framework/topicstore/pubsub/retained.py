"""Retained messages: the last message of each topic that was published to be retained (MQTT 5, section 3.3.1.3).

A retained message is a keyed message (`topicstore.storage.keyed_messages`) under the key ``"r" topic``, in its topic's
shard. Only `Database.publish` sets and clears retained messages. They are sent to later subscriptions, whether or not
the message was also stored in the streams. `topicstore.pubsub.retained_lookup` finds them.

A message with an expiry interval is returned until the interval is over, with the remaining interval
(`topicstore.pubsub.message_expiry`). While the wall clock is wrong, too few or too many messages are returned.
`remove_expired` removes expired messages. Retention and `topicstore.pubsub.retained_expiry` call it with a time that
excludes jumps of the wall clock, so a wrong clock removes no message too early.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_iterable, to_list
from topicstore.contract.errors import StateConflictError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.keyed_messages import batches_between, state_key
from topicstore.storage.storage import Storage

from .message_expiry import Expiry

__all__ = [
    "AFTER_ALL",
    "FOREVER",
    "Removed",
    "any_kept",
    "current",
    "key_of",
    "remove_expired",
    "remove_expired_until",
    "retained_rows",
    "topic_at",
]

_PREFIX = b"r"
AFTER_ALL = b"s"
"""The key that follows those of all retained messages."""


FOREVER = (1 << 63) - 1
"""A time that never comes."""

_Keyed = dict[int, tuple[int, bytes]]
_Writes = dict[int, list[StateWrite]]


def key_of(topic: str) -> bytes:
    """Return the key of a topic's retained message. Keys are in order of topics."""
    return _PREFIX + topic.encode()


def topic_at(key: bytes) -> str:
    """Return the text of a key. The text is not always a topic, because keys between topics are used as bounds."""
    return key[len(_PREFIX) :].decode()


# --- setting and clearing ---


def retained_rows(batch: MessageBatch, shard_of: Callable[[str], int]) -> tuple[_Keyed, _Writes]:
    """Return the rows of a batch to retain, with shard and key, and by shard the writes that clear retained messages.

    The last message of each topic counts. A message with an empty payload clears the topic's retained message.
    """
    flags = batch.retain
    if not len(batch) or (isinstance(flags, Constant) and not flags.value):
        return {}, {}
    last = {topic: row for row, (topic, flag) in enumerate(zip(to_iterable(batch.topics), flags, strict=True)) if flag}
    rows = list(last.values())
    payloads = to_list(batch.take(np.array(rows, np.intp)).payloads)
    keyed: _Keyed = {}
    cleared: _Writes = {}
    for topic, row, payload in zip(last, rows, payloads, strict=True):
        shard = shard_of(topic)
        if payload:
            keyed[row] = shard, key_of(topic)
        else:
            cleared.setdefault(shard, []).append(FrameworkWrite(state_key(key_of(topic)), None))
    return keyed, cleared


@attrs.frozen
class Removed:
    """The result of removing expired messages."""

    count: int
    earliest: int
    """The time in microseconds since the epoch at which the next remaining message expires, or `FOREVER`."""


def remove_expired(storage: Storage, now: int) -> int:
    """Remove expired retained messages; return their number. A message that was replaced meanwhile stays."""
    return remove_expired_until(storage, now, lambda: False).count


def remove_expired_until(storage: Storage, now: int, stop: Callable[[], bool]) -> Removed:
    """Remove expired messages as `remove_expired` does, until ``stop`` returns True.

    On a site of a cluster, only in the shards that it owns.
    """
    count, earliest = 0, FOREVER
    for shard in [shard.number for shard in storage.shards if shard.writer.owned]:
        for batch in batches_between(storage, shard, _PREFIX, AFTER_ALL):
            if stop():
                return Removed(count, earliest)
            expiry = Expiry.of(batch.properties, batch.positions)
            if expiry is not None:
                earliest = min(earliest, int(expiry.ends[expiry.ends > now].min(initial=FOREVER)))
                count += sum(_remove_expired(storage, shard, topic, now) for topic in _expired(batch, now))
    return Removed(count, earliest)


def any_kept(storage: Storage) -> bool:
    """Return whether any retained message is stored, expired or not. Reads one key of each shard, without plugins."""
    states = map(storage.state, range(len(storage.shards)))
    return any(next(state.scan(state_key(_PREFIX)), None) is not None for state in states)


def _remove_expired(storage: Storage, shard: int, topic: str, now: int) -> bool:
    key = key_of(topic)
    state = storage.state(shard)
    found = state.get(state_key(key))  # before the next check, so that only the value that was checked is removed
    if not any(_expired(batch, now) for batch in batches_between(storage, shard, key, key + b"\0")):
        return False
    try:
        state.write([FrameworkWrite(state_key(key), None, expect=found)])
    except StateConflictError:
        return False
    return True


# --- expiring ---


def _expired(batch: MessageBatch, now: int) -> list[str]:
    """Return the topics of the messages of a batch that have expired."""
    expiry = Expiry.of(batch.properties, batch.positions)
    if expiry is None:
        return []
    left = expiry.left(slice(None), now)
    return [topic for topic, seconds in zip(to_iterable(batch.topics), left, strict=True) if seconds == 0]


def current(batch: MessageBatch, now: int) -> list[Message]:
    """Return the messages of a batch that have not expired, with their remaining expiry intervals."""
    messages, expiry = batch.to_messages(), Expiry.of(batch.properties, batch.positions)
    if expiry is None:
        return messages
    left = zip(messages, expiry.left(slice(None), now), strict=True)
    return [_with_interval(message, seconds) for message, seconds in left if seconds != 0]


def _with_interval(message: Message, seconds: int | None) -> Message:
    if message.properties is None or seconds is None:
        return message
    properties = msgspec.structs.replace(message.properties, message_expiry_interval=seconds)
    return msgspec.structs.replace(message, properties=properties)
