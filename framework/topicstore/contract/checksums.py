"""Checksums of small stored values, so that reading a damaged value raises an error.

Stored form: the first four bytes of the xxh3 digest (64 bits, big-endian) of the key, of a byte
that is the key's length modulo 256, and of the value; then the value. The key is included so that a value which an
engine returns for the wrong key is detected too, not only a flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from .errors import CorruptionError

__all__ = ["add_checksum", "add_checksums", "strip_checksum"]

_SIZE = 4


def add_checksum(key: bytes, value: bytes) -> bytes:
    """Return the bytes to store under ``key``: the checksum and the value."""
    return xxhash.xxh3_64_digest(b"%b%c%b" % (key, len(key) & 0xFF, value))[:_SIZE] + value


def add_checksums(keys: Iterable[bytes], value: bytes) -> list[bytes]:
    """Return the bytes to store under each of the keys, which all get the same value."""
    digest = xxhash.xxh3_64_digest
    return [digest(b"%b%c%b" % (key, len(key) & 0xFF, value))[:_SIZE] + value for key in keys]


def strip_checksum(key: bytes, stored: bytes) -> bytes:
    """Return the value stored under ``key``. Raises `CorruptionError` if its checksum is wrong."""
    value = stored[_SIZE:]
    if stored != add_checksum(key, value):
        raise CorruptionError("the checksum is wrong")
    return value
