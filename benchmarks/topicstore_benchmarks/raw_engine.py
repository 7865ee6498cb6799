"""The engine alone: its put and its scan, one uncompressed value of 190 bytes a message.

Reached through rocksdict itself: no contract, nothing of ours between. Options are the fastest
we know for it (no compression, a write buffer of 64 MiB, which topicstore uses too).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import rocksdict

__all__ = ["RawEngine"]

VALUE = 190
BATCH = 1_000


class RawEngine:
    """One RocksDB, put into and scanned."""

    def __init__(self, path: Path, messages: int) -> None:
        source = random.Random(7)  # noqa: S311 - the same values in every run
        self._values = [source.randbytes(VALUE) for _ in range(BATCH)]
        self._keys = [bytes(16) + number.to_bytes(8, "big") for number in range(messages)]
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(64 << 20)
        self._db = rocksdict.Rdict(str(path), options)

    def put(self) -> float:
        """Write every message, 1,000 a batch; return seconds."""
        started = time.perf_counter()
        for start in range(0, len(self._keys), BATCH):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(self._keys[start : start + BATCH], self._values, strict=False):
                batch.put(key, value)
            self._db.write(batch)
        return time.perf_counter() - started

    def scan(self) -> float:
        """Read every key and value; return seconds."""
        count = 0
        started = time.perf_counter()
        for _key, _value in self._db.items():
            count += 1
        taken = time.perf_counter() - started
        if count != len(self._keys):
            raise AssertionError(f"the engine returned {count:,} of {len(self._keys):,} values")
        return taken

    def close(self) -> None:
        """Close it."""
        self._db.close()
