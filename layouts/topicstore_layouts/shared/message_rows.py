"""The stored form of a message as a single value, which several layouts share.

A value holds everything about its message except its position, which is in its key. Topics and client ids are
stored as text, so no dictionary is needed to read them.

Stored form, version 1: a msgpack array, whose last field is left out if there are no properties::

    [checksum, kind, topic, payload, client id, timestamp, properties]

``checksum`` is 8 bytes: xxh3, 64 bits big-endian, of all bytes after it. Its seed is the position XOR
(slab * 0x9E3779B97F4A7C15 modulo 2**64), where slab is ``shard << 32 | generation``. So a
value under the wrong key is detected like a flipped bit. ``kind`` is ``version << 3 | retain << 2 |
qos``. ``timestamp`` is nil if it is the time in the position. ``properties`` is the array of
`topicstore.Properties`. Later versions are arrays too, with the same checksum and a kind of one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import xxhash
from topicstore import MessageBatch, Properties
from topicstore.contract.columns import Column, Constant, fold, to_iterable, to_list
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import COUNTER_BITS, Positions

__all__ = ["Row", "batch_of", "decode_rows", "encode_rows", "read_rows"]

_VERSION = 1
_PLAIN, _WHOLE = b"\x96\xc4\x08", b"\x97\xc4\x08"
"""The first bytes of a value: an array of six, or of seven with properties, whose first element has 8 bytes."""
_HEAD = len(_PLAIN) + 8
_ODD = 0x9E37_79B9_7F4A_7C15
_LARGE = 4_096
"""The bytes of an average value above which copying a value costs more than making a view of it."""


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One decoded stored message. `batch_of` turns rows into messages."""

    checksum: bytes
    kind: int
    topic: str
    payload: bytes
    client_id: str
    timestamp: int | None
    properties: Properties | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Row])


# --- encoding ---


def encode_rows(batch: MessageBatch, slab: int) -> list[bytes]:
    """Return a value for each message of a batch that has positions; ``slab`` is shard << 32 | generation."""
    positions = np.asarray(batch.positions, dtype=np.uint64)
    times = _stored_times(batch.timestamps, positions)
    columns = (_kinds(batch.qos, batch.retain), batch.topics, batch.payloads, batch.client_ids, times)
    rows: Iterable[tuple[object, ...]] = zip(*map(to_iterable, columns), strict=True)
    starts: Iterable[bytes] = Constant(_PLAIN, len(batch))
    properties = to_list(batch.properties)
    if properties.count(None) < len(properties):
        rows = [row if its is None else (*row, its) for row, its in zip(rows, properties, strict=True)]
        starts = [_PLAIN if its is None else _WHOLE for its in properties]
    arrays = list(map(_ENCODER.encode, rows))
    # Removes the header of the array that was encoded without the checksum.
    bodies = _without(1, arrays, sum(map(len, arrays)))
    checksums = map(xxhash.xxh3_64_digest, bodies, _seeds(positions, slab))
    return list(map(b"".join, zip(starts, checksums, bodies, strict=True)))


def _kinds(qos: Column, retain: Column) -> Column:
    if isinstance(qos, Constant) and isinstance(retain, Constant):
        return Constant(_VERSION << 3 | retain.value << 2 | qos.value, len(qos))
    pairs = zip(to_iterable(retain), to_iterable(qos), strict=True)
    return [_VERSION << 3 | retained << 2 | level for retained, level in pairs]


def _stored_times(times: Column, positions: Positions) -> Column:
    """Return each timestamp, or None where it equals the time in the position."""
    own = to_list(times)
    implied = positions >> np.uint64(COUNTER_BITS)
    same = np.array(own, dtype=np.int64) == implied.astype(np.int64)
    if same.all():
        return Constant(None, len(own))
    return [None if as_implied else time for time, as_implied in zip(own, same.tolist(), strict=True)]


# --- decoding ---


def decode_rows(values: Sequence[bytes], positions: Positions, shard: int, slab: int) -> MessageBatch:
    """Return the messages decoded from values, each with its position.

    Raises `CorruptionError`, which names the key, for a value that is damaged or was stored for another position or
    slab, and `NewerFormatError` for a value of a later version.
    """
    return batch_of(read_rows(values, positions, slab), positions, shard)


def read_rows(values: Sequence[bytes], positions: Positions, slab: int) -> list[Row]:
    """Decode values and check their checksums, for readers that select rows before they build a batch.

    Raises like `decode_rows`.
    """
    # Decoded together, as one array of arrays: calling the decoder for each value would take twice as long.
    joined = b"".join((b"\xdd", len(values).to_bytes(4, "big"), *values))
    try:
        rows: list[Row] = _DECODER.decode(joined)
    except (msgspec.DecodeError, UnicodeDecodeError):
        rows = []
    if len(rows) == len(values) and _intact(rows, _without(_HEAD, values, len(joined)), positions, slab):
        return rows
    return [_read_one(value, position, slab) for value, position in zip(values, positions.tolist(), strict=True)]


def _intact(rows: Sequence[Row], bodies: Sequence[bytes], positions: Positions, slab: int) -> bool:
    checksums = list(map(xxhash.xxh3_64_digest, bodies, _seeds(positions, slab)))
    kinds = {row.kind for row in rows}
    return [row.checksum for row in rows] == checksums and all(kind >> 3 == _VERSION for kind in kinds)


def _read_one(value: bytes, position: int, slab: int) -> Row:
    """Return one decoded value. This is slower than decoding many, but its errors name the damage."""
    place = f"shard {slab >> 32}, generation {slab & 0xFFFF_FFFF}, message at position {position}"
    seeds = _seeds(np.array([position], dtype=np.uint64), slab)
    (checksum,) = map(xxhash.xxh3_64_digest, [value[_HEAD:]], seeds)
    if len(value) <= _HEAD or value[1:_HEAD] != _PLAIN[1:] + checksum:
        raise CorruptionError("the checksum is wrong", place)
    if _VERSION < value[_HEAD] >> 3 < 16:
        version = value[_HEAD] >> 3
        raise NewerFormatError(f"a message of version {version}; this topicstore reads up to {_VERSION}", place)
    try:
        (row,) = _DECODER.decode(b"\x91" + value)
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise CorruptionError(str(bad), place) from bad
    if row.kind >> 3 != _VERSION:
        raise CorruptionError(f"a message of kind {row.kind}, which there never was", place)
    return row


def batch_of(rows: Sequence[Row], positions: Positions, shard: int) -> MessageBatch:
    """Return decoded messages as a batch, each with its position."""
    if not rows:
        return MessageBatch.empty()
    kinds = fold([row.kind for row in rows])
    return MessageBatch(
        topics=[row.topic for row in rows],
        payloads=[row.payload for row in rows],
        client_ids=[row.client_id for row in rows],
        qos=_each(kinds, lambda kind: kind & 3),
        retain=_each(kinds, lambda kind: kind & 4 != 0),
        timestamps=_times([row.timestamp for row in rows], positions),
        properties=fold([row.properties for row in rows]),
        positions=positions,
        shards=Constant(shard, len(rows)),
    )


def _each(kinds: list[int] | Constant[int], part: Callable[[int], object]) -> Column:
    if isinstance(kinds, Constant):
        return Constant(part(kinds.value), len(kinds))
    return list(map(part, kinds))


def _times(stored: list[int | None], positions: Positions) -> Column:
    missing = stored.count(None)
    if not missing:
        return stored
    implied = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    if missing == len(stored):
        return implied
    return [own if own is not None else time for own, time in zip(stored, implied.tolist(), strict=True)]


# --- encoding and decoding ---


def _seeds(positions: Positions, slab: int) -> list[int]:
    mixed = np.uint64(slab * _ODD & 0xFFFF_FFFF_FFFF_FFFF)
    seeds: list[int] = (positions ^ mixed).tolist()
    return seeds


def _without(head: int, values: Sequence[bytes], size: int) -> list[bytes]:
    """Return values, of about ``size`` bytes in all, without their first ``head`` bytes; large values as views."""
    if size > _LARGE * len(values):
        return [memoryview(value)[head:] for value in values]  # type: ignore[misc]
    return [value[head:] for value in values]
