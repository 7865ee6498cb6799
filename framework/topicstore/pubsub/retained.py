"""Retained messages: the last message of each topic that was published to be retained (MQTT 5, section 3.3.1.3).

Each is a keyed message (`topicstore.storage.keyed_messages`) under the key ``"r" topic``, in its topic's shard. Only
`Database.publish` sets and clears them. Whoever subscribes later gets them, whether or not the message
was also stored in the streams.

A message with an expiry interval is given out until its time has come, counted from its position's
time; what is left of the interval goes with it. Both times are by the wall clock: while it is wrong, too few or too
many are given out. `remove_expired` takes those away whose time is over; retention, which calls it, doesn't count what
the clock jumped ahead, so a wrong clock removes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from operator import attrgetter

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_iterable, to_list
from topicstore.contract.errors import StateConflictError
from topicstore.contract.model import Message
from topicstore.contract.positions import COUNTER_BITS
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.keyed_messages import batches_between, state_key
from topicstore.storage.storage import Storage

__all__ = ["remove_expired", "retained", "retained_rows"]

_PREFIX = b"r"
_ALL = (b"r", b"s")
_WILDCARDS = frozenset("+#")
_SECOND = 1_000_000


_Keyed = dict[int, tuple[int, bytes]]
_Writes = dict[int, list[StateWrite]]


def _key(topic: str) -> bytes:
    return _PREFIX + topic.encode()


# --- setting and clearing ---


def retained_rows(batch: MessageBatch, shard_of: Callable[[str], int]) -> tuple[_Keyed, _Writes]:
    """Return the rows of a batch that become retained messages, each with shard and key, and writes that clear others.

    The last one of a topic counts. One with an empty payload clears.
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
            keyed[row] = shard, _key(topic)
        else:
            cleared.setdefault(shard, []).append(FrameworkWrite(state_key(_key(topic)), None))
    return keyed, cleared


def remove_expired(storage: Storage, now: int) -> int:
    """Remove the retained messages whose time is over; return how many. One that was replaced meanwhile stays."""
    return sum(
        _remove_expired(storage, shard, topic, now)
        for shard in range(len(storage.shards))
        for batch in batches_between(storage, shard, *_ALL)
        for topic in _expired(batch, now)
    )


def _remove_expired(storage: Storage, shard: int, topic: str, now: int) -> bool:
    key = _key(topic)
    state = storage.state(shard)
    found = state.get(state_key(key))  # before it is looked at again: what is removed is what was looked at
    if not any(_expired(batch, now) for batch in batches_between(storage, shard, key, key + b"\0")):
        return False
    try:
        state.write([FrameworkWrite(state_key(key), None, expect=found)])
    except StateConflictError:
        return False
    return True


# --- looking up ---


def retained(storage: Storage, topic_filter: TopicFilter, now: int) -> list[Message]:
    """Return the retained messages whose topics match, in order of topics.

    Only topics that begin with the filter's literal levels are read.
    """
    shards = [storage.shard_of(topic_filter.text)] if topic_filter.literal else range(len(storage.shards))
    found = [
        message
        for shard in shards
        for start, end in _ranges(topic_filter)
        for batch in batches_between(storage, shard, start, end)
        for message in _current(batch, topic_filter, now)
    ]
    return sorted(found, key=attrgetter("topic"))


def _ranges(topic_filter: TopicFilter) -> list[tuple[bytes, bytes]]:
    """Return the ranges of keys, each without its end, of the topics that begin as the filter does."""
    parent = _key("/".join(takewhile(_WILDCARDS.isdisjoint, topic_filter.levels)))
    if topic_filter.literal:
        return [(parent, parent + b"\0")]
    if parent == _PREFIX and topic_filter.levels[0] != "":
        return [_ALL]
    below = (parent + b"/", parent + b"0")  # "0" comes right behind "/"
    return [(parent, parent + b"\0"), below] if topic_filter.levels[-1] == "#" else [below]


def _current(batch: MessageBatch, topic_filter: TopicFilter, now: int) -> Iterator[Message]:
    """Yield the messages of a batch that match and have not expired, with what is left of their intervals."""
    for message, left in zip(batch.to_messages(), _seconds_left(batch, now), strict=True):
        if topic_filter.matches(message.topic):
            if left is None:
                yield message
            elif left > 0 and message.properties is not None:
                properties = msgspec.structs.replace(message.properties, message_expiry_interval=left)
                yield msgspec.structs.replace(message, properties=properties)


def _expired(batch: MessageBatch, now: int) -> list[str]:
    """Return the topics of the messages of a batch whose time is over."""
    left = _seconds_left(batch, now)
    return [
        topic
        for topic, seconds in zip(to_iterable(batch.topics), left, strict=True)
        if seconds is not None and seconds <= 0
    ]


def _seconds_left(batch: MessageBatch, now: int) -> list[int | None]:
    """Return of each message the seconds until it expires, rounded up; None if it never does."""
    intervals = [None if p is None else p.message_expiry_interval for p in to_iterable(batch.properties)]
    if not any(interval is not None for interval in intervals):
        return intervals
    times = (batch.positions >> np.uint64(COUNTER_BITS)).tolist()
    return [
        None if interval is None else -((now - time) // _SECOND - interval)
        for time, interval in zip(times, intervals, strict=True)
    ]
