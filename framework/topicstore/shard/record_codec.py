"""Small stored records: a checksum, then a msgpack array that begins with its version.

Fields are only ever appended, so code that knows a version also reads the older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.errors import CorruptionError, NewerFormatError

__all__ = ["RecordCodec"]

R = TypeVar("R")


class _Versioned(msgspec.Struct, array_like=True):
    """The first field of every record."""

    version: int


_LONG_ARRAY = b"\xa0"
"""The first byte after those of arrays that have their length within it."""
_ENCODER = msgspec.msgpack.Encoder()
_VERSIONS = msgspec.msgpack.Decoder(_Versioned)


class RecordCodec(Generic[R]):
    """An encoder and decoder of one kind of record, which is a struct or a tuple that begins with its version.

    ``newest`` is the highest version that this topicstore can read.
    """

    def __init__(self, kind: type[R], newest: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._newest = newest

    def encode(self, key: bytes, record: R) -> bytes:
        """Return the bytes to store under ``key``."""
        return add_checksum(key, _ENCODER.encode(record))

    def decode(self, key: bytes, stored: bytes, place: str) -> R:
        """Return the record that is stored under ``key``. Errors name ``place``.

        Raises `CorruptionError`, and `NewerFormatError` for a version above the newest.
        """
        try:
            value = strip_checksum(key, stored)
            version = _VERSIONS.decode(value).version
            if version > self._newest:
                raise NewerFormatError(f"it has version {version}; this topicstore reads up to {self._newest}", place)
            return self._decoder.decode(value)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, place) from bad
        except msgspec.DecodeError as bad:
            raise CorruptionError(str(bad), place) from bad

    def decode_many(self, stored: Iterable[tuple[bytes, bytes]], place: Callable[[bytes], str]) -> list[R]:
        """Return the records of (key, stored bytes), like `decode`; ``place`` names a key for an error."""
        decode, newest = self._decoder.decode, bytes((self._newest,))
        records: list[R] = []
        for key, value in stored:
            try:
                record = strip_checksum(key, value)
                if record[:1] < _LONG_ARRAY and record[1:2] <= newest:  # as all are that were written so far
                    records.append(decode(record))
                    continue
            except (CorruptionError, msgspec.DecodeError):
                pass  # it fails in the same way below, and then its place is told
            records.append(self.decode(key, value, place(key)))
        return records
