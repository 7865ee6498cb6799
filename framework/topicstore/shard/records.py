"""What a shard records of itself in its state keyspace: its tail and its generations.

Stored form (state keyspace, keys begin with a zero byte)::

    00 "tail"              -> Tail, part of every write
    00 "generation" u32    -> GenerationRecord, written when one is added, sealed or dropped

Both are records (`topicstore.shard.record_codec`). The version of both is 1; of the record of an archived generation
it is 2, because who doesn't know the field would take it for an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    META,
    STATE,
    Key,
    Keyspace,
    Reader,
    WriteBatch,
    encode_generation,
)

from .record_codec import RecordCodec

__all__ = [
    "ARCHIVED_VERSION",
    "GenerationRecord",
    "Tail",
    "load_generations",
    "load_tail",
    "put_generation",
    "put_tail",
    "ranges_of",
    "remove_messages",
]

_VERSION = 1
ARCHIVED_VERSION = 2
_TAIL = b"\0tail"
_GENERATION = b"\0generation"


class Tail(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Where a shard stands after its last write."""

    version: int = _VERSION
    last_position: int = 0
    """The highest position ever given out; outlives the message that had it."""
    last_time: int = 0
    """The newest message time that made a position (``timestamps="message"``)."""
    lifted: int = 0
    """Late messages that took the next position, since creation."""
    messages: int = 0
    """Live messages of the current generation."""
    live_bytes: int = 0
    """Bytes of values that the current generation's layout put for its messages."""
    writes: int = 0
    """The number of the last write, of messages or of anything else; they are counted from 1 without gaps."""


class GenerationRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One generation of one shard."""

    version: int = _VERSION
    number: int
    layout: str
    format: int
    """Version of the layout's stored form (`Layout.format`) that the generation may hold."""
    options: dict[str, Any]
    created: int
    """Microseconds since the epoch."""
    first_position: int
    """No message of the generation has a lower position."""
    sealed: int | None = None
    """Microseconds since the epoch; None for the current generation."""
    last_position: int | None = None
    """Once sealed: no message has a higher position."""
    dropped: bool = False
    """Tombstone: invisible, its keys are being removed."""
    messages: int = 0
    """Once sealed: live messages."""
    live_bytes: int = 0
    """Once sealed: bytes of the values that hold them; 0 once archived."""
    archive: str | None = None
    """Once archived: where the export is that holds the messages (`topicstore.storage.archive_locations`)."""


_TAILS = RecordCodec(Tail, _VERSION)
_GENERATIONS = RecordCodec(GenerationRecord, ARCHIVED_VERSION)


def load_tail(reader: Reader) -> Tail:
    """Return the shard's tail; that of an empty shard if there is none."""
    data = reader.get(STATE, _TAIL)
    return Tail() if data is None else _TAILS.decode(_TAIL, data, "state: tail")


def put_tail(batch: WriteBatch, tail: Tail) -> None:
    """Add the tail to a write."""
    batch.put(STATE, _TAIL, _TAILS.encode(_TAIL, tail))


def load_generations(reader: Reader) -> Iterator[GenerationRecord]:
    """Yield the shard's generations, oldest first, tombstones among them."""
    for chunk in reader.scan(STATE, _GENERATION, _GENERATION + b"\xff" * 5):
        for key, data in chunk:
            yield _GENERATIONS.decode(key, data, f"state: generation {int.from_bytes(key[-4:], 'big')}")


def put_generation(batch: WriteBatch, record: GenerationRecord) -> None:
    """Add a generation's record to a write."""
    key = _GENERATION + encode_generation(record.number)
    batch.put(STATE, key, _GENERATIONS.encode(key, record))


def ranges_of(number: int) -> Iterator[tuple[Keyspace, Key, Key]]:
    """Yield (keyspace, start, end) of all that a generation's layout keeps."""
    for keyspace in (DATA, INDEX, KEYS, META):
        if keyspace.shape is None:
            yield keyspace, encode_generation(number), encode_generation(number + 1)
        else:
            yield keyspace, (number, 0, 0), (number + 1, 0, 0)


def remove_messages(number: int) -> Iterator[WriteBatch]:
    """Yield writes that remove everything of a dropped generation; its record goes last.

    Each may be applied again, so an interrupted removal simply starts anew.
    """
    for keyspace, start, end in ranges_of(number):
        batch = WriteBatch()
        batch.delete_range(keyspace, start, end)
        yield batch
    batch = WriteBatch()
    batch.delete(STATE, _GENERATION + encode_generation(number))
    yield batch
