"""The reference layout, kept so simple that the others are tested against it.

A slab is one stream of values, one per message, in order of position. Every read scans and matches each topic.

Stored form, version 1 (keyspace ``data``; integers in keys are unsigned)::

    (generation, 0, position) -> 0x01 | xxh64 of the rest with the position as seed, 8 bytes
                                 big-endian | msgpack array [topic, payload, client id, qos,
                                 retain, timestamp, properties]

``properties`` is nil or the array of `topicstore.Properties`. A delete leaves no tombstone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import xxhash
from topicstore import MessageBatch, Properties, TopicFilter
from topicstore.contract.batch import FIELDS
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import (
    Damage,
    DeleteStep,
    Layout,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
)
from topicstore.contract.topics import matches_any

__all__ = ["ReferenceLayout", "ReferenceOptions"]

_VERSION = 1
_STREAM = 0
_HEAD = 9
_LOOKED_AT = 1_000
"""The number of messages that one step of a delete examines."""
_ENCODER = msgspec.msgpack.Encoder()


class _Row(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    topic: str
    payload: bytes
    client_id: str
    qos: int
    retain: bool
    timestamp: int
    properties: Properties | None


_DECODER = msgspec.msgpack.Decoder(_Row)


def _encode(row: _Row, position: int) -> bytes:
    body = _ENCODER.encode(row)
    return bytes((_VERSION,)) + xxhash.xxh64_digest(body, seed=position) + body


def _decode(value: bytes, position: int) -> _Row:
    if value[:1] != bytes((_VERSION,)):
        if value and value[0] > _VERSION:
            raise NewerFormatError(f"a message of version {value[0]}; this topicstore reads up to {_VERSION}")
        raise CorruptionError("not a stored message")
    body = value[_HEAD:]
    if value[1:_HEAD] != xxhash.xxh64_digest(body, seed=position):
        raise CorruptionError("the checksum is wrong")
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise CorruptionError(str(bad)) from bad


@attrs.frozen(kw_only=True)
class ReferenceOptions:
    """The reference layout has no options."""


class ReferenceLayout(Layout):
    """A layout with one stream per slab and one value per message."""

    Options = ReferenceOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Write nothing: an empty slab has no stored data."""

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Return the slab of one generation of one shard."""
        return ReferenceSlab(engine, shard, generation)


class ReferenceSlab(Slab):
    """A slab with one stream and one value per message. A reader's place is the next position, 8 bytes big-endian."""

    def __init__(self, engine: Engine, shard: int, generation: int) -> None:
        self.counters = ReadCounters()
        self._engine = engine
        self._shard = shard
        self._generation = generation

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add a put for each message of the batch to a write batch."""
        columns = (
            batch.topics,
            batch.payloads,
            batch.client_ids,
            batch.qos,
            batch.retain,
            batch.timestamps,
            batch.properties,
        )
        rows = map(_Row, *(to_iterable(column) for column in columns))
        for position, row in zip(to_iterable(batch.positions), rows, strict=True):
            write.put(DATA, (self._generation, _STREAM, position), _encode(row, position))

    def committed(self) -> None:
        """Do nothing: no state in memory depends on the commit."""

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return stream 0, which holds all messages, for every filter."""
        return [StreamInfo(stream=_STREAM, pattern="#")]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a reader that starts at a position."""
        if stream != _STREAM:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    def reached(self, stream: int, place: bytes) -> int:
        """Return the last position that a reader at this place has passed."""
        if len(place) != 8:
            raise ValueError(place)
        return int.from_bytes(place, "big") - 1

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Scan from the place, and return the matching messages within the limits."""
        if stream != _STREAM or len(place) != 8:
            raise ValueError(place)
        at = start = int.from_bytes(place, "big")
        rows: list[tuple[int, _Row]] = []
        size = 0
        self.counters.seeks += 1
        exhausted = True
        for position, value in self._scan(at, limits.bound):
            if len(rows) >= limits.rows or size >= limits.bytes or _past(limits.deadline, at > start):
                exhausted = False
                break
            row = self._read(position, value)
            if topic_filter.matches(row.topic):
                rows.append((position, row))
                size += len(row.payload)
            at = position + 1
        self.counters.rows += len(rows)
        after = max(at, limits.bound + 1) if exhausted else at
        return SlabStep(batch=_batch(rows, self._shard), place=after.to_bytes(8, "big"), exhausted=exhausted)

    def _scan(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        start, end = (self._generation, _STREAM, first), (self._generation, _STREAM, last + 1)
        if first <= last:
            for chunk in self._engine.scan(DATA, start, end):
                for key, value in chunk:
                    yield key[2], value

    def _read(self, position: int, value: bytes) -> _Row:
        self.counters.visited += 1
        try:
            return _decode(value, position)
        except (CorruptionError, NewerFormatError) as bad:
            raise type(bad)(bad.reason, self._place(position)) from bad

    def _place(self, position: int) -> str:
        return f"shard {self._shard}, generation {self._generation}, message at position {position}"

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Yield writes that delete matching messages; each step examines up to 1,000 messages."""
        while True:
            write, deleted, freed, seen = WriteBatch(), 0, 0, 0
            for position, value in self._scan(first, last):
                topic = self._read(position, value).topic
                if topic_filter.matches(topic) and not matches_any(spare, topic):
                    write.delete(DATA, (self._generation, _STREAM, position))
                    deleted += 1
                    freed += len(value)
                first = position + 1
                seen += 1
                if seen == _LOOKED_AT:
                    break
            yield DeleteStep(write=write, messages=deleted, freed=freed)
            if seen < _LOOKED_AT:
                return

    def info(self) -> SlabInfo:
        """Return the number of streams, which is one."""
        return SlabInfo(streams=1)

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Decode every message up to a position; yield a `Damage` or, for an intact message, 1."""
        for position, value in self._scan(0, bound):
            try:
                self._read(position, value)
            except (CorruptionError, NewerFormatError) as bad:  # a damaged version byte looks like a newer format
                yield Damage(place=self._place(position), reason=bad.reason)
            else:
                yield 1


def _past(deadline: float | None, moved: bool) -> bool:
    """Return whether the deadline has passed; False before the read has advanced, so that every call makes progress."""
    return deadline is not None and moved and time.monotonic() >= deadline


def _batch(rows: list[tuple[int, _Row]], shard: int) -> MessageBatch:
    if not rows:
        return MessageBatch.empty()
    columns = zip(*(msgspec.structs.astuple(row) for _, row in rows), strict=True)
    fields: dict[str, Any] = {name: list(values) for name, values in zip(FIELDS, columns, strict=True)}
    return MessageBatch(
        **fields,
        positions=np.array([position for position, _ in rows], dtype=np.uint64),
        shards=Constant(shard, len(rows)),
    )
