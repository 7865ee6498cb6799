"""The records that a shard keeps of itself in its state keyspace: its tail and its generations.

Stored form (state keyspace, keys begin with a zero byte)::

    00 "tail"              -> Tail, part of every write
    00 "generation" u32    -> GenerationRecord, written when one is added, sealed or dropped

The records of zones (`topicstore.shard.zones`) are stored beside them. All are records in the sense of
`topicstore.shard.record_codec`. The version of both is 1; that of the record of an archived generation
is 2, because code that doesn't know the field ``archive`` would take the generation for an empty one.

The identity of a shard: its database and number, so that directories that were mixed up are detected.

Stored form (state keyspace): ``00 "identity"`` -> checksum (see `topicstore.contract.checksums`) and msgpack array
of the version 1, the database's id and the shard's number; written when the shard is made.
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
    """Store a new shard's identity. Raises `CorruptionError` if an existing shard has another one."""
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


class Tail(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The state of a shard after its last write."""

    version: int = _VERSION
    last_position: int = 0
    """The highest position ever assigned; it stays when its message is deleted."""
    last_time: int = 0
    """The newest message time from which a position was made (``timestamps="message"``)."""
    lifted: int = 0
    """The number of late messages that took the next position, since the shard was created."""
    messages: int = 0
    """The number of live messages in the current generation."""
    live_bytes: int = 0
    """Bytes of the values that the current generation's layout put for its messages."""
    writes: int = 0
    """The number of the last write, of messages or of anything else; writes are numbered from 1 without gaps."""
    zone: Zone | None = None
    """The zone that is being filled; None in a tail of a version that had no zones."""


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
    """A lower bound of the positions of its messages."""
    sealed: int | None = None
    """The time at which it was sealed, in microseconds since the epoch; None for the current generation."""
    last_position: int | None = None
    """An upper bound of the positions of its messages; None until it is sealed."""
    dropped: bool = False
    """Whether the record is a tombstone: the generation is invisible, and its keys are being removed."""
    messages: int = 0
    """The number of live messages; 0 until it is sealed."""
    live_bytes: int = 0
    """Bytes of the values that hold the messages; 0 until it is sealed, and once it is archived."""
    archive: str | None = None
    """The location of the export that holds the messages (`topicstore.storage.archive_locations`); None unless the
    generation is archived."""


_TAILS = RecordCodec(Tail, _VERSION)
_GENERATIONS = RecordCodec(GenerationRecord, ARCHIVED_VERSION)


def load_tail(reader: Reader) -> Tail:
    """Return the shard's tail, or that of an empty shard if none is stored."""
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
    """Yield (keyspace, start, end) of every range of keys that a generation's layout may use."""
    for keyspace in (DATA, INDEX, KEYS, META):
        if keyspace.shape is None:
            yield keyspace, encode_generation(number), encode_generation(number + 1)
        else:
            yield keyspace, (number, 0, 0), (number + 1, 0, 0)


def remove_messages(number: int) -> Iterator[WriteBatch]:
    """Yield writes that remove everything of a dropped generation, its record last.

    Each may be applied again, so an interrupted removal simply starts again.
    """
    for keyspace, start, end in ranges_of(number):
        batch = WriteBatch()
        batch.delete_range(keyspace, start, end)
        yield batch
    batch = WriteBatch()
    remove_zones(batch, number)
    batch.delete(STATE, _GENERATION + encode_generation(number))
    yield batch
