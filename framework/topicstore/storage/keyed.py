"""Kept messages: a shard's last-value messages beside its streams, such as retained messages and wills.

They outlive generations, and are no part of any replay. They go in through ``topicstore_store`` and come
out through ``topicstore_iterate``, so that plugins which transform messages see them too: there, they
are the messages of generation 0, in order of their keys.

Stored form (state keyspace; keys begin with a byte of one, left out here)::

    "k" key -> checksum (see `topicstore.contract.checksums`) and msgpack array of version 1, position, topic, payload,
               client id, QoS, retain, timestamp, properties

The position is the message's own if it was also stored in a stream, else the first of the time when it
was kept. Fields are only ever appended. The first byte of a key says whose it is: ``r`` retained
messages, ``w`` wills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.engine import STATE
from topicstore.contract.errors import CorruptionError, InvalidArgumentError, InvalidIteratorError, NewerFormatError
from topicstore.contract.iterators import Iterator as Place
from topicstore.contract.layout import Damage
from topicstore.contract.model import Message, Properties
from topicstore.contract.positions import first_position
from topicstore.contract.requests import Destinations, IterateRequest, NextResult

if TYPE_CHECKING:
    from topicstore.database import Database
    from topicstore.shard.shard import Shard

__all__ = [
    "GENERATION",
    "damaged_kept",
    "destinations",
    "encode_kept",
    "kept",
    "kept_batches",
    "kept_get",
    "kept_key",
    "read_kept",
]

GENERATION = 0
"""The generation that iterators over kept messages name; those of streams are numbered from 1."""
_PREFIX, _END = b"\1k", b"\1l"
_VERSION = 1
_LIMIT = 1_024
"""Messages fetched at a time."""
_LIMIT_BYTES = 8 << 20


class _Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A kept message."""

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
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Record)
_PLACES = msgspec.msgpack.Decoder(tuple[bytes, bytes])


def kept_key(key: bytes) -> bytes:
    """Return the state key of a kept message: what `StateWrite` deletes and compares."""
    return _PREFIX + key


# --- in ---


def destinations(
    db: Database,
    batch: MessageBatch,
    keys: Sequence[bytes | None],
    shards: Sequence[int] | None,
    stored: Sequence[bool] | None,
) -> Destinations:
    """Check what `Database.store_kept` was given, and say where each row goes."""
    for name, column in (("keys", keys), ("shards", shards), ("stored", stored)):
        if column is not None and len(column) != len(batch):
            raise InvalidArgumentError(f"{name} has {len(column)} entries for {len(batch)} messages")
    kept = {}
    for row, key in enumerate(keys):
        if key is not None:
            if not isinstance(key, bytes) or not key:
                raise InvalidArgumentError(f"the key of a kept message is bytes, not {key!r}")
            kept[row] = (db.shard_of(batch.client_ids[row]) if shards is None else shards[row], key)
    for shard, _ in kept.values():
        db.state(shard)  # raises if there is no such shard
    flags = np.zeros(len(batch), np.bool_) if stored is None else np.array(stored, np.bool_)
    return Destinations(stored=flags, kept=kept)


def encode_kept(
    batch: MessageBatch, where: Destinations, placed: MessageBatch, now: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield shard, state key and value of the messages of a batch that are kept, in order of rows.

    ``placed``: those that go to the streams, with their positions and times. ``now``: the time of the others.
    """
    stored, kept = where.stored, where.kept
    rows = np.fromiter(kept, np.intp, len(kept))
    also_stored = stored[rows]
    apart = batch.take(rows[~also_stored])
    joined = placed.take(np.cumsum(stored)[rows[also_stored]] - 1)
    values: dict[int, _Record] = dict(zip(rows[~also_stored].tolist(), _records(apart, now), strict=True))
    values.update(zip(rows[also_stored].tolist(), _records(joined, now), strict=True))
    for row, (shard, key) in kept.items():
        state_key = kept_key(key)
        yield shard, state_key, add_checksum(state_key, _ENCODER.encode(values[row]))


def _records(batch: MessageBatch, now: int) -> Iterator[_Record]:
    positions = Constant(first_position(now), len(batch)) if batch.positions is None else to_list(batch.positions)
    for position, m in zip(positions, batch.to_messages(), strict=True):
        timestamp = now if m.timestamp is None else m.timestamp
        yield _Record(_VERSION, position, m.topic, m.payload, m.client_id, m.qos, m.retain, timestamp, m.properties)


# --- out ---


def read_kept(request: IterateRequest, shard: Shard) -> NextResult:
    """Read on in a shard's kept messages. Their positions are those of the stored form: neither unique nor in order.

    The iterator's place says which: a msgpack array of the first key and of the key before which to end.
    It has no filter. ``until`` and ``bound`` mean nothing here.
    """
    iterator = request.iterator
    try:
        start, end = _PLACES.decode(iterator.place)
    except msgspec.DecodeError as bad:
        raise InvalidIteratorError(f"the iterator's place is not one of kept messages: {bad}") from bad
    records: list[_Record] = []
    size, whole = 0, True
    reader = shard.reader()
    for chunk in reader.scan(STATE, kept_key(start), kept_key(end), limit=request.limit):
        for key, value in chunk:
            records.append(_decode(iterator.shard, key, value))
            size += len(value)
            start = key[len(_PREFIX) :] + b"\0"
        if size >= _LIMIT_BYTES:
            whole = False
            break
    whole = whole and len(records) < request.limit
    moved = msgspec.structs.replace(iterator, place=_ENCODER.encode((start, end)))
    return NextResult(batch=_batch(records, iterator.shard), iterator=moved, end_of_stream=whole, caught_up=whole)


def _decode(shard: int, key: bytes, value: bytes) -> _Record:
    place = f"shard {shard}, state: kept message {key[len(_PREFIX) :]!r}"
    try:
        record = _DECODER.decode(strip_checksum(key, value))
    except (CorruptionError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), place) from bad
    if record.version > _VERSION:
        raise NewerFormatError(f"{place} has version {record.version}; this topicstore reads up to {_VERSION}")
    return record


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


def damaged_kept(shard: Shard) -> Iterator[Damage]:
    """Read all that a shard keeps, as it is stored, and yield what is damaged."""
    for chunk in shard.reader().scan(STATE, _PREFIX, _END):
        for key, value in chunk:
            try:
                _decode(shard.number, key, value)
            except CorruptionError as bad:
                yield Damage(place=bad.place, reason=bad.reason)
            except NewerFormatError as newer:
                yield Damage(place=f"shard {shard.number}", reason=str(newer))


def kept_batches(db: Database, shard: int, start: bytes, end: bytes) -> Iterator[MessageBatch]:
    """Yield the messages that a shard keeps under keys from ``start`` to before ``end``, in order of keys."""
    iterator, ended = _iterator(db, shard, start, end), False
    while not ended:
        result = db.next(iterator, _LIMIT)
        iterator, ended = result.iterator, result.end_of_stream
        yield result.batch


def kept_get(db: Database, shard: int, key: bytes) -> Message | None:
    """Return the message that a shard keeps under a key; None if there is none."""
    batch = db.next(_iterator(db, shard, key, key + b"\0"), 1).batch
    return batch.to_messages()[0] if len(batch) else None


def kept(db: Database, shard: int, prefix: bytes) -> Iterator[tuple[bytes, Message]]:
    """Yield (key, message) of all kept messages of a shard whose keys begin with ``prefix``, in order of keys.

    One at a time, so that keys are right whatever a plugin leaves out or changes; for few messages.
    """
    for state_key, _ in db.state(shard).scan(kept_key(prefix)):
        key = state_key[len(_PREFIX) :]
        message = kept_get(db, shard, key)
        if message is not None:
            yield key, message


def _iterator(db: Database, shard: int, start: bytes, end: bytes) -> Place:
    return Place(bytes.fromhex(db.manifest.id), shard, GENERATION, 0, "#", _ENCODER.encode((start, end)))
