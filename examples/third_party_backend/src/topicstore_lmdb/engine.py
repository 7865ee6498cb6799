"""One LMDB environment for each shard, with a named database for each keyspace.

LMDB has one writer and any number of readers. Each reader sees the tree as of the begin of its transaction, as
topicstore requires of scans and snapshots. There is no write-ahead log: a commit writes the changed pages and fsyncs
them, so ``commit`` and ``sync`` are the same. The file never shrinks.

Every call holds the engine's lock while it is inside LMDB. A transaction may be used by different threads, but not by
two at the same time, and closing must not unmap the file while a reader uses it.
"""

import contextlib
import errno
import fcntl
import os
import resource
import weakref
from itertools import chain, islice

import attrs
import lmdb
from attrs.validators import ge, instance_of
from topicstore.contract.engine import Backend, Engine, EngineInfo, Snapshot
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    DataLossError,
    EngineError,
    InvalidArgumentError,
    StorageFullError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.key_encoding import KeyEncoding

from .keys import entry_of, is_bucket, pairs_of, value_of

_CHUNK_PAIRS, _CHUNK_BYTES = 1_000, 1 << 20
"""The maximum numbers of pairs and of bytes in a chunk of a scan; a single pair may have more bytes."""
_READERS = 1_000
"""The maximum number of open transactions."""
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The messages of LMDB's errors for a full disk, because these errors have no error number."""
_SHORT = f"mdb_txn_commit: {os.strerror(errno.EIO)}"
"""LMDB's message after a short write, and after a failed write or fsync."""
_LITTLE = 1 << 20
_DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)


@attrs.frozen(kw_only=True)
class LmdbOptions:
    """The options of LMDB, which may differ between openings of a shard."""

    map_bytes: int = attrs.field(default=1 << 36, validator=[instance_of(int), ge(1 << 20)])
    """The maximum size of a shard in bytes. Only used pages take disk space."""


class LmdbBackend(Backend):
    """A backend that opens LMDB environments."""

    Options = LmdbOptions
    unneeded = ("lock.mdb",)

    def open_shard(self, path, keyspaces, *, create):
        """Open the environment in ``path``; with ``create``, create it if it doesn't exist."""
        with _translated(path):
            if create:
                path.mkdir(parents=True, exist_ok=True)
            elif not (path / "data.mdb").exists():
                raise DataLossError("there is no LMDB environment any more", str(path))
            return LmdbEngine(path, keyspaces, self.options.map_bytes)


@contextlib.contextmanager
def _translated(path):
    """Translate errors of LMDB and of the system into topicstore's."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        full = any(text in str(error) for text in _FULL) or (_SHORT in str(error) and _room(path) < _LITTLE)
        if full or isinstance(error, (lmdb.MapFullError, lmdb.DiskError)):
            raise StorageFullError(f"{path}: {error}") from error
        if isinstance(error, _DAMAGED):
            raise CorruptionError(str(error), str(path)) from error
        raise EngineError(f"{path}: {error}") from error


def _room(path):
    """Return the bytes by which the shard may grow, limited by the disk and by the process's file size limit."""
    disk = os.statvfs(path)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = disk.f_bavail * disk.f_frsize
    return free if limit == resource.RLIM_INFINITY else min(free, limit - (path / "data.mdb").stat().st_size)


def _lock(path):
    """Lock the shard's directory; return the lock's file descriptor. Raises `EngineError` if the shard is open."""
    descriptor = os.open(path / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise EngineError(f"{path}: somebody else has this environment open") from None
    return descriptor


class _View:
    """A read transaction, which sees a snapshot of the environment, and the reads from it."""

    def __init__(self, engine):
        self._engine = engine
        self._transaction = engine.begin()

    def get(self, keyspace, packed):
        """Return the value of a key, or None if there is none."""
        entry = entry_of(packed)
        with self._engine.using():
            value = self._open().get(entry, db=self._engine.database(keyspace))
        return None if value is None else dict(pairs_of(entry, value)).get(packed)

    def chunks(self, keyspace, start, end, reverse, limit):
        """Yield the pairs of a range, in chunks of the size that topicstore requires of scans."""
        rows = None
        while True:
            with self._engine.using():
                self._open()
                if rows is None:
                    rows = islice(self._rows(keyspace, start, end, reverse), limit)
                chunk, rows = _some(rows)
            if not chunk:
                return
            yield chunk

    def _rows(self, keyspace, start, end, reverse):
        for entry, value in self._entries(keyspace, end if reverse else start, reverse):
            pairs = pairs_of(entry, value)
            for packed, each in reversed(pairs) if reverse else pairs:
                below, above = start is not None and packed < start, end is not None and packed >= end
                if below if reverse else above:
                    return
                if not below and not above:
                    yield packed, each

    def _entries(self, keyspace, at, reverse):
        """Return LMDB's iterator over the entries, from the one that holds the key ``at`` or would hold it."""
        cursor = self._open().cursor(db=self._engine.database(keyspace))
        found = at is not None and cursor.set_range(entry_of(at))
        if reverse:
            return cursor.iterprev() if found or cursor.last() else iter(())
        return cursor.iternext() if found or (at is None and cursor.first()) else iter(())

    def end(self):
        """End the transaction. Idempotent."""
        with self._engine.lock:
            transaction, self._transaction = self._transaction, None
            if transaction is not None:
                transaction.abort()

    def _open(self):
        if self._transaction is None:
            raise DatabaseClosedError("the engine or the snapshot is closed")
        return self._transaction


def _some(rows):
    """Return a chunk of at most about a megabyte, but at least one row, and an iterator over the other rows."""
    chunk, size = [], 0
    for packed, value in rows:
        size += len(value)
        if chunk and (size > _CHUNK_BYTES or len(chunk) == _CHUNK_PAIRS):
            return chunk, chain([(packed, value)], rows)
        chunk.append((packed, value))
    return chunk, rows


class LmdbSnapshot(Snapshot):
    """A snapshot, whose reads share one view."""

    def __init__(self, engine):
        self._engine = engine
        self._view = engine.view()

    def get(self, keyspace, key):
        return self._view.get(keyspace, self._engine.pack(keyspace, key))

    def get_many(self, keyspace, keys):
        return [self.get(keyspace, key) for key in keys]

    def scan(self, keyspace, start=None, end=None, *, reverse=False, limit=None):
        return self._engine.chunks(lambda: contextlib.nullcontext(self._view), keyspace, start, end, reverse, limit)

    def close(self):
        self._view.end()


class LmdbEngine(Engine):
    """The engine of one shard."""

    def __init__(self, path, keyspaces, map_bytes):
        self.lock = ProcessLock()
        self._path = path
        self._views = weakref.WeakSet()
        self._descriptor = _lock(path)
        try:
            self._env = lmdb.open(str(path), map_size=map_bytes, max_dbs=len(keyspaces), max_readers=_READERS)
            self._databases = {each.name: self._env.open_db(each.name.encode()) for each in keyspaces}
        except BaseException:
            os.close(self._descriptor)
            raise
        self._encodings = {each.name: KeyEncoding(each) for each in keyspaces}
        self._closed = False

    # --- used by views ---

    @contextlib.contextmanager
    def using(self):
        """Hold the lock while inside LMDB. Raises `DatabaseClosedError` if the engine is closed."""
        with self.lock, _translated(self._path):
            if self._closed:
                raise DatabaseClosedError(f"{self._path}: the engine is closed")
            yield

    def begin(self):
        """Return a new read transaction."""
        return self._env.begin()

    def database(self, keyspace):
        """Return LMDB's handle of a keyspace."""
        return self._named(self._databases, keyspace)

    def pack(self, keyspace, key):
        """Return a key as bytes. Raises `InvalidArgumentError` if it has another shape than the keyspace's keys."""
        return self._named(self._encodings, keyspace).encode(key)

    def _named(self, table, keyspace):
        try:
            return table[keyspace.name]
        except KeyError:
            raise InvalidArgumentError(f"the engine was opened without keyspace {keyspace.name!r}") from None

    def view(self):
        """Return a new view of the current state."""
        with self.using():
            view = _View(self)
            self._views.add(view)
            return view

    def chunks(self, take_view, keyspace, start, end, reverse, limit):
        """Return an iterator over the chunks of a scan, whose view is taken when the first chunk is requested."""
        unpack = self._named(self._encodings, keyspace).decode
        start, end = (None if key is None else self.pack(keyspace, key) for key in (start, end))

        def generate():
            with take_view() as view:
                for chunk in view.chunks(keyspace, start, end, reverse, limit):
                    yield [(unpack(packed), value) for packed, value in chunk]

        return generate()

    # --- reading ---

    @contextlib.contextmanager
    def _own_view(self):
        view = self.view()
        try:
            yield view
        finally:
            view.end()

    def get(self, keyspace, key):
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace, keys):
        packed = [self.pack(keyspace, key) for key in keys]
        with self._own_view() as view:
            return [view.get(keyspace, each) for each in packed]

    def scan(self, keyspace, start=None, end=None, *, reverse=False, limit=None):
        return self.chunks(self._own_view, keyspace, start, end, reverse, limit)

    def snapshot(self):
        return LmdbSnapshot(self)

    # --- writing ---

    def write(self, batch, *, sync=False):
        """Apply the batch in one transaction, which is fsynced when this returns."""
        ranges = [(k, self.pack(k, start), self.pack(k, end)) for k, start, end in batch.ranges]
        runs = [(k, [self.pack(k, key) for key in keys], values) for k, keys, values in batch.without_rows().runs]
        with self.using(), self._env.begin(write=True) as transaction:
            for keyspace, start, end in ranges:
                _delete_range(transaction.cursor(self.database(keyspace)), start, end)
            for keyspace, keys, values in runs:
                cursor = transaction.cursor(self.database(keyspace))
                for packed, value in zip(keys, values, strict=True):
                    _set(cursor, packed, value)

    def flush_log(self):
        """Do nothing, because every write is fsynced before it returns."""
        with self.using():
            pass

    # --- maintenance ---

    def checkpoint(self, path):
        """Write a copy without free pages to a new directory, and fsync it."""
        if path.exists():
            raise EngineError(f"{path}: a checkpoint needs a new directory, and this exists")
        with self.using():
            path.mkdir()
            self._env.copy(str(path), compact=True)
            for each in (path / "data.mdb", path, path.parent):
                descriptor = os.open(each, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def info(self):
        """Return the size of the file in bytes, and the number of used pages."""
        with self.using():
            info = self._env.info()
            size = (self._path / "data.mdb").stat().st_size
            details = {"pages": info["last_pgno"] + 1, "map_bytes": info["map_size"], "readers": info["num_readers"]}
            return EngineInfo(disk_bytes=size, memory_bytes=0, details=details)

    def close(self):
        """End all views, and release the map, the file and its lock."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for view in list(self._views):
                view.end()
            self._env.close()
            os.close(self._descriptor)


def _set(cursor, packed, value):
    """Set a key, or remove it if its value is None."""
    entry = entry_of(packed)
    if is_bucket(entry):
        pairs = dict(pairs_of(entry, cursor.get(entry))) if cursor.set_key(entry) else {}
        pairs[packed] = value
        value = value_of(pairs)
    if value is not None:
        cursor.put(entry, value)
    elif cursor.set_key(entry):
        cursor.delete()


def _delete_range(cursor, start, end):
    """Remove the keys from ``start`` (inclusive) to ``end`` (exclusive)."""
    more = start < end and cursor.set_range(entry_of(start))
    while more and cursor.key() <= entry_of(end):
        entry, pairs = cursor.key(), dict(pairs_of(*cursor.item()))
        left = {packed: value for packed, value in pairs.items() if not start <= packed < end}
        if not left:
            more = cursor.delete()  # moves to the next key
            continue
        if len(left) < len(pairs):
            cursor.put(entry, value_of(left))
        more = cursor.next()
