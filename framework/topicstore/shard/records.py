"""A shard's metadata in its state keyspace: its identity, its tail and its generations.

Stored form (state keyspace, keys begin with a zero byte)::

    00 "identity"          -> msgpack array of the version 1, the database's id and the shard's number; written once
    00 "tail"              -> Tail, part of every write
    00 "generation" u32    -> GenerationRecord, written when one is added, sealed, archived or dropped
    00 "progress"          -> of a replicated shard, the progress of `topicstore.replication`; part of every write that
                              its log has ordered

All values have a checksum (see `topicstore.contract.checksums`). The tail and the generations are records in the sense
of `topicstore.shard.record_codec`. Their version is 1; that of an archived generation's record
is 2, because code that doesn't know the field ``archive`` would treat the generation as empty. The identity detects
directories of shards that were swapped or copied between databases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    META,
    STATE,
    Engine,
    Key,
    Keyspace,
    Reader,
    WriteBatch,
    encode_generation,
)
from topicstore.contract.errors import CorruptionError

from .record_codec import RecordCodec
from .zones import Zone, remove_zones

__all__ = [
    "ARCHIVED_VERSION",
    "LOCAL_KEYS",
    "PROGRESS",
    "GenerationRecord",
    "Tail",
    "check_identity",
    "load_generations",
    "load_tail",
    "put_generation",
    "put_tail",
    "ranges_of",
    "remove_messages",
]

_KEY = b"\0identity"
_VERSION = 1


def check_identity(engine: Engine, database: bytes, shard: int) -> None:
    """Check that a shard has this identity; store it in a new shard. Raises `CorruptionError` for another identity."""
    mine = add_checksum(_KEY, msgspec.msgpack.encode((_VERSION, database, shard)))
    found = engine.get(STATE, _KEY)
    if found == mine:
        return
    if found is None and not any(True for _ in engine.scan(STATE, limit=1)):
        batch = WriteBatch()
        batch.put(STATE, _KEY, mine)
        engine.write(batch)
        return
    place = f"shard {shard}"
    if found is None:
        raise CorruptionError("it does not say whose shard it is", place)
    try:
        _, owner, number = msgspec.msgpack.decode(strip_checksum(_KEY, found), type=tuple[int, bytes, int])
    except (CorruptionError, msgspec.DecodeError) as bad:
        raise CorruptionError(f"its identity can't be read: {bad}", place) from bad
    raise CorruptionError(f"its directory holds shard {number} of database {owner.hex()}, put there by mistake", place)


_VERSION = 1
ARCHIVED_VERSION = 2
_TAIL = b"\0tail"
_GENERATION = b"\0generation"
PROGRESS = b"\0progress"
"""The key of a replica's progress."""
LOCAL_KEYS = (_KEY, PROGRESS)
"""The keys of a replica that are not copied to other replicas: the shard's identity, and its progress."""


class Tail(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The position and the counts from which a shard's next write continues. Every write stores them."""

    version: int = _VERSION
    last_position: int = 0
    """The highest position ever assigned. It never decreases, even if the message is deleted."""
    last_time: int = 0
    """The newest message timestamp from which a position was computed (``timestamps="message"``)."""
    lifted: int = 0
    """The number of late messages that took the next free position, since the shard was created."""
    messages: int = 0
    """The number of live messages in the current generation."""
    live_bytes: int = 0
    """Bytes of the values that the current generation's layout has written for its messages."""
    writes: int = 0
    """The number of the last write of any kind. Writes are numbered from 1 without gaps."""
    zone: Zone | None = None
    """The current zone, to which messages are added; None in a tail written before zones existed."""


class GenerationRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One generation of one shard."""

    version: int = _VERSION
    number: int
    layout: str
    format: int
    """The version of the layout's stored form (`Layout.format`) that the generation may hold."""
    options: dict[str, Any]
    created: int
    """The time at which the generation was added, in microseconds since the epoch."""
    first_position: int
    """A lower bound of the positions of the generation's messages."""
    sealed: int | None = None
    """The time at which the generation was sealed, in microseconds since the epoch; None for the current generation."""
    last_position: int | None = None
    """An upper bound of the positions of the generation's messages; None for the current generation."""
    dropped: bool = False
    """Whether the record is a tombstone: the generation is invisible, and its keys are being removed."""
    messages: int = 0
    """The number of live messages; 0 for the current generation, whose messages the tail counts."""
    live_bytes: int = 0
    """Bytes of the values that hold the messages; 0 for the current and for archived generations."""
    archive: str | None = None
    """The location of the export that holds the messages (`topicstore.storage.generations`); None unless the
    generation is archived."""


_TAILS = RecordCodec(Tail, _VERSION)
_GENERATIONS = RecordCodec(GenerationRecord, ARCHIVED_VERSION)


def load_tail(reader: Reader) -> Tail:
    """Return the shard's stored tail; an empty one for a new shard."""
    data = reader.get(STATE, _TAIL)
    return Tail() if data is None else _TAILS.decode(_TAIL, data, "state: tail")


def put_tail(batch: WriteBatch, tail: Tail) -> None:
    """Add the tail to a write."""
    batch.put(STATE, _TAIL, _TAILS.encode(_TAIL, tail))


def load_generations(reader: Reader) -> Iterator[GenerationRecord]:
    """Yield the records of the shard's generations, oldest first, including tombstones."""
    for chunk in reader.scan(STATE, _GENERATION, _GENERATION + b"\xff" * 5):
        for key, data in chunk:
            yield _GENERATIONS.decode(key, data, f"state: generation {int.from_bytes(key[-4:], 'big')}")


def put_generation(batch: WriteBatch, record: GenerationRecord) -> None:
    """Add a generation's record to a write."""
    key = _GENERATION + encode_generation(record.number)
    batch.put(STATE, key, _GENERATIONS.encode(key, record))


def ranges_of(number: int) -> Iterator[tuple[Keyspace[Any], Key, Key]]:
    """Yield (keyspace, start, end) of every range of keys that belongs to a generation."""
    for keyspace in (DATA, INDEX, KEYS, META):
        if keyspace.shape is None:
            yield keyspace, encode_generation(number), encode_generation(number + 1)
        else:
            yield keyspace, (number, 0, 0), (number + 1, 0, 0)


def remove_messages(number: int) -> Iterator[WriteBatch]:
    """Yield writes that remove all keys of a dropped generation, and its record last.

    The writes are idempotent, so an interrupted removal can start again.
    """
    for keyspace, start, end in ranges_of(number):
        batch = WriteBatch()
        batch.delete_range(keyspace, start, end)
        yield batch
    batch = WriteBatch()
    remove_zones(batch, number)
    batch.delete(STATE, _GENERATION + encode_generation(number))
    yield batch
