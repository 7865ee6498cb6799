"""The stored form of keyed messages, and how they are read through the hooks; see `topicstore.storage.keyed_messages`.

Stored form (state keyspace; keys begin with a byte of one, left out here)::

    "k" key -> record (see `topicstore.shard.record_codec`) of version 1, position, topic, payload, client id, QoS,
               retain, timestamp, properties

The position is the message's own if it was also stored in a stream, else the first of the time when it
was stored under its key. The first byte of a key says whose it is: ``r`` retained messages, ``w`` wills.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.engine import STATE
from topicstore.contract.errors import InvalidIteratorError
from topicstore.contract.iterators import Iterator as StreamIterator
from topicstore.contract.model import Properties
from topicstore.contract.positions import first_position
from topicstore.contract.requests import Destinations, IterateRequest, NextResult
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.shard import Shard

__all__ = ["GENERATION", "encode_keyed", "iterator_over", "key_in", "read_keyed", "state_key"]

GENERATION = 0
"""The generation that iterators over keyed messages name; those of streams are numbered from 1."""
_PREFIX = b"\1k"
_VERSION = 1
_LIMIT_BYTES = 8 << 20


class _Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A keyed message."""

    version: int
    position: int
    topic: str
    payload: bytes
    client_id: str
    qos: int
    retain: bool
    timestamp: int
    properties: Properties | None


_fields = attrgetter("topic", "payload", "client_id", "qos", "retain", "timestamp", "properties")
_CODEC = RecordCodec(_Record, _VERSION)
_ENCODER = msgspec.msgpack.Encoder()
_PLACES = msgspec.msgpack.Decoder(tuple[bytes, bytes])


def state_key(key: bytes) -> bytes:
    """Return under which key of the state a keyed message lies: what `StateWrite` deletes and compares."""
    return _PREFIX + key


def key_in(state_key: bytes) -> bytes:
    """Return the key of the message that lies under a key of the state."""
    return state_key[len(_PREFIX) :]


def iterator_over(database: bytes, shard: int, start: bytes, end: bytes) -> StreamIterator:
    """Return an iterator over a shard's messages under keys from ``start`` to before ``end``, in order of keys."""
    return StreamIterator(database, shard, GENERATION, 0, "#", _ENCODER.encode((start, end)))


def encode_keyed(
    batch: MessageBatch, where: Destinations, placed: MessageBatch, now: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield shard, state key and value of the messages of a batch that have a key, in order of rows.

    ``placed``: those that go to the streams, with their positions and times. ``now``: the time of the others.
    """
    stored, keyed = where.stored, where.keyed
    rows = np.fromiter(keyed, np.intp, len(keyed))
    also_stored = stored[rows]
    apart = batch.take(rows[~also_stored])
    joined = placed.take(np.cumsum(stored)[rows[also_stored]] - 1)
    values: dict[int, _Record] = dict(zip(rows[~also_stored].tolist(), _records(apart, now), strict=True))
    values.update(zip(rows[also_stored].tolist(), _records(joined, now), strict=True))
    for row, (shard, key) in keyed.items():
        under = state_key(key)
        yield shard, under, _CODEC.encode(under, values[row])


def _records(batch: MessageBatch, now: int) -> Iterator[_Record]:
    positions = Constant(first_position(now), len(batch)) if batch.positions is None else to_list(batch.positions)
    for position, m in zip(positions, batch.to_messages(), strict=True):
        timestamp = now if m.timestamp is None else m.timestamp
        yield _Record(_VERSION, position, m.topic, m.payload, m.client_id, m.qos, m.retain, timestamp, m.properties)


def read_keyed(request: IterateRequest, shard: Shard) -> NextResult:
    """Read on in a shard's keyed messages. Their positions are those of the stored form: neither unique nor in order.

    The iterator's place says which: a msgpack array of the first key and of the key before which to end.
    It has no filter. ``until`` and ``bound`` mean nothing here.
    """
    iterator = request.iterator
    try:
        start, end = _PLACES.decode(iterator.place)
    except msgspec.DecodeError as bad:
        raise InvalidIteratorError(f"the iterator's place is not one of keyed messages: {bad}") from bad
    records: list[_Record] = []
    size, whole = 0, True
    reader = shard.reader()
    for chunk in reader.scan(STATE, state_key(start), state_key(end), limit=request.limit):
        for key, value in chunk:
            records.append(_decode(iterator.shard, key, value))
            size += len(value)
            start = key_in(key) + b"\0"
        if size >= _LIMIT_BYTES:
            whole = False
            break
    whole = whole and len(records) < request.limit
    moved = msgspec.structs.replace(iterator, place=_ENCODER.encode((start, end)))
    return NextResult(batch=_batch(records, iterator.shard), iterator=moved, end_of_stream=whole, caught_up=whole)


def _decode(shard: int, key: bytes, value: bytes) -> _Record:
    return _CODEC.decode(key, value, f"shard {shard}, state: keyed message {key_in(key)!r}")


def _batch(records: list[_Record], shard: int) -> MessageBatch:
    if not records:
        return MessageBatch.empty()
    positions = np.array([record.position for record in records], np.uint64)
    topics, payloads, client_ids, qos, retain, timestamps, properties = map(
        list, zip(*map(_fields, records), strict=True)
    )
    return MessageBatch(
        topics,
        payloads,
        client_ids,
        qos,
        retain,
        timestamps,
        properties,
        positions,
        Constant(shard, len(records)),
    )
