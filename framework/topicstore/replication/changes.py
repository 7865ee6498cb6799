"""The changes of a log's entries as bytes: one for each write that a shard's owner proposes.

A change is a byte with the version of the form, 1, and a msgpack array that begins with the kind of the change.
Kinds 1 to 3 are `topicstore.shard.writer.AddGeneration`, `DropGeneration` and `Delete`. Kind 0 has messages and state::

    0, last position, last time, late messages that took the next position,
    [topics, client ids, qos, retain flags, timestamps, properties, payloads, positions], or nil without messages,
    state keys, state values

A column of messages is an array of a form and its contents:

0. one value for all messages
1. a value for each message
2. an array of the texts, each once, and of each message's number of its text: unsigned 32-bit integers
3. signed 64-bit integers
4. unsigned 64-bit integers
5. consecutive unsigned 64-bit integers, of which only the first is stored

Integers are little-endian. Payloads are an array of byte strings. Properties are an array: empty if no message has
properties, with one element if all are equal. Positions and times are the owner's: a site that applies a change never
asks its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, Texts, fold, to_integers, to_list
from topicstore.contract.engine import STATE, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.model import Properties
from topicstore.contract.positions import Positions
from topicstore.shard.shard import Shard
from topicstore.shard.writer import AddGeneration, Change, Delete, DropGeneration, PendingWrite

__all__ = ["decode_change", "encode_change", "read_change"]

_VERSION = 1
_ALL, _EACH, _CODED, _SIGNED, _UNSIGNED, _RISING = range(6)
_FEW = 4
"""The least ratio of messages to different texts for which each text is stored once."""

_Column = tuple[int, Any]


class _Columns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    topics: _Column
    client_ids: _Column
    qos: _Column
    retain: _Column
    timestamps: _Column
    properties: list[Properties | None]
    payloads: list[bytes]
    positions: _Column


class _Stored(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    last_position: int
    last_time: int
    lifted: int
    messages: _Columns | None
    keys: list[bytes]
    values: list[bytes | None]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Stored | Change] = msgspec.msgpack.Decoder(
    _Stored | AddGeneration | DropGeneration | Delete
)


def encode_change(pending: PendingWrite) -> bytes:
    """Return a prepared write of a shard as bytes."""
    change: _Stored | Change | None = pending.change
    if change is None:
        keys: list[Any] = []
        values: list[bytes | None] = []
        for keyspace, some, new in pending.write.runs:
            if keyspace is not STATE:
                raise ValueError(f"a log records no changes of the keyspace {keyspace.name}")
            keys += some
            values += new
        messages = _columns(pending.batch) if len(pending.batch) else None
        change = _Stored(pending.last_position, pending.last_time, pending.lifted, messages, keys, values)
    return bytes((_VERSION,)) + _ENCODER.encode(change)


def decode_change(shard: Shard, data: bytes, place: str) -> PendingWrite:
    """Return a change as a write of a shard, ready to be applied.

    Raises `NewerFormatError` for a form of a later version, and `CorruptionError`; both name ``place``.
    """
    with _reading(place):
        change = _decoded(data, place)
        if isinstance(change, AddGeneration):
            return shard.generations.pending_add(change)
        if isinstance(change, DropGeneration):
            return shard.generations.pending_drop(change)
        if isinstance(change, Delete):
            return shard.rewriter.pending_delete(change)
        write = WriteBatch()
        write.change_many(STATE, change.keys, change.values)
        pending = PendingWrite(shard.writer, write=write)
        pending.last_position, pending.last_time = change.last_position, change.last_time
        pending.lifted = change.lifted
        if change.messages is not None:
            pending.batch = _batch(change.messages, shard.number)
        return pending


def read_change(data: bytes, shard: int, place: str) -> MessageBatch | Change:
    """Return the messages that a change stores (an empty batch if it stores only state); any other change as it is.

    ``shard`` is the shard's number. Raises the errors of `decode_change`.
    """
    with _reading(place):
        change = _decoded(data, place)
        if not isinstance(change, _Stored):
            return change
        return MessageBatch.empty() if change.messages is None else _batch(change.messages, shard)


def _decoded(data: bytes, place: str) -> _Stored | Change:
    if data[:1] != bytes((_VERSION,)):
        version = data[0] if data else 0
        raise NewerFormatError(f"a change has version {version}; this topicstore reads up to {_VERSION}", place)
    return _DECODER.decode(memoryview(data)[1:])


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Raise `CorruptionError` for a change that can't be decoded."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, OverflowError) as bad:
        raise CorruptionError(f"a change can't be read: {bad}", place) from bad


def _columns(batch: MessageBatch) -> _Columns:
    return _Columns(
        _texts(batch.topics),
        _texts(batch.client_ids),
        _values(batch.qos),
        _values(batch.retain),
        _integers(batch.timestamps),
        _properties(batch.properties),
        to_list(batch.payloads),
        _positions(batch.positions),
    )


def _batch(columns: _Columns, shard: int) -> MessageBatch:
    rows = len(columns.payloads)
    found = MessageBatch(
        _column(columns.topics, rows),
        columns.payloads,
        _column(columns.client_ids, rows),
        _column(columns.qos, rows),
        _column(columns.retain, rows),
        _column(columns.timestamps, rows),
        _all_properties(columns.properties, rows),
        positions=_column(columns.positions, rows),
        shards=Constant(shard, rows),
    )
    checked = found.topics, found.client_ids, found.qos, found.retain, found.timestamps, found.properties
    if any(len(column) != rows for column in (*checked, found.positions)):
        raise ValueError("its columns have different lengths")
    return found


def _texts(column: Column) -> _Column:
    if isinstance(column, Constant):
        return _ALL, column.value
    if isinstance(column, Coded):
        coded = column.compact()
        if len(coded.texts.values) * _FEW <= len(column):
            return _CODED, (coded.texts.values.tolist(), coded.codes.astype("<u4").tobytes())
        return _EACH, column.tolist()
    texts = to_list(column)
    different = dict.fromkeys(texts)
    if len(different) * _FEW > len(texts):
        return _EACH, texts
    numbers = {text: number for number, text in enumerate(different)}
    codes = np.fromiter(map(numbers.__getitem__, texts), "<u4", len(texts))
    return _CODED, (list(numbers), codes.tobytes())


def _values(column: Column) -> _Column:
    if isinstance(column, Constant):
        return _ALL, column.value
    folded = fold(to_list(column))
    return (_ALL, folded.value) if isinstance(folded, Constant) else (_EACH, folded)


def _integers(column: Column) -> _Column:
    if isinstance(column, Constant):
        return _ALL, column.value
    return _SIGNED, to_integers(column).astype("<i8").tobytes()


def _positions(positions: Positions) -> _Column:
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:  # positions strictly increase, so they are consecutive
        return _RISING, first
    return _UNSIGNED, positions.astype("<u8").tobytes()


def _properties(column: Column) -> list[Properties | None]:
    folded = column if isinstance(column, Constant) else fold(to_list(column))
    if isinstance(folded, Constant):
        return [] if folded.value is None else [folded.value]
    return folded


def _all_properties(column: list[Properties | None], rows: int) -> Column:
    return column if len(column) > 1 else Constant(column[0] if column else None, rows)


def _column(column: _Column, rows: int) -> Any:
    form, value = column
    if form == _ALL:
        return Constant(value, rows)
    if form == _CODED:
        texts, codes = value
        return Coded(np.frombuffer(codes, "<u4").astype(np.int64), Texts.of(texts))
    if form == _SIGNED:
        return np.frombuffer(value, "<i8").astype(np.int64)
    if form == _UNSIGNED:
        return np.frombuffer(value, "<u8").astype(np.uint64)
    if form == _RISING:
        return np.arange(value, value + rows, dtype=np.uint64)
    if form != _EACH:
        raise ValueError(f"a column has form {form}")
    return value
