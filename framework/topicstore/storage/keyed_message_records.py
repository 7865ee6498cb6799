"""The stored form of keyed messages (`topicstore.storage.keyed_messages`), and their ``topicstore_read``.

Stored form (state keyspace; keys begin with byte 1, which is left out here)::

    "k" key -> record (see `topicstore.shard.record_codec`) of version 1, position, topic, payload, client id, QoS,
               retain, timestamp, properties

The position is the message's position in the stream if it was also stored there, otherwise the first position of the
time of its store. The first byte of a key is its kind: ``r`` for retained messages, ``w`` for wills.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant
from topicstore.contract.cursors import Cursor
from topicstore.contract.engine import STATE
from topicstore.contract.errors import InvalidCursorError
from topicstore.contract.model import Properties
from topicstore.contract.positions import first_position
from topicstore.contract.requests import Destinations, ReadRequest, ReadResult
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard

__all__ = ["DECODERS", "GENERATION", "cursor_over", "encode_keyed", "key_in", "next_key", "read_keyed", "state_key"]

GENERATION = 0
"""The generation of cursors over keyed messages; the generations of streams are numbered from 1."""
_PREFIX = b"\1k"
_VERSION = 1
_LIMIT_BYTES = 8 << 20


class _Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The record of a keyed message."""

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
    """Return the key in the shard's state under which a keyed message is stored, for use in a `StateWrite`."""
    return _PREFIX + key


def key_in(state_key: bytes) -> bytes:
    """Return a message's key, given the key in the shard's state under which it is stored."""
    return state_key[len(_PREFIX) :]


def cursor_over(database: bytes, shard: int, start: bytes, end: bytes) -> Cursor:
    """Return a cursor over a shard's messages under keys from ``start`` to before ``end``, in order of keys."""
    return Cursor(database, shard, GENERATION, 0, "#", _ENCODER.encode((start, end)))


def next_key(cursor: Cursor) -> bytes:
    """Return the first key of the remaining range of a cursor over keyed messages."""
    return _PLACES.decode(cursor.place)[0]


def encode_keyed(
    batch: MessageBatch, where: Destinations, placed: MessageBatch, now: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (shard, state key, value) of the messages of a batch that have a key, in order of rows.

    ``placed`` are the messages that are stored in the streams, with their positions and times. ``now`` is the time of
    all other messages.
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
    positions = batch.positions.tolist() if batch.stored else Constant(first_position(now), len(batch))
    for position, m in zip(positions, batch.to_messages(), strict=True):
        timestamp = now if m.timestamp is None else m.timestamp
        yield _Record(_VERSION, position, m.topic, m.payload, m.client_id, m.qos, m.retain, timestamp, m.properties)


def read_keyed(request: ReadRequest, shard: Shard) -> ReadResult:
    """Return the next batch of a shard's keyed messages.

    The messages' positions are those of the stored form, which are neither unique nor in order. The cursor's place is a
    msgpack array of the range's first key and its end, exclusive. The cursor's filter, ``until`` and ``bound`` are
    ignored. Raises `ShardElsewhereError` if this site of a cluster has no whole copy of the shard.
    """
    try:
        start, end = _PLACES.decode(request.cursor.place)
    except msgspec.DecodeError as bad:
        raise InvalidCursorError(f"the cursor's place is not one of keyed messages: {bad}") from bad
    found: ReadResult = shard.generations.undisturbed(lambda: _read(request, shard, start, end))
    if shard.writer.elsewhere:  # checked after reading, because a copy may be removed meanwhile
        raise shard.writer.elsewhere_error()
    return found


def _read(request: ReadRequest, shard: Shard, start: bytes, end: bytes) -> ReadResult:
    cursor = request.cursor
    records: list[_Record] = []
    size, whole = 0, True
    reader = shard.writer.open_engine()
    for chunk in reader.scan(STATE, state_key(start), state_key(end), limit=request.limit):
        if chunk:
            records += _CODEC.decode_many(chunk, partial(_place_of, cursor.shard))
            size += sum(len(value) for _, value in chunk)
            start = key_in(chunk[-1][0]) + b"\0"
        if size >= _LIMIT_BYTES:
            whole = False
            break
    whole = whole and len(records) < request.limit
    moved = msgspec.structs.replace(cursor, place=_ENCODER.encode((start, end)))
    return ReadResult(batch=_batch(records, cursor.shard), cursor=moved, end_of_stream=whole, caught_up=whole)


def _place_of(shard: int, key: bytes) -> str:
    return f"shard {shard}, state: keyed message {key_in(key)!r}"


DECODERS: Decoders = {_PREFIX: lambda key, value: _CODEC.decode(key, value, "state: keyed message")}
"""The decoder of keyed messages in the state, by prefix of the keys."""


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
        positions=positions,
        shards=Constant(shard, len(records)),
    )
