"""Iterators: a place in a stream for one topic filter, and their bytes.

Stored form, version 1: ``0x01 | xxh64 of the rest, little-endian | msgpack array`` of
database id, shard, generation, stream, filter and the layout's place.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import xxhash

from .errors import InvalidFilterError, InvalidIteratorError
from .topics import TopicFilter

__all__ = ["Iterator"]

_VERSION = b"\x01"
_Number = Annotated[int, msgspec.Meta(ge=0)]


class Iterator(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in one stream. Immutable; valid after restarts and after compaction.

    Opaque but for ``topic_filter``, ``shard``, ``generation`` and ``stream``.
    """

    database: bytes
    shard: _Number
    generation: _Number
    stream: _Number
    topic_filter: str
    place: bytes

    def to_bytes(self) -> bytes:
        """Return bytes that `from_bytes` turns back into the iterator, in any process."""
        body = msgspec.msgpack.encode(self)
        return _VERSION + xxhash.xxh64_digest(body)[::-1] + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Iterator:
        """Return the iterator of `to_bytes`. Raises `InvalidIteratorError` for anything else."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidIteratorError(f"an iterator is bytes, not {type(data).__name__}")
        data = bytes(data)
        if data[:1] != _VERSION:
            raise InvalidIteratorError("not an iterator, or one of a newer version")
        body = data[9:]
        if data[1:9] != xxhash.xxh64_digest(body)[::-1]:
            raise InvalidIteratorError("the iterator's bytes are damaged: their checksum is wrong")
        try:
            iterator = msgspec.msgpack.decode(body, type=cls)
            TopicFilter(iterator.topic_filter)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidFilterError) as bad:
            raise InvalidIteratorError(f"the iterator's bytes are damaged: {bad}") from bad
        return iterator
