"""The encoding of small stored records: a checksum, then a msgpack array that begins with its version.

Fields are only ever appended, so code for one version also reads all older versions.
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
"""The byte after the last first byte of msgpack's short arrays (``0x90`` to ``0x9f``), which includes the length."""
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
        """Return the record stored under ``key``.

        Raises `CorruptionError`, and `NewerFormatError` for a version above the newest; both name ``place``.
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
        """Decode several records, given as (key, stored bytes); ``place`` returns the name of a key for an error."""
        decode, newest = self._decoder.decode, bytes((self._newest,))
        records: list[R] = []
        for key, value in stored:
            try:
                record = strip_checksum(key, value)
                if record[:1] < _LONG_ARRAY and record[1:2] <= newest:  # every existing record begins so
                    records.append(decode(record))
                    continue
            except (CorruptionError, msgspec.DecodeError):
                pass  # `decode` below raises the same error, with the place
            records.append(self.decode(key, value, place(key)))
        return records
