"""Small stored values with a checksum, so that damage is an error wherever it is read.

Stored form: the first four bytes of the xxh3 digest (64 bits, big-endian) of the key, of a byte
that is the key's length modulo 256, and of the value; then the value. An engine that hands out another key's
value, or an old file's, is noticed like one that flips a bit.
"""

from __future__ import annotations

import xxhash

from .errors import CorruptionError

__all__ = ["add_checksum", "strip_checksum"]

_SIZE = 4


def _digest(key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_digest(b"".join((key, bytes((len(key) & 0xFF,)), value)))[:_SIZE]


def add_checksum(key: bytes, value: bytes) -> bytes:
    """Return what to store under ``key``."""
    return _digest(key, value) + value


def strip_checksum(key: bytes, stored: bytes) -> bytes:
    """Return the value that was stored under ``key``. Raises `CorruptionError` for anything else."""
    value = stored[_SIZE:]
    if len(stored) < _SIZE or stored[:_SIZE] != _digest(key, value):
        raise CorruptionError("the checksum is wrong")
    return value
