"""Engines alone: their put and their scan, with one uncompressed value of 190 bytes per message.

They are called through their own Python modules, without topicstore. Options are the fastest known ones, which
topicstore uses, too: no compression, and a write buffer of 64 MiB.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from topicstore_benchmarks.timing import check, consume, timed

__all__ = ["BUFFER", "RAW_ENGINES", "RawEngine", "RawLeveldb", "RawRocksdb"]

VALUE = 190
BATCH = 1_000
BUFFER = 64 << 20


class RawEngine(ABC):
    """One engine, with its put and its scan."""

    def __init__(self, messages: int) -> None:
        source = random.Random(7)  # noqa: S311 - the same values in every run
        self._values = [source.randbytes(VALUE) for _ in range(BATCH)]
        self._keys = [bytes(16) + number.to_bytes(8, "big") for number in range(messages)]

    @abstractmethod
    def write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write a batch."""

    @abstractmethod
    def pairs(self) -> Iterable[Any]:
        """Return all keys with their values."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def put(self) -> float:
        """Write every message, in batches of 1,000; return the seconds."""

        def write_all() -> None:
            for start in range(0, len(self._keys), BATCH):
                self.write(self._keys[start : start + BATCH], self._values)

        return timed(write_all)

    def scan(self) -> float:
        """Read every key and value; return the seconds."""
        return timed(lambda: check(consume(self.pairs()), len(self._keys)))


class RawRocksdb(RawEngine):
    """RocksDB through rocksdict."""

    def __init__(self, path: Path, messages: int, *, sync: bool = False) -> None:
        import rocksdict

        super().__init__(messages)
        self._batch = rocksdict.WriteBatch
        self._how = rocksdict.WriteOptions()
        self._how.sync = sync
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(BUFFER)
        self._db = rocksdict.Rdict(str(path), options)

    def write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write a batch."""
        batch = self._batch(raw_mode=True)
        for key, value in zip(keys, values, strict=False):
            batch.put(key, value)
        self._db.write(batch, self._how)

    def pairs(self) -> Iterable[Any]:
        """Return all keys with their values."""
        return self._db.items()

    def close(self) -> None:
        """Close it."""
        self._db.close()


class RawLeveldb(RawEngine):
    """LevelDB through plyvel, with verified checksums: without them damaged data would be returned."""

    def __init__(self, path: Path, messages: int, *, sync: bool = False) -> None:
        import plyvel

        super().__init__(messages)
        self._sync = sync
        self._db = plyvel.DB(str(path), create_if_missing=True, compression=None, write_buffer_size=BUFFER)

    def write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write a batch."""
        with self._db.write_batch(sync=self._sync) as batch:
            for key, value in zip(keys, values, strict=False):
                batch.put(key, value)

    def pairs(self) -> Iterable[Any]:
        """Return all keys with their values."""
        return self._db.iterator(verify_checksums=True)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close it."""
        self._db.close()


RAW_ENGINES: dict[str, type[RawRocksdb | RawLeveldb]] = {"rocksdb": RawRocksdb, "leveldb": RawLeveldb}
"""The engines by the name of topicstore's backend."""
