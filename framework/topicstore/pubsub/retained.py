"""Retained messages: the last message of each topic that was published to be retained (MQTT 5, section 3.3.1.3).

A retained message is a keyed message (`topicstore.storage.keyed_messages`) under the key ``"r" topic``, in its topic's
shard. In a database that a cluster shares, the retained message is in its publisher's shard, which one site writes
together with the message. Then several shards may have messages of one topic. The message with the highest position
counts, even if it has expired; if it has no payload, the topic has no retained message.

Only `Database.publish` sets and clears retained messages. They are sent to later subscriptions, whether or not the
message was also stored in the streams. `topicstore.pubsub.retained_lookup` finds them.

A message with an expiry interval is returned until the interval is over, with the remaining interval
(`topicstore.pubsub.message_expiry`). While the wall clock is wrong, too few or too many messages are returned.
`remove_expired` removes expired messages. Retention and `topicstore.pubsub.retained_expiry` call it with a time that
excludes jumps of the wall clock, so a wrong clock removes no message too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    "Candidate",
    "Removed",
    "any_kept",
    "candidates",
    "current",
    "is_shared",
    "key_of",
    "latest",
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


def retained_rows(batch: MessageBatch, storage: Storage) -> tuple[_Keyed, _Writes]:
    """Return the rows of a batch to retain, with shard and key, and by shard the writes that clear retained messages.

    The last message of each topic counts. A message with an empty payload clears the topic's retained message; in a
    database that a cluster shares, such a message is retained, too.
    """
    flags = batch.retain
    if not len(batch) or (isinstance(flags, Constant) and not flags.value):
        return {}, {}
    last = {topic: row for row, (topic, flag) in enumerate(zip(to_iterable(batch.topics), flags, strict=True)) if flag}
    rows = list(last.values())
    chosen, shard_of = batch.take(np.array(rows, np.intp)), storage.shard_of
    payloads = to_list(chosen.payloads)
    keyed: _Keyed = {}
    cleared: _Writes = {}
    if is_shared(storage):
        publishers = map(shard_of, to_iterable(chosen.client_ids))
        return {row: (shard, key_of(topic)) for topic, row, shard in zip(last, rows, publishers, strict=True)}, {}
    for topic, row, payload in zip(last, rows, payloads, strict=True):
        shard = shard_of(topic)
        if payload:
            keyed[row] = shard, key_of(topic)
        else:
            cleared.setdefault(shard, []).append(FrameworkWrite(state_key(key_of(topic)), None))
    return keyed, cleared


def is_shared(storage: Storage) -> bool:
    """Return whether a cluster shares the database, so that retained messages lie in the shards of their publishers."""
    return storage.manifest.cluster is not None


@attrs.frozen
class Removed:
    """The result of removing expired messages."""

    count: int
    earliest: int
    """The time in microseconds since the epoch at which the next remaining message expires, or `FOREVER`."""
    hiding: bool
    """Whether expired messages remain, because each hides a message of another shard under the same topic."""


def remove_expired(storage: Storage, now: int) -> int:
    """Remove expired retained messages; return their number. A message that was replaced meanwhile stays.

    Raises the errors of `Storage.catch_up` on a site of a cluster, where a message of another shard may be hidden.
    """
    return remove_expired_until(storage, now, lambda: False).count


def remove_expired_until(storage: Storage, now: int, stop: Callable[[], bool]) -> Removed:
    """Remove expired messages as `remove_expired` does, until ``stop`` returns True.

    On a site of a cluster, only in the shards that it owns. Raises the errors of `remove_expired`.
    """
    count, earliest, expired = 0, FOREVER, 0
    for shard in [shard.number for shard in storage.shards if shard.writer.owned]:
        for batch in batches_between(storage, shard, _PREFIX, AFTER_ALL):
            if stop():
                return Removed(count, earliest, hiding=True)
            expiry = Expiry.of(batch.properties, batch.positions)
            if expiry is not None:
                earliest = min(earliest, int(expiry.ends[expiry.ends > now].min(initial=FOREVER)))
                topics = _expired(batch, now)
                if topics and not expired:
                    storage.catch_up()  # expired messages may hide unexpired ones in shards of other sites
                expired += len(topics)
                count += sum(_remove_expired(storage, shard, topic, now) for topic in topics)
    return Removed(count, earliest, hiding=count < expired)


def any_kept(storage: Storage) -> bool:
    """Return whether any retained message is stored, expired or not. Reads one key of each shard, without plugins."""
    states = map(storage.state, range(len(storage.shards)))
    return any(next(state.scan(state_key(_PREFIX)), None) is not None for state in states)


def _hides(storage: Storage, shard: int, key: bytes, now: int) -> bool:
    """Return whether a shard's message under a key hides an earlier one of another shard that has not expired."""
    found = sorted(
        (one.position, one.shard, one.message is not None)
        for other in storage.shards
        for batch in batches_between(storage, other.number, key, key + b"\0")
        for one in candidates(batch, other.number, now)
    )
    numbers = [number for _, number, _ in found]
    return shard in numbers and any(lives for _, _, lives in found[: numbers.index(shard)])


def _remove_expired(storage: Storage, shard: int, topic: str, now: int) -> bool:
    key = key_of(topic)
    if is_shared(storage) and _hides(storage, shard, key, now):
        return False
    state = storage.state(shard)
    found = state.get(state_key(key))  # read before the check: if the message changes then, the write fails
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


@attrs.frozen
class Candidate:
    """A retained message of one shard, in a database whose shards may each have one of the topic."""

    topic: str
    position: int
    shard: int
    message: Message | None
    """The message with its remaining expiry interval; None if it has expired, or has no payload."""


def candidates(batch: MessageBatch, shard: int, now: int) -> list[Candidate]:
    """Return a shard's batch of retained messages as candidates, with their expiry at the time ``now``."""
    messages, expiry = batch.to_messages(), Expiry.of(batch.properties, batch.positions)
    left = [None] * len(messages) if expiry is None else expiry.left(slice(None), now)
    return [
        Candidate(
            one.topic, int(position), shard, _with_interval(one, seconds) if one.payload and seconds != 0 else None
        )
        for one, position, seconds in zip(messages, batch.positions, left, strict=True)
    ]


def latest(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidate with the highest position of each topic, in order of topics."""
    last: dict[str, Candidate] = {}
    for one in sorted(found, key=lambda one: (one.topic, one.position, one.shard)):
        last[one.topic] = one
    return list(last.values())


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
