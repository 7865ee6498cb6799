"""Engines alone: writes of keys and values, and a scan.

They are called through their own Python modules, without topicstore. Options are the fastest known ones, which
topicstore uses, too: no compression, and a write buffer of 64 MiB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BUFFER", "RAW_ENGINES", "RawEngine", "RawLeveldb", "RawRocksdb"]

BUFFER = 64 << 20


class RawEngine(ABC):
    """One engine."""

    @abstractmethod
    def write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write a batch."""

    @abstractmethod
    def pairs(self) -> Iterable[Any]:
        """Return all keys with their values."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class RawRocksdb(RawEngine):
    """RocksDB through rocksdict."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        import rocksdict

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

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        import plyvel

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
