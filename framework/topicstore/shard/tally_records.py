"""The stored form of tally tables, in a shard's state.

Stored form (state keyspace, keys begin with a zero byte)::

    00 "tallies" u32             -> TallyIndex: the tables of a generation, written with every change of one
    00 "tally" u32 u64 u32       -> TallyPart: of a generation, the table that ends at a position, the part's number

Both are records (`topicstore.shard.record_codec`) of version 1. A part has about a megabyte before compression, or one
row. Its data is a msgpack array, compressed with zstd: topics, client ids, the lowest position, then the columns, each
as eight planes of the bytes of 64-bit numbers, the lowest bytes first. The columns are the index of the topic less
that of the row before, the index of the client id, the first position less the lowest of the part, the last position
less the first, the number of messages, and their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from topicstore.contract.engine import STATE, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError

from .record_codec import RecordCodec
from .tallies import Tally

__all__ = [
    "TallyIndex",
    "TallyRange",
    "encoded_parts",
    "load_index",
    "load_tally",
    "put_index",
    "remove_parts",
    "remove_tallies",
]

_VERSION = 1
_INDEX = b"\0tallies"
_PART = b"\0tally"
_PART_BYTES = 1 << 20
_ROW_BYTES = 48


class TallyRange(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The range of one table, which counts a generation's messages with positions above ``before``, up to ``last``."""

    before: int
    last: int
    level: int
    """The number of times that tables were merged to make it."""
    messages: int
    parts: int


class TallyIndex(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tables of a generation in order; no two count the same position."""

    version: int = _VERSION
    ranges: tuple[TallyRange, ...] = ()


class _TallyPart(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    version: int = _VERSION
    size: int
    """The size of the data before compression, in bytes."""
    data: bytes


_Rows = tuple[list[str], list[str], int, bytes, bytes, bytes, bytes, bytes, bytes]
"""The data of a part: topics, client ids, the lowest position, and the columns."""

_INDEXES = RecordCodec(TallyIndex, _VERSION)
_PARTS = RecordCodec(_TallyPart, _VERSION)
_ROWS = msgspec.msgpack.Decoder(_Rows)


def load_index(reader: Reader, generation: int) -> TallyIndex:
    """Return the index of a generation's tables."""
    key = _INDEX + encode_generation(generation)
    data = reader.get(STATE, key)
    return TallyIndex() if data is None else _INDEXES.decode(key, data, f"state: tallies of generation {generation}")


def put_index(write: WriteBatch, generation: int, index: TallyIndex) -> None:
    """Add the index of a generation's tables to a write."""
    key = _INDEX + encode_generation(generation)
    write.put(STATE, key, _INDEXES.encode(key, index))


def load_tally(reader: Reader, generation: int, counted: TallyRange) -> Iterator[Tally]:
    """Yield the parts of a table. Raises `CorruptionError` if one is damaged or missing."""
    for key in _keys(generation, counted):
        place = f"state: tally of generation {generation} up to position {counted.last}"
        data = reader.get(STATE, key)
        if data is None:
            raise CorruptionError("a part of it is missing", place)
        part = _PARTS.decode(key, data, place)
        try:
            yield _unpacked(zstandard.ZstdDecompressor().decompress(part.data, max_output_size=part.size))
        except (zstandard.ZstdError, msgspec.DecodeError) as bad:
            raise CorruptionError(str(bad), place) from bad


def encoded_parts(generation: int, counted: TallyRange, tally: Tally) -> tuple[TallyRange, list[tuple[bytes, bytes]]]:
    """Return a table's range with its number of parts, and the key and value of each part."""
    packed = [_packed(part) for part in _cut(tally)]
    counted = msgspec.structs.replace(counted, parts=len(packed), messages=tally.count)
    compress = zstandard.ZstdCompressor().compress
    records = (_TallyPart(size=len(raw), data=compress(raw)) for raw in packed)
    keys = _keys(generation, counted)
    return counted, [(key, _PARTS.encode(key, part)) for key, part in zip(keys, records, strict=True)]


def remove_parts(write: WriteBatch, generation: int, counted: TallyRange) -> None:
    """Add the removal of a table to a write; the generation's index has to be written with it."""
    for key in _keys(generation, counted):
        write.delete(STATE, key)


def remove_tallies(write: WriteBatch, generation: int) -> None:
    """Add the removal of all tables of a generation to a write."""
    write.delete_range(STATE, _PART + encode_generation(generation), _PART + encode_generation(generation + 1))
    write.delete(STATE, _INDEX + encode_generation(generation))


def _keys(generation: int, counted: TallyRange) -> list[bytes]:
    prefix = _PART + encode_generation(generation) + counted.last.to_bytes(8, "big")
    return [prefix + part.to_bytes(4, "big") for part in range(counted.parts)]


def _cut(tally: Tally) -> Iterator[Tally]:
    """Yield parts of bounded size."""
    rows = len(tally)
    if not rows:
        return
    size = _ROW_BYTES * rows + sum(map(len, tally.topics)) + sum(map(len, tally.client_ids))
    if rows == 1 or size <= _PART_BYTES:
        yield tally
        return
    front = np.arange(rows) < rows // 2
    yield from _cut(tally.where(front))
    yield from _cut(tally.where(~front))


def _packed(part: Tally) -> bytes:
    lowest = int(part.first.min())
    return msgspec.msgpack.encode(
        (
            part.topics,
            part.client_ids,
            lowest,
            _planes(np.diff(part.topic, prepend=np.uint64(0))),
            _planes(part.client_id),
            _planes(part.first - np.uint64(lowest)),
            _planes(part.last - part.first),
            _planes(part.messages),
            _planes(part.size),
        )
    )


def _unpacked(raw: bytes) -> Tally:
    topics, client_ids, lowest, *columns = _ROWS.decode(raw)
    topic, client_id, first, span, messages, size = map(_numbers, columns)
    first = first + np.uint64(lowest)
    return Tally(topics, client_ids, np.cumsum(topic, dtype=np.uint64), client_id, first, first + span, messages, size)


def _planes(column: npt.NDArray[np.uint64]) -> bytes:
    """Return the lowest bytes of all numbers, then the next ones, and so on: runs of zeros compress well."""
    return column.astype("<u8").view(np.uint8).reshape(-1, 8).T.tobytes()


def _numbers(planes: bytes) -> npt.NDArray[np.uint64]:
    numbers = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(8, -1).T).view("<u8").ravel()
    return numbers.astype(np.uint64)
