"""The stored form of one message as one value, shared by the layouts that keep messages so.

A value says everything about its message but its position, which its key says: names are texts,
no dictionary is needed to read them.

Stored form, version 1: a msgpack array::

    [1, checksum, topic, payload, client id, qos, retain, timestamp, properties]

``checksum`` is 8 bytes: xxh3, 64 bits big-endian, of all that follows it, with the position XOR
(slab * 0x9E3779B97F4A7C15 modulo 2**64) as seed, where slab is ``shard << 32 | generation``: a
value under another's key is noticed like a flipped bit. ``timestamp`` is nil if it is the time in
the position. ``properties`` is nil or the array of `topicstore.Properties`. Later versions are
arrays too and begin with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import xxhash
from topicstore import MessageBatch, Properties
from topicstore.columns import Column, Constant, fold, to_iterable
from topicstore.errors import CorruptionError, NewerFormatError
from topicstore.positions import COUNTER_BITS, Positions

__all__ = ["Row", "batch_of", "decode_rows", "encode_rows", "read_rows"]

_VERSION = 1
_FIELDS = 9
_START = bytes((0x90 | _FIELDS, _VERSION, 0xC4, 8))
"""What a value begins with: an array of nine, the version, eight bytes that follow."""
_HEAD = len(_START) + 8
_ODD = 0x9E37_79B9_7F4A_7C15
_LARGE = 4_096
"""Bytes of an average value above which it is dearer to copy one than to make a view of it."""


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One stored message as it was decoded; ``timestamp`` is None if its position has it."""

    version: int
    checksum: bytes
    topic: str
    payload: bytes
    client_id: str
    qos: int
    retain: bool
    timestamp: int | None
    properties: Properties | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Row])


def encode_rows(batch: MessageBatch, slab: int) -> list[bytes]:
    """Return a value for each message of a batch that has positions; ``slab`` is shard << 32 | generation."""
    columns = (
        batch.topics,
        batch.payloads,
        batch.client_ids,
        batch.qos,
        batch.retain,
        _stored_times(batch.timestamps, np.asarray(batch.positions, dtype=np.uint64)),
        batch.properties,
    )
    rows = zip(*map(to_iterable, columns), strict=True)
    bodies = _without(1, list(map(_ENCODER.encode, rows)))  # the header of an array of seven goes
    checksums = map(xxhash.xxh3_64_digest, bodies, _seeds(batch.positions, slab))
    return [_START + checksum + body for checksum, body in zip(checksums, bodies, strict=True)]


def decode_rows(values: Sequence[bytes], positions: Positions, shard: int, slab: int) -> MessageBatch:
    """Return the messages of values, each with its position.

    Raises `CorruptionError` naming the place of a damaged value or one that was stored for another
    position or slab, and `NewerFormatError` for one of a later version.
    """
    return batch_of(read_rows(values, positions, slab), positions, shard)


def read_rows(values: Sequence[bytes], positions: Positions, slab: int) -> list[Row]:
    """Return values decoded and checked, for readers that want to choose before they build a batch.

    Raises like `decode_rows`.
    """
    try:
        # All at once, as one array of arrays: a call of the decoder for each would take twice as long.
        rows: list[Row] = _DECODER.decode(b"".join((b"\xdd", len(values).to_bytes(4, "big"), *values)))
    except (msgspec.DecodeError, UnicodeDecodeError):
        rows = []
    if len(rows) == len(values) and _intact(rows, values, positions, slab):
        return rows
    return [_read_one(value, position, slab) for value, position in zip(values, positions.tolist(), strict=True)]


def batch_of(rows: Sequence[Row], positions: Positions, shard: int) -> MessageBatch:
    """Return decoded messages as a batch, each with its position."""
    if not rows:
        return MessageBatch.empty()
    return MessageBatch(
        topics=[row.topic for row in rows],
        payloads=[row.payload for row in rows],
        client_ids=[row.client_id for row in rows],
        qos=fold([row.qos for row in rows]),
        retain=fold([row.retain for row in rows]),
        timestamps=_times([row.timestamp for row in rows], positions),
        properties=fold([row.properties for row in rows]),
        positions=positions,
        shards=Constant(shard, len(rows)),
    )


def _intact(rows: Sequence[Row], values: Sequence[bytes], positions: Positions, slab: int) -> bool:
    bodies = _without(_HEAD, values)
    checksums = list(map(xxhash.xxh3_64_digest, bodies, _seeds(positions, slab)))
    return [row.checksum for row in rows] == checksums and [row.version for row in rows].count(_VERSION) == len(rows)


def _read_one(value: bytes, position: int, slab: int) -> Row:
    """Return one value decoded; the slow way, which says what is wrong."""
    place = f"shard {slab >> 32}, generation {slab & 0xFFFF_FFFF}, message at position {position}"
    if len(value) > 1 and value[0] & 0xF0 == 0x90 and _VERSION < value[1] < 0x80:
        raise NewerFormatError(f"{place}: a message of version {value[1]}; this topicstore reads up to {_VERSION}")
    if value[: len(_START)] != _START:
        raise CorruptionError("not a stored message", place)
    here = np.array([position], dtype=np.uint64)
    (checksum,) = map(xxhash.xxh3_64_digest, _without(_HEAD, [value]), _seeds(here, slab))
    if value[len(_START) : _HEAD] != checksum:
        raise CorruptionError("the checksum is wrong", place)
    try:
        (row,) = _DECODER.decode(b"\x91" + value)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as bad:
        raise CorruptionError(str(bad), place) from bad
    return row


def _seeds(positions: Column, slab: int) -> list[int]:
    mixed = np.uint64(slab * _ODD & 0xFFFF_FFFF_FFFF_FFFF)
    return (np.asarray(positions, dtype=np.uint64) ^ mixed).tolist()  # type: ignore[no-any-return]


def _without(head: int, values: Sequence[bytes]) -> list[bytes] | list[memoryview]:
    """Return the values without their first bytes."""
    if sum(map(len, values)) > _LARGE * len(values):
        return [memoryview(value)[head:] for value in values]
    return [value[head:] for value in values]


def _stored_times(times: Column, positions: Positions) -> Iterable[int | None]:
    """Return each time, or None where the position has it."""
    differ = np.asarray(list(to_iterable(times)), dtype=np.int64) != (positions >> np.uint64(COUNTER_BITS)).astype(
        np.int64
    )
    if not differ.any():
        return Constant(None, len(positions))
    if differ.all():
        return to_iterable(times)
    return [time if own else None for time, own in zip(to_iterable(times), differ.tolist(), strict=True)]


def _times(stored: list[int | None], positions: Positions) -> Column:
    missing = stored.count(None)
    if not missing:
        return stored
    implied = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    if missing == len(stored):
        return implied
    return [own if own is not None else time for own, time in zip(stored, implied.tolist(), strict=True)]
