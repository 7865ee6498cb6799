"""The engine on RocksDB: batches, reads, maintenance, and closing."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import rocksdict
from topicstore.contract import forking
from topicstore.contract.engine import Engine, EngineInfo, K, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
    ReadOnlyDatabaseError,
    UnsupportedError,
)

from topicstore_backends.calls import Calls
from topicstore_backends.files import ReaderDirectory, disk_bytes, sync
from topicstore_backends.keyspaces import ByKeyspace

from .errors import Translated, file_named
from .families import Family
from .scans import Cursor, RocksdbSnapshot, Scan
from .small_tables import REWRITING, small_runs

__all__ = ["Opened", "RocksdbEngine", "RocksdbReader"]

Opened: TypeAlias = tuple[rocksdict.Rdict, ReaderDirectory]
"""A database that is only read, and the directory in which it was opened."""

# From this many sorted keys on, an iterator visits them without filling the block cache: the blocks of so many keys
# would evict blocks that are read repeatedly, and inserting a block takes as long as reading it.
MANY_KEYS = 256
# The number of entries after which `RocksdbEngine.verify` releases the lock, so that waiting threads can take it.
VERIFY_STEPS = 1000


class RocksdbEngine(Engine):
    """An engine that owns one RocksDB database, and closes it even if the constructor fails.

    Without ``sync`` a batch is in RocksDB's log, handed to the operating system, when `write`
    returns; with ``sync`` the log is fsynced as well, in a second step that releases the GIL.
    """

    def __init__(
        self,
        path: Path,
        database: rocksdict.Rdict,
        keyspaces: Sequence[Keyspace[Any]],
        cache: rocksdict.Cache,
        *,
        scarce: bool = False,
        made: ReaderDirectory | None = None,
    ) -> None:
        self._path = path
        self._database = database
        self._cache = cache
        self._scarce = scarce
        """Whether automatic compactions are off, because disk space was scarce and none has been reclaimed since."""
        self._families: ByKeyspace[Family] = ByKeyspace()
        with Translated(path), ExitStack() as failing:
            if made is not None:
                failing.callback(made.remove)
            failing.callback(database.close)
            self._translated = Translated(path, opened=Path(database.path()))
            for keyspace in keyspaces:
                family = self._families[keyspace.name] = Family(database, keyspace)
                failing.callback(family.close)
            failing.pop_all()
        self._lock = forking.ProcessLock()
        """Held during a write, and while iterators are made: those of a snapshot must see the same writes."""
        # Weak, so that garbage collection of an unfinished scan releases its iterator.
        self._cursors: WeakSet[Cursor] = WeakSet()
        self._calls = Calls(self._translated)
        self._closed = False
        self._closing = forking.ProcessLock()
        self._open = ExitStack()
        """Closes everything that is still open, the database last. Guarded by `_closing`."""
        if made is not None:
            self._open.callback(made.removal(self))
        self._open.callback(database.close)
        for family in self._families.values():
            self._open.callback(family.close)
        forking.remember(self)

    def merge_small_tables(self) -> None:
        """Merge the small tables that short runs of programs have left, unless disk space is scarce."""
        if self._scarce:
            return
        with self._calls.lock(), self._calls:
            for family, first, last in small_runs(self._database, self._families.values()):
                # After compaction of an unreadable table, RocksDB would refuse all writes. So `_walk` reads the tables
                # first; readers and `verify` report the damage.
                with suppress(EngineError):
                    if self._walk(family, first, last + b"\0") is None:
                        family.data.compact_range(first, last, REWRITING)

    def leave_to_parent(self) -> None:
        """Leak RocksDB's objects in a forked child, so that nothing closes them, not even the end of the process.

        The child has none of RocksDB's threads (https://github.com/facebook/rocksdb/issues/2006).
        """
        forking.leak(self._database, *self._families.values())
        self._closed = True
        self._families = ByKeyspace()  # so that `get`, which takes no lock, doesn't reach the leaked families

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch: first range deletes, then puts and deletes in their order.

        Raises `StorageFullError` when the disk is full, `EngineError` for other failures;
        RocksDB then refuses further writes until the shard is opened again.
        """
        try:
            with self._lock:
                self._check_open()
                self._database.write(self._encode(batch.without_rows()))
        except Exception:
            with self._translated:
                raise
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
            if len(keys) == 1 and (value := values[0]) is not None:
                changes.put(family.encode(keys[0]), value, family.handle)
                continue
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
        """Fsync the log, so that every completed write is durable. Releases the GIL."""
        with self._calls.lock(), self._calls:
            self._database.flush_wal(True)

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Compact the range before returning. Releases the GIL."""
        family = self._family(keyspace)
        with self._calls.lock(), self._calls:
            self._database.flush(True)  # raises the error for which RocksDB refuses writes; `compact_range` would not
            family.data.compact_range(family.encode(start), family.encode(end))
            if self._scarce:
                self._scarce = False
                for each in self._families.values():
                    each.data.set_options({"disable_auto_compactions": "false"})

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        family = self._family(keyspace)
        with self._translated:
            found: bytes | None = family.data.get(family.encode(key))
            return found

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None where there is none.

        Releases the GIL, except for many sorted keys, which are looked up by an iterator.
        """
        family = self._family(keyspace)
        encoded: list[Any] = list(family.encode_all(keys))
        if len(keys) >= MANY_KEYS and all(map(operator.lt, encoded, encoded[1:])):
            cursor = self._open_cursor(family, None, caching=False)
            with self._translated:
                return cursor.values_of(encoded)
        with self._calls.lock(), self._calls:
            return cast("list[bytes | None]", family.data.get(encoded))

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield lists of the key-value pairs of a range, in the state at the time when the first list is requested.

        That list is small (16 pairs or 64 KB) and the next ones grow to 4096 pairs or 1 MB. A pair
        is not read before its list is requested. At a damaged block, the pairs before the block are yielded, then
        `CorruptionError` is raised.
        """
        family = self._family(keyspace)
        span = family.encode_span(start, end)
        return Scan(self._translated, family, self._open_cursor, span, reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state. While it is open, RocksDB keeps the files and buffers it needs."""
        with self._translated, self._lock:
            self._check_open()
            lock = forking.ProcessLock()
            cursors = ByKeyspace({name: (family, Cursor(family, lock=lock)) for name, family in self._families.items()})
            self._cursors.update(cursor for _, cursor in cursors.values())
        return RocksdbSnapshot(self._translated, cursors)

    def info(self) -> EngineInfo:
        """Return the bytes of all files in the directory, and of buffers, open tables and the shared cache."""
        with self._calls.lock(), self._calls:
            buffers = self._property("rocksdb.cur-size-all-mem-tables")
            tables = self._property("rocksdb.estimate-table-readers-mem")
            details: dict[str, str | int] = {
                "cache_bytes": self._cache.get_usage(),
                "buffer_bytes": buffers,
                "table_files": len(self._database.live_files()),
                "pending_compaction_bytes": self._property("rocksdb.estimate-pending-compaction-bytes"),
            }
            memory = buffers + tables + self._cache.get_usage()
            return EngineInfo(disk_bytes=disk_bytes(self._path), memory_bytes=memory, details=details)

    def verify(self) -> Iterator[str]:
        """Read every table block that holds a pair, and check its checksum; yield a sentence for each damaged block.

        After a damaged block, the verification skips the rest of that file. The block cache is not filled.
        """
        self._check_open()
        for family in list(self._families.values()):
            yield from self._verify_family(family)

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard into the new directory ``path``; on the same file system, mostly hard links.

        Memtables are flushed first, so the copy needs no log.
        """
        with self._calls.lock(), self._calls:
            if path.exists():
                raise EngineError(f"{path}: a checkpoint needs a new directory, and this exists")
            rocksdict.Checkpoint(self._database).create_checkpoint(str(path))
            sync(path.parent)

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Flush the buffers first, so that the checkpoint itself has little to write; then make the checkpoint."""
        with self._calls.lock(), self._calls:
            for family in self._families.values():
                family.data.flush(True)
        yield from super().checkpoint_steps(path)

    def close(self) -> None:
        """Write out the buffers and release files and lock, even if scans and snapshots are still referenced.

        Waits for calls of other threads that are inside RocksDB. If writing out fails, the error is
        raised after everything was released; the data is in the log.
        """
        self._calls.end()
        with self._closing, self._translated:
            with self._lock:
                self._closed = True
                self._families = ByKeyspace()
                cursors = list(self._cursors)
            for cursor in cursors:
                cursor.close()
            self._open.close()  # each callback runs even if another raises

    # --- within -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError(f"{self._path}: the engine is closed")

    def _family(self, keyspace: Keyspace[Any]) -> Family:
        try:
            return self._families[keyspace.name]
        except InvalidArgumentError:
            self._check_open()  # raises `DatabaseClosedError`: a closed engine has no column families
            raise

    def _open_cursor(self, family: Family, bound: bytes | None, *, caching: bool = True) -> Cursor:
        with self._translated, self._lock:
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

    def _walk(self, family: Family, start: bytes, end: bytes | None = None) -> CorruptionError | None:
        """Read a keyspace from ``start`` to ``end``, None for its end; return the first damage, or None."""
        cursor = self._open_cursor(family, end, caching=False)
        try:
            with self._translated:
                cursor.use(lambda iterator: iterator.seek(start))
                while cursor.use(_steps):
                    pass
        except CorruptionError as damage:
            return damage
        finally:
            cursor.close()
        return None

    def _behind(self, damage: CorruptionError, start: bytes) -> bytes | None:
        """Return the first key after the damaged file, None if there is none after ``start``."""
        name = file_named(damage.reason)
        if name is None:
            return None
        with self._calls.lock(), self._calls:
            ends = [file["end_key"] for file in self._database.live_files() if file["name"].endswith(name)]
        return next((end + b"\0" for end in ends if end is not None and end >= start), None)

    def _property(self, name: str) -> int:
        return sum(family.data.property_int_value(name) or 0 for family in self._families.values())


def _steps(iterator: rocksdict.RdictIter) -> bool:
    """Advance by up to `VERIFY_STEPS` pairs; return whether there may be more."""
    for _ in repeat(None, VERIFY_STEPS):
        if not iterator.valid():
            iterator.status()
            return False
        iterator.next()
    return True


class RocksdbReader(RocksdbEngine):
    """A read-only engine on a RocksDB database as of its opening; another process may write the database."""

    def __init__(self, path: Path, opened: Opened, keyspaces: Sequence[Keyspace[Any]], cache: rocksdict.Cache) -> None:
        database, made = opened
        super().__init__(path, database, keyspaces, cache, made=made)

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Raise `ReadOnlyDatabaseError`, because the engine was opened only to read."""
        raise ReadOnlyDatabaseError(f"{self._path}: the engine was opened to be read")

    def flush_log(self) -> None:
        """Fsync the writer's logs, so that everything that this engine reads is durable."""
        with self._translated:
            for log in self._path.glob("*.log"):
                with suppress(FileNotFoundError):  # the writer flushed and removed the log, so its table is on disk
                    sync(log)

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Do nothing: only the writer reclaims disk space."""

    def checkpoint(self, path: Path) -> None:
        """Raise `UnsupportedError`: RocksDB makes checkpoints only of databases opened for writing."""
        raise UnsupportedError("RocksDB makes no checkpoint of what is only read")
