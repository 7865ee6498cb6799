"""Cursors: offsets (*places*) in a stream, for one topic filter, and their stored form.

Stored form, version 1: ``0x01 | xxh64 of the rest, little-endian | msgpack array`` of
database id, shard, generation, stream, filter and the place, whose form the layout defines.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Self

import msgspec
import xxhash

from .errors import InvalidCursorError, InvalidFilterError
from .topics import TopicFilter

__all__ = ["Cursor"]

_VERSION = b"\x01"
_Number = Annotated[int, msgspec.Meta(ge=0)]


class Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """An offset in one stream, for one topic filter. Immutable. Stays valid after restarts and compaction.

    Its fields other than ``topic_filter``, ``shard``, ``generation`` and ``stream`` are opaque.
    """

    database: bytes
    shard: _Number
    generation: _Number
    stream: _Number
    topic_filter: str
    place: bytes

    @classmethod
    def of(
        cls, database: bytes, shard: int, generation: int, stream: int, topic_filter: TopicFilter, place: bytes
    ) -> Self:
        """Return a cursor for a filter that was parsed before."""
        cursor = cls(database, shard, generation, stream, topic_filter.text, place)
        cursor.__dict__["filter"] = topic_filter
        return cursor

    @cached_property
    def filter(self) -> TopicFilter:
        """The parsed topic filter. It is parsed once for a cursor and all cursors that `advance` derives from it."""
        return TopicFilter(self.topic_filter)

    def advance(self, place: bytes) -> Self:
        """Return a cursor with the same filter at another offset, ``place``, of the stream."""
        return self.of(self.database, self.shard, self.generation, self.stream, self.filter, place)

    def to_bytes(self) -> bytes:
        """Return bytes that `from_bytes` turns back into the cursor, in any process."""
        body = msgspec.msgpack.encode(self)
        return _VERSION + xxhash.xxh64_digest(body)[::-1] + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Cursor:
        """Decode the bytes that `to_bytes` returns for a cursor. Raises `InvalidCursorError` for any other bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidCursorError(f"a cursor is bytes, not {type(data).__name__}")
        data = bytes(data)
        if data[:1] != _VERSION:
            raise InvalidCursorError("not a cursor, or one of a newer version")
        body = data[9:]
        if data[1:9] != xxhash.xxh64_digest(body)[::-1]:
            raise InvalidCursorError("the cursor's bytes are damaged: their checksum is wrong")
        try:
            cursor = msgspec.msgpack.decode(body, type=cls)
            cursor.filter  # noqa: B018 - it is checked by being parsed
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidFilterError) as bad:
            raise InvalidCursorError(f"the cursor's bytes are damaged: {bad}") from bad
        return cursor
