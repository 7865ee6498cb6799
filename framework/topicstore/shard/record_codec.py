"""Small stored records: a checksum, then a msgpack array that begins with its version.

Fields are only ever appended, so a record is read by whoever knows its version or a newer one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.errors import CorruptionError, NewerFormatError

__all__ = ["RecordCodec"]

R = TypeVar("R")


class _Versioned(msgspec.Struct, array_like=True):
    """The beginning of every record."""

    version: int


_ENCODER = msgspec.msgpack.Encoder()
_VERSIONS = msgspec.msgpack.Decoder(_Versioned)


class RecordCodec(Generic[R]):
    """Encodes and decodes the records of one kind, a struct or a tuple that begins with its version.

    ``newest`` is the highest version that this topicstore can read.
    """

    def __init__(self, kind: type[R], newest: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._newest = newest

    def encode(self, key: bytes, record: R) -> bytes:
        """Return what to store under ``key``."""
        return add_checksum(key, _ENCODER.encode(record))

    def decode(self, key: bytes, stored: bytes, place: str) -> R:
        """Return the record that is stored under ``key``, at a place that errors name.

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
