"""The engine: batches, reads, care, and closing."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import WeakSet

import rocksdict
from topicstore.contract import forking
from topicstore.contract.engine import Engine, EngineStats, Key, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
    ReadOnlyDatabaseError,
    UnsupportedError,
)

from topicstore_backends.calls import Calls
from topicstore_backends.files import disk_bytes, sync
from topicstore_backends.keyspaces import ByKeyspace

from .errors import Translated, file_named
from .families import Family
from .scans import Cursor, RocksdbSnapshot, Scan, values_of

__all__ = ["RocksdbEngine", "RocksdbReader"]

# Keys, looked up together and in their order, from which on they are walked to and the block cache is left as it
# is: so many would wash out what is read again and again, and to put a block there takes as long as to read it.
MANY_KEYS = 256
# Entries that `RocksdbEngine.verify` walks before it lets others at the lock.
VERIFY_STEPS = 1000


class RocksdbEngine(Engine):
    """One RocksDB database.

    Without ``sync`` a batch is in RocksDB's log, handed to the operating system, when `write`
    returns; with it the log is synced as well, in a second step that lets other threads run.
    """

    def __init__(
        self,
        path: Path,
        database: rocksdict.Rdict,
        keyspaces: Sequence[Keyspace],
        cache: rocksdict.Cache,
        *,
        scarce: bool = False,
    ) -> None:
        self._path = path
        self._database = database
        self._cache = cache
        self._scarce = scarce
        """Whether automatic compactions are off, because disk space was scarce and none has been reclaimed since."""
        self._translated = Translated(path)
        self._families = ByKeyspace({keyspace.name: Family(database, keyspace) for keyspace in keyspaces})
        self._lock = Lock()
        """Held by a write, and while iterators are made: those of a snapshot must see the same writes."""
        # Weak, so that a scan that is dropped half way gives its iterator back at once.
        self._cursors: WeakSet[Cursor] = WeakSet()
        self._calls = Calls(self._translated)
        self._closed = False
        forking.remember(self)

    def leave_to_parent(self) -> None:
        """Leak RocksDB's objects, so that nothing, not even the end of the process, closes them."""
        forking.leak(self._database, *self._families.values())

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch: ranges first, then the operations in their order.

        Raises `StorageFullError` when the disk is full, `EngineError` for what else fails; RocksDB
        then refuses further writes until the shard is opened again.
        """
        with self._translated, self._lock:
            self._check_open()
            self._database.write(self._encode(batch.without_rows()))
        if sync:
            self.flush_log()

    def _encode(self, batch: WriteBatch) -> rocksdict.WriteBatch:
        changes = rocksdict.WriteBatch(raw_mode=True)
        for keyspace, start, end in batch.ranges:
            family = self._families[keyspace.name]
            first, last = family.encode(start), family.encode(end)
            if first < last:
                changes.delete_range(first, last, family.handle)
        for keyspace, keys, values in batch.runs:
            family = self._families[keyspace.name]
            encoded = family.encode_all(keys)
            if None not in values:
                deque(map(changes.put, encoded, values, repeat(family.handle)), maxlen=0)
                continue
            for key, value in zip(encoded, values, strict=True):
                if value is None:
                    changes.delete(key, family.handle)
                else:
                    changes.put(key, value, family.handle)
        return changes

    def flush_log(self) -> None:
        """Return when everything written so far is on disk. Other threads run meanwhile."""
        with self._calls:
            self._database.flush_wal(True)

    def reclaim(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Compact the range now. Other threads run meanwhile."""
        family = self._family(keyspace)
        with self._calls:
            self._database.flush(True)  # all families: they are only ever written out together
            family.data.compact_range(family.encode(start), family.encode(end))
            if self._scarce:
                self._scarce = False
                for each in self._families.values():
                    each.data.set_options({"disable_auto_compactions": "false"})

    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        family = self._family(keyspace)
        with self._translated:
            return cast("bytes | None", family.data.get(family.encode(key)))

    def get_many(self, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the value of each key, None where there is none.

        Other threads run meanwhile, but where many keys come in their order: those are walked to.
        """
        family = self._family(keyspace)
        encoded: list[Any] = list(family.encode_all(keys))
        if len(keys) >= MANY_KEYS and all(map(operator.lt, encoded, encoded[1:])):
            cursor = self._open_cursor(family, None, caching=False)
            with self._translated, cursor.lock:
                return values_of(cursor.open_iterator(), encoded)
        with self._calls:
            return cast("list[bytes | None]", family.data.get(encoded))

    def scan(
        self,
        keyspace: Keyspace,
        start: Key | None = None,
        end: Key | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[Key, bytes]]]:
        """Yield the pairs of a range as they are when the first list is asked for.

        That list is small (16 pairs or 64 KB) and the next ones grow to 4096 pairs or 1 MB. A pair
        is not read before its list is asked for. Where a block is damaged, the pairs before it come
        first and `CorruptionError` after them.
        """
        family = self._family(keyspace)
        span = family.encode_span(start, end)
        return Scan(self._translated, family, self._open_cursor, span, reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a view of now. While it is open RocksDB keeps the files and buffers that it needs."""
        with self._translated, self._lock:
            self._check_open()
            cursors = ByKeyspace({name: (family, Cursor(family)) for name, family in self._families.items()})
            self._cursors.update(cursor for _, cursor in cursors.values())
        return RocksdbSnapshot(self._translated, cursors)

    def stats(self) -> EngineStats:
        """Return the bytes of all files in the directory, and of buffers, open tables and the shared cache."""
        with self._calls:
            buffers = self._property("rocksdb.cur-size-all-mem-tables")
            tables = self._property("rocksdb.estimate-table-readers-mem")
            details: dict[str, str | int] = {
                "cache_bytes": self._cache.get_usage(),
                "buffer_bytes": buffers,
                "table_files": len(self._database.live_files()),
                "pending_compaction_bytes": self._property("rocksdb.estimate-pending-compaction-bytes"),
            }
            memory = buffers + tables + self._cache.get_usage()
            return EngineStats(disk_bytes=disk_bytes(self._path), memory_bytes=memory, details=details)

    def verify(self) -> Iterator[str]:
        """Read every table block that holds a pair, checking its checksum; yield a sentence a damage.

        Behind a damaged block the walk goes on past the end of its file. The cache is left alone.
        """
        self._check_open()
        for family in list(self._families.values()):
            yield from self._verify_family(family)

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard into the new directory ``path``; on one disk, mostly of links.

        Buffers are written out first, so the copy needs no log.
        """
        if path.exists():
            raise EngineError(f"{path}: a checkpoint needs a new directory, and this exists")
        with self._calls:
            rocksdict.Checkpoint(self._database).create_checkpoint(str(path))
            sync(path.parent)

    def close(self) -> None:
        """Write out the buffers and give back files and lock, whoever still refers to scans and snapshots.

        Waits for calls of other threads that are inside RocksDB. When writing out fails the error is
        raised after everything was given back; the data is in the log.
        """
        self._calls.end()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            families, self._families = list(self._families.values()), ByKeyspace()
            cursors = list(self._cursors)
        for cursor in cursors:
            cursor.close()
        failed: Exception | None = None
        parts: list[Family | rocksdict.Rdict] = [*families, self._database]
        for part in parts:
            try:
                part.close()
            except Exception as error:  # noqa: BLE001 - rocksdict raises no other, and the rest must be closed too
                failed = failed or error
        if failed is not None:
            with self._translated:
                raise failed

    # --- within -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError(f"{self._path}: the engine is closed")

    def _family(self, keyspace: Keyspace) -> Family:
        try:
            return self._families[keyspace.name]
        except InvalidArgumentError:
            self._check_open()  # a closed engine has no families
            raise

    def _open_cursor(self, family: Family, bound: bytes | None, *, caching: bool = True) -> Cursor:
        with self._lock:
            self._check_open()
            cursor = Cursor(family, bound, caching=caching)
            self._cursors.add(cursor)
        return cursor

    def _verify_family(self, family: Family) -> Iterator[str]:
        start: bytes | None = b""
        told: set[str] = set()
        while start is not None:
            damage = self._walk(family, start)
            if damage is None:
                return
            if damage.reason not in told:
                told.add(damage.reason)
                yield f"keyspace {family.name!r}: {damage}"
            start = self._behind(damage, start)

    def _walk(self, family: Family, start: bytes) -> CorruptionError | None:
        """Go through a keyspace from ``start`` to the end, or to the damage that is returned."""
        cursor = self._open_cursor(family, None, caching=False)
        try:
            with self._translated:
                with cursor.lock:
                    cursor.open_iterator().seek(start)
                while self._steps(cursor):
                    pass
        except CorruptionError as damage:
            return damage
        finally:
            cursor.close()
        return None

    @staticmethod
    def _steps(cursor: Cursor) -> bool:
        """Go some pairs on; tell whether there may be more."""
        with cursor.lock:
            iterator = cursor.open_iterator()
            for _ in repeat(None, VERIFY_STEPS):
                if not iterator.valid():
                    iterator.status()
                    return False
                iterator.next()
        return True

    def _behind(self, damage: CorruptionError, start: bytes) -> bytes | None:
        """Return the first key behind the damaged file, None if that doesn't lead on."""
        name = file_named(damage.reason)
        if name is None:
            return None
        with self._calls:
            ends = [file["end_key"] for file in self._database.live_files() if file["name"].endswith(name)]
        return next((end + b"\0" for end in ends if end is not None and end >= start), None)

    def _property(self, name: str) -> int:
        return sum(family.data.property_int_value(name) or 0 for family in self._families.values())


class RocksdbReader(RocksdbEngine):
    """A RocksDB database as it was when it was opened, whoever writes it."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Raise `ReadOnlyDatabaseError`."""
        raise ReadOnlyDatabaseError(f"{self._path}: the engine was opened to be read")

    def flush_log(self) -> None:
        """Return when all that can be read here is on disk: its writer may not have synced the log yet."""
        for log in self._path.glob("*.log"):
            with suppress(FileNotFoundError), Translated(self._path):  # written out, so on disk as a table
                sync(log)

    def reclaim(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Leave the disk space to the writer."""

    def checkpoint(self, path: Path) -> None:
        """Raise `UnsupportedError`: RocksDB makes checkpoints only where it writes."""
        raise UnsupportedError("RocksDB makes no checkpoint of what is only read")
