"""The stored form of a queue (record and messages), and the overflow policies. Pure functions.

Stored form, in the queue's own database::

    messages of topic "queue": the payload is a msgpack array of topic, client id and payload
    state: 01 "q" -> record (see `topicstore.shard.record_codec`) of version 1, name, head, messages, bytes, dropped,
                     max_messages or nil, max_bytes or nil, overflow

The head is a position: messages up to it were committed or dropped. Fields are only ever appended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch, Messages
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.errors import CorruptionError, QuotaExceededError
from topicstore.contract.model import Message
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import FrameworkWrite, ShardState

__all__ = ["DECODERS", "TOPIC", "Overflow", "QueueRecord", "Taken", "load", "pack", "save", "taken", "unpack"]

Overflow = Literal["refuse", "drop_oldest", "drop_newest"]

TOPIC = "queue"
"""The topic of all messages in a queue's database."""
_KEY = b"\1q"
_VERSION = 1
_PACK = msgspec.msgpack.Encoder().encode
_UNPACK = msgspec.msgpack.Decoder(tuple[str, str, bytes]).decode


class QueueRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The head, counts and bounds of a queue."""

    version: int = _VERSION
    name: str
    head: int = 0
    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    max_messages: int | None = None
    max_bytes: int | None = None
    overflow: Overflow = "refuse"


_CODEC = RecordCodec(QueueRecord, _VERSION)


def save(record: QueueRecord) -> FrameworkWrite:
    """Return the write that stores the record of a queue."""
    return FrameworkWrite(_KEY, _CODEC.encode(_KEY, record))


def load(state: ShardState) -> QueueRecord | None:
    """Return the record of the queue in a database; None if it is new."""
    stored = state.get(_KEY)
    return None if stored is None else _decode(_KEY, stored)


def _decode(key: bytes, stored: bytes) -> QueueRecord:
    return _CODEC.decode(key, stored, "shard 0, state: queue")


DECODERS: Decoders = {_KEY: _decode}
"""Decoder of the state of a queue's database."""


@attrs.frozen
class Taken:
    """The messages to append to a queue, and the amount of old messages to remove for them."""

    rows: npt.NDArray[np.intp]
    messages_over: int = 0
    """The least number of oldest messages to remove."""
    bytes_over: int = 0
    """The least number of bytes of oldest messages to remove."""


def taken(record: QueueRecord, sizes: npt.NDArray[np.int64]) -> Taken:
    """Apply the overflow policy to messages of these sizes in bytes. Raises `QuotaExceededError`."""
    rows, size = np.arange(len(sizes)), int(sizes.sum())
    most = len(sizes) + record.messages if record.max_messages is None else record.max_messages
    most_bytes = size + record.bytes if record.max_bytes is None else record.max_bytes
    if record.overflow == "drop_oldest":
        return _newest(record, sizes, most, most_bytes)
    room, room_bytes = max(most - record.messages, 0), most_bytes - record.bytes
    if record.overflow == "drop_newest":
        fitting = int(np.searchsorted(np.cumsum(sizes), room_bytes, side="right"))
        return Taken(rows[: min(fitting, room)])
    if len(sizes) > room or size > room_bytes:
        raise QuotaExceededError(
            f"queue {record.name!r} has no room for {len(sizes):,} messages of {size:,} bytes: it holds "
            f"{record.messages:,} of {record.bytes:,} bytes, and {max(room, 0):,} more of {max(room_bytes, 0):,} bytes"
            " fit; commit what was forwarded, or raise its bounds"
        )
    return Taken(rows)


def _newest(record: QueueRecord, sizes: npt.NDArray[np.int64], most: int, most_bytes: int) -> Taken:
    """Return the result of `taken` for ``drop_oldest``: the same as appending the messages one by one."""
    rows = np.flatnonzero(sizes <= most_bytes)
    fitting = min(int(np.searchsorted(np.cumsum(sizes[rows][::-1]), most_bytes, side="right")), most)
    if fitting < len(rows):  # if new messages are removed, all older ones are removed too
        return Taken(rows[len(rows) - fitting :], messages_over=record.messages)
    size = record.bytes + int(sizes[rows].sum())
    return Taken(rows, max(0, record.messages + len(rows) - most), max(0, size - most_bytes))


def pack(messages: Messages) -> MessageBatch:
    """Convert messages to stored form: their topics and client ids move into the payloads."""
    batch = MessageBatch.of(messages)
    columns = zip(to_iterable(batch.topics), to_iterable(batch.client_ids), to_iterable(batch.payloads), strict=True)
    rows = len(batch)
    return batch.replace(
        payloads=list(map(_PACK, columns)), topics=Constant(TOPIC, rows), client_ids=Constant("", rows)
    )


def unpack(batch: MessageBatch) -> Iterator[Message]:
    """Convert messages from stored form; yield them as they were appended. Raises `CorruptionError`."""
    try:
        for row, payload in zip(batch.to_messages(), to_iterable(batch.payloads), strict=True):
            topic, client_id, own = _UNPACK(payload)
            yield Message(topic, own, client_id, row.qos, row.retain, row.timestamp, row.properties)
    except msgspec.DecodeError as bad:
        raise CorruptionError(f"a message of the queue can't be read: {bad}", "shard 0") from bad
