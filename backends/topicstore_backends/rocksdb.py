"""RocksDB, through rocksdict in its raw mode. One database of RocksDB a shard.

On disk
    A column family a keyspace, with its name; the family ``default`` stays empty. Keys of bytes
    are stored as they are, tuples as their numbers big-endian, one behind the other: ``(4, 8, 8)``
    is 20 bytes. Values are stored as they are. Beside RocksDB's files lies ``rocksdict-config.json``.
    Deleted bytes go back to the disk with the compactions that later writes set off; an idle shard
    keeps them.

What rocksdict 0.3.29 does wrong without a word, and what is done about it
    * Iterators made from its snapshots show later writes. An iterator that is open already doesn't:
      a snapshot here is one open iterator a keyspace, made while nobody writes.
    * ``RdictItems`` stops at a damaged block as if the data ended there. `_Scan` walks a
      ``RdictIter`` and asks for its status at the end.
    * An iterator's upper bound dangles when options and key are freed; the lower bound is taken for
      an upper one. `_Cursor` keeps the former alive and nothing uses the latter.
    * Whatever refers to the database keeps it open, and its lock held, after ``close``. `_Cursor`
      is the only place where an iterator lives, and the engine empties all of them before it closes.

rocksdict holds the interpreter's lock in all calls but ``get`` of a list, flushes and compactions,
so a single ``get`` or ``write`` can't overlap with ``close``; the others are counted (`_Uses`).
"""

from __future__ import annotations

import collections
import ctypes
import errno
import operator
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast
from weakref import WeakSet

import attrs
import rocksdict
from topicstore.contract.engine import Backend, Engine, EngineStats, Key, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
    ReadOnlyDatabaseError,
    StorageFullError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

__all__ = ["RocksdbBackend", "RocksdbEngine", "RocksdbOptions", "RocksdbReader"]

# A scan's first list is small, so that a leap costs microseconds; the next ones grow to these.
FIRST_PAIRS, MOST_PAIRS = 16, 4096
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 20
GROWTH = 4

# Open table files of a shard. Each costs a descriptor and some memory outside the block cache,
# so without a bound both would grow with what is stored.
OPEN_FILES = 128
# One index entry a block: with 16 KB the index is a quarter of what it is with RocksDB's 4 KB, and
# scans of small values are a tenth faster. Values larger than a block get a block of their own.
BLOCK_BYTES = 16 << 10
# Keys, looked up together and in their order, from which on they are walked to and the block cache is left as it
# is: so many would wash out what is read again and again, and to put a block there takes as long as to read it.
MANY_KEYS = 256
# How often a reader tries to open a database whose files come and go.
MOMENTS = 20
_NOT_READ = frozenset(("LOCK", "LOG", "rocksdict-config.json"))
"""Files that an opening writes."""
# Entries that `RocksdbEngine.verify` walks before it lets others at the lock.
VERIFY_STEPS = 1000

_COMPRESSION: dict[str, Callable[[], rocksdict.DBCompressionType]] = {
    "none": rocksdict.DBCompressionType.none,
    "lz4": rocksdict.DBCompressionType.lz4,
    "snappy": rocksdict.DBCompressionType.snappy,
    "zstd": rocksdict.DBCompressionType.zstd,
}
_RECOVERY: dict[str, Callable[[], rocksdict.DBRecoveryMode]] = {
    "strict": rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records,
    "point_in_time": rocksdict.DBRecoveryMode.point_in_time,
    "salvage": rocksdict.DBRecoveryMode.skip_any_corrupted_record,
}
_RECOVERY_HINT = (
    'If its log is damaged, opening with options={"rocksdb": {"recovery": "point_in_time"}} keeps everything'
    ' up to the damage, and "salvage" every batch that can still be read.'
)
_FULL = re.compile(r"No space left on device|File too large|quota exceeded|Space limit reached", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))


@attrs.frozen(kw_only=True)
class RocksdbOptions:
    """How RocksDB is tuned. All of it may differ from one opening to the next."""

    compression: str = attrs.field(default="none", validator=attrs.validators.in_(tuple(_COMPRESSION)))
    """Of table blocks: ``none``, ``lz4``, ``snappy`` or ``zstd``; the log is never compressed.

    ``none`` suits layouts that compress their values themselves, as ``block`` does.
    """
    write_buffer_bytes: int = attrs.field(
        default=64 << 20, validator=[attrs.validators.instance_of(int), attrs.validators.ge(64 << 10)]
    )
    """Bytes a shard keeps in memory, over all its keyspaces, before it writes them out as table files.

    While they are written out as many again may come in. The log grows to about this size.
    """
    cache_bytes: int = attrs.field(
        default=32 << 20, validator=[attrs.validators.instance_of(int), attrs.validators.ge(0)]
    )
    """Bytes of table blocks, indexes included, kept in memory: one cache for all shards of a database."""
    recovery: str = attrs.field(default="strict", validator=attrs.validators.in_(tuple(_RECOVERY)))
    """What opening does with a damaged log.

    ``strict`` takes a log that ends in the middle of a batch, as a power failure leaves it, for the
    end of the data, and raises `CorruptionError` for any other damage. ``point_in_time`` keeps
    everything up to the damage and drops what follows. ``salvage`` drops only the batches that
    can't be read: the damaged one and those that share its 32 KB of the log. What the last two
    dropped is gone once the shard was opened.
    """


class RocksdbBackend(Backend):
    """Opens RocksDB databases that share one block cache."""

    Options: ClassVar[type] = RocksdbOptions

    def __init__(self, options: RocksdbOptions) -> None:
        super().__init__(options)
        self._cache = rocksdict.Cache(options.cache_bytes)

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> RocksdbEngine:
        """Open the database in ``path``; with ``create`` make it unless it is there already.

        Raises `EngineError` when there is none, when another engine has it open or when it holds
        other keyspaces, and `CorruptionError` when it is damaged; see `RocksdbOptions.recovery`.
        """
        if create:
            _make_directory(path)
        elif not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no RocksDB database")
        options = _database_options(self.options, self._cache)
        families = dict.fromkeys((keyspace.name for keyspace in keyspaces), options)
        with _Translated(path, opening=True):
            database = rocksdict.Rdict(str(path), options, families)
        return RocksdbEngine(path, database, keyspaces, self._cache)

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> RocksdbReader:
        """Open the database in ``path`` as it is now, whoever writes it, without its lock.

        Costs reading the log, at about 150 MB a second; the log of a database that was closed is empty.
        """
        if not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no RocksDB database")
        options = _database_options(self.options, self._cache)
        options.create_if_missing(False)
        options.create_missing_column_families(False)
        options.set_max_open_files(-1)  # all at once, because compactions remove files that are not open
        families = dict.fromkeys((keyspace.name for keyspace in keyspaces), options)
        return RocksdbReader(path, _open_moment(path, options, families), keyspaces, self._cache)


def _database_options(chosen: RocksdbOptions, cache: rocksdict.Cache) -> rocksdict.Options:
    """Return the options of the database, which are also those of every column family."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(_RECOVERY[chosen.recovery]())
    # All families are written out together. Otherwise, when the newest log is cut short, a family
    # written out since is ahead of the others, a batch is half there, and RocksDB refuses to open.
    options.set_atomic_flush(True)
    options.set_compression_type(_COMPRESSION[chosen.compression]())
    options.set_block_based_table_factory(_table_options(cache))
    # Memory: the buffers of all families count together, and table files are a bounded number.
    options.set_write_buffer_size(chosen.write_buffer_bytes)
    options.set_db_write_buffer_size(chosen.write_buffer_bytes)
    # More than two of them, so that a write need not wait (with the interpreter's lock held) until
    # the last one is written out: the longest write of 40 KB took 5 to 30 ms instead of 40 to 100.
    options.set_max_write_buffer_number(4)
    options.set_max_open_files(OPEN_FILES)
    # A shard that holds little should take little: RocksDB's own log says 75 KB at every opening
    # and keeps a thousand of them, and the manifest reserves 4 MB.
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    options.set_manifest_preallocation_size(64 << 10)
    return options


def _table_options(cache: rocksdict.Cache) -> rocksdict.BlockBasedOptions:
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_block_size(BLOCK_BYTES)
    # Outside the cache, indexes would take memory that grows with what is stored.
    tables.set_cache_index_and_filter_blocks(True)
    return tables


def _make_directory(path: Path) -> None:
    """Make the directory and see that its parent's entry for it outlives a power failure."""
    with _Translated(path):
        path.mkdir(parents=True, exist_ok=True)
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_moment(path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options]) -> rocksdict.Rdict:
    """Open a database to read in which files may come and go meanwhile.

    Files that are removed between listing and opening make the opening fail. A log that was written out as
    a table and removed between reading the manifest and reading the logs would be missing without a
    word: so what the manifest and the list of files say must be the same before and after.
    """
    for left in reversed(range(MOMENTS)):
        before = _moment(path)
        try:
            with _Translated(path, opening=True):
                database = _open_linked(path, options, families)
        except EngineError:
            if _moment(path) == before or not left:
                raise
            continue
        if _moment(path) == before:
            return database
        database.close()
    raise EngineError(f"{path}: its files changed each of the {MOMENTS} times that it was opened; try again")


def _moment(path: Path) -> dict[str, int]:
    """Return the names of all files, and the size of the manifests; logs grow at their ends only."""
    sizes = {}
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            if entry.name not in _NOT_READ:
                sizes[entry.name] = entry.stat().st_size if entry.name.startswith("MANIFEST") else 0
    return sizes


def _open_linked(path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options]) -> rocksdict.Rdict:
    """Open a directory of links to a database's files.

    rocksdict writes ``rocksdict-config.json`` at every opening, and RocksDB a log of its own: here they do it
    beside the links. RocksDB keeps the files open, so the links may go.
    """
    with tempfile.TemporaryDirectory(prefix="topicstore-reader-") as links:
        for entry in path.iterdir():
            if entry.name not in _NOT_READ:
                Path(links, entry.name).symlink_to(entry.resolve())
        mode = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
        return rocksdict.Rdict(links, options, families, access_type=mode)


# --- errors -----------------------------------------------------------------------------


class _Translated:
    """Turns what rocksdict raises, which is bare ``Exception`` with RocksDB's words, into our errors."""

    __slots__ = ("_opening", "_path")

    def __init__(self, path: Path, *, opening: bool = False) -> None:
        self._path = path
        self._opening = opening

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or kind is rocksdict.DbClosedError or isinstance(error, OSError):
            self._raise(cast("Exception", error))

    def _raise(self, error: Exception) -> NoReturn:
        text = str(error)
        if isinstance(error, rocksdict.DbClosedError):
            raise DatabaseClosedError(f"{self._path}: the engine is closed") from error
        if text.startswith("Corruption"):
            hint = f". {_RECOVERY_HINT}" if self._opening else ""
            raise CorruptionError(text + hint, place=str(self._path / (_file_named(text) or ""))) from error
        if _FULL.search(text) or (isinstance(error, OSError) and error.errno in _FULL_ERRNO):
            raise StorageFullError(f"{self._path}: {text}") from error
        if self._opening and "LOCK" in text:
            raise EngineError(f"{self._path}: the RocksDB database is open already ({text})") from error
        raise EngineError(f"{self._path}: {text}") from error


def _file_named(text: str) -> str | None:
    """Return the table or log file that a message of RocksDB names."""
    found = re.search(r"\d{6,}\.(?:sst|log)", text)
    return found.group() if found else None


# --- keys -------------------------------------------------------------------------------


class _Family:
    """A keyspace's column family, and how its keys become bytes and back."""

    __slots__ = ("data", "decode", "encode", "handle", "keyspace")

    def __init__(self, database: rocksdict.Rdict, keyspace: Keyspace) -> None:
        self.keyspace = keyspace
        self.data = database.get_column_family(keyspace.name)
        self.handle = database.get_column_family_handle(keyspace.name)
        self.encode: Callable[[Key], bytes]
        self.decode: Callable[[bytes], Key] | None
        """None where keys are bytes already."""
        if keyspace.shape is None:
            self.encode, self.decode = self._encode_bytes, None
        else:
            codec = struct.Struct(">" + "".join({4: "I", 8: "Q"}[width] for width in keyspace.shape))
            self.encode, self.decode = self._tuple_encoder(codec), codec.unpack

    def encode_all(self, keys: Sequence[Key]) -> Sequence[bytes]:
        """Return keys as bytes. Raises `InvalidArgumentError` like ``encode`` if one isn't of the keyspace."""
        if self.decode is None and set(map(type, keys)) == {bytes}:
            return keys
        return list(map(self.encode, keys))

    def _encode_bytes(self, key: Key) -> bytes:
        if type(key) is not bytes:
            raise InvalidArgumentError(f"{key!r} is not a key of keyspace {self.keyspace.name!r}, whose keys are bytes")
        return key

    def _tuple_encoder(self, codec: struct.Struct) -> Callable[[Key], bytes]:
        pack = codec.pack

        def encode(key: Key) -> bytes:
            try:
                return pack(*key)
            except (struct.error, TypeError) as error:
                raise InvalidArgumentError(
                    f"{key!r} is not a key of keyspace {self.keyspace.name!r} (shape {self.keyspace.shape})"
                ) from error

        return encode

    def close(self) -> None:
        """Let go of the database. The family's handle must go before its data does."""
        del self.handle
        self.data.close()


# --- reading ----------------------------------------------------------------------------


class _Cursor:
    """The one place where an iterator of RocksDB lives, so that closing can find and drop it."""

    __slots__ = ("__weakref__", "bound", "bounded", "iterator", "lock", "standing")

    def __init__(self, family: _Family, bound: bytes | None = None, *, caching: bool = True) -> None:
        self.lock = Lock()
        self.standing: object = None
        """Whose place the iterator is at; scans of one snapshot take turns."""
        options = rocksdict.ReadOptions()
        if not caching:
            options.fill_cache(False)  # type: ignore[call-arg]  # the stub forgot the argument
        if bound is not None:
            # Without it RocksDB would walk through everything deleted behind the range, up to the
            # next key that is alive.
            options.set_iterate_upper_bound(bound)
        self.bounded = bound is not None
        self.bound = (options, bound)
        """The iterator has pointers to these, but keeps no references of its own."""
        self.iterator: rocksdict.RdictIter | None = family.data.iter(options)

    def open_iterator(self) -> rocksdict.RdictIter:
        """Return the iterator; call it under the lock."""
        if self.iterator is None:
            raise DatabaseClosedError("the engine or the snapshot is closed")
        return self.iterator

    def close(self) -> None:
        """Drop the iterator, after whoever uses it at this moment."""
        with self.lock:
            self.iterator = None


class _Scan(Iterator[list[tuple[Key, bytes]]]):
    """The pairs of one range, a list at a time."""

    def __init__(
        self,
        translated: _Translated,
        family: _Family,
        open_cursor: Callable[[_Family, bytes | None], _Cursor],
        span: tuple[bytes | None, bytes | None],
        reverse: bool,
        limit: int | None,
    ) -> None:
        self._translated = translated
        self._family = family
        self._open_cursor = open_cursor
        self._start, self._end = span
        self._reverse = reverse
        self._left = limit
        self._cursor: _Cursor | None = None
        self._token = object()
        self._behind = False
        """Whether the iterator stands on the last pair handed out, not on the next."""
        self._pairs, self._bytes = FIRST_PAIRS, FIRST_BYTES
        self._done = limit is not None and limit <= 0
        self._past = self._far_end()

    def __next__(self) -> list[tuple[Key, bytes]]:
        if self._done:
            raise StopIteration
        if self._cursor is None:
            self._cursor = self._open_cursor(self._family, self._end)
            if self._cursor.bounded and not self._reverse:
                self._past = None  # RocksDB looks after the end
        cursor = self._cursor
        with self._translated, cursor.lock:
            iterator = cursor.open_iterator()
            if cursor.standing is not self._token:
                self._seek(iterator)
                cursor.standing = self._token
            elif self._behind:
                self._step(iterator)
            chunk = self._take(iterator)
        if self._done or not chunk:
            self.close()
        if not chunk:
            raise StopIteration
        self._pairs = min(self._pairs * GROWTH, MOST_PAIRS)
        self._bytes = min(self._bytes * GROWTH, MOST_BYTES)
        return chunk

    def close(self) -> None:
        """End the scan. Dropping it does the same."""
        self._done = True
        self._cursor = None

    def _far_end(self) -> Callable[[bytes], bool] | None:
        """Return what tells whether a key lies past the range, in the direction of the scan."""
        if self._reverse:
            return None if self._start is None else self._start.__gt__
        return None if self._end is None else self._end.__le__

    def _seek(self, iterator: rocksdict.RdictIter) -> None:
        """Go to the first pair not handed out yet."""
        if not self._reverse:
            if self._start is None:
                iterator.seek_to_first()
            else:
                iterator.seek(self._start)
        elif self._end is None:
            iterator.seek_to_last()
        else:
            iterator.seek_for_prev(self._end)
            if iterator.key() == self._end:
                iterator.prev()

    def _step(self, iterator: rocksdict.RdictIter) -> None:
        if self._reverse:
            iterator.prev()
        else:
            iterator.next()

    def _take(self, iterator: rocksdict.RdictIter) -> list[tuple[Key, bytes]]:
        """Collect pairs up to the end of the range, the limit, or the size of a list.

        Pair by pair, because only so is a list of large values bounded and nothing read for
        nothing: a value past the end, or past the limit, may be a block of its own on disk.
        """
        chunk: list[tuple[Key, bytes]] = []
        append, get_key, get_value = chunk.append, iterator.key, iterator.value
        advance = iterator.prev if self._reverse else iterator.next
        past, decode, room = self._past, self._family.decode, self._bytes
        count = self._pairs if self._left is None else min(self._pairs, self._left)
        last = None
        self._behind = False
        for left in range(count, 0, -1):
            key = get_key()
            if key is None:
                if not chunk:  # else hand out what comes before the damage, if damage it is
                    iterator.status()
                break
            if past is not None and past(key):
                self._done = True
                break
            value = get_value()
            size = len(value)
            if size > room and chunk:
                break
            append((key if decode is None else decode(key), value))
            last = key
            room -= size
            if left == 1 or room < size:
                self._behind = True
                break
            advance()
        if last is not None:
            self._note(last, len(chunk))
        return chunk

    def _note(self, last: bytes, taken: int) -> None:
        """Remember where to go on, should another scan move the iterator."""
        if self._reverse:
            self._end = last
        else:
            self._start = last + b"\0"
        if self._left is not None:
            self._left -= taken
            self._done = self._done or not self._left


class _RocksdbSnapshot(Snapshot):
    """An open iterator a keyspace: those see what was there when they were made."""

    def __init__(self, translated: _Translated, cursors: dict[str, tuple[_Family, _Cursor]]) -> None:
        self._translated = translated
        self._cursors = cursors

    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        family, cursor = self._cursor(keyspace)
        encoded = family.encode_all(keys)
        with self._translated, cursor.lock:
            cursor.standing = None
            return _values(cursor.open_iterator(), encoded)

    def scan(
        self,
        keyspace: Keyspace,
        start: Key | None = None,
        end: Key | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[Key, bytes]]]:
        family, cursor = self._cursor(keyspace)
        span = _encode_span(family, start, end)
        return _Scan(self._translated, family, lambda _family, _end: cursor, span, reverse, limit)

    def close(self) -> None:
        for _, cursor in self._cursors.values():
            cursor.close()

    def _cursor(self, keyspace: Keyspace) -> tuple[_Family, _Cursor]:
        try:
            return self._cursors[keyspace.name]
        except KeyError:
            raise _unknown(keyspace) from None


def _values(iterator: rocksdict.RdictIter, keys: Iterable[bytes]) -> list[bytes | None]:
    """Go from key to key; return the values."""
    values: list[bytes | None] = []
    for key in keys:
        iterator.seek(key)
        found = iterator.key()
        if found is None:
            iterator.status()
        values.append(iterator.value() if found == key else None)
    return values


def _encode_span(family: _Family, start: Key | None, end: Key | None) -> tuple[bytes | None, bytes | None]:
    encode = family.encode
    return (None if start is None else encode(start), None if end is None else encode(end))


def _add(changes: rocksdict.WriteBatch, family: _Family, keys: Sequence[Key], values: Sequence[bytes | None]) -> None:
    """Add operations on one keyspace in their order; a value of None deletes."""
    encoded = family.encode_all(keys)
    if None not in values:
        collections.deque(map(changes.put, encoded, values, repeat(family.handle)), maxlen=0)
        return
    for key, value in zip(encoded, values, strict=True):
        if value is None:
            changes.delete(key, family.handle)
        else:
            changes.put(key, value, family.handle)


def _unknown(keyspace: Keyspace) -> InvalidArgumentError:
    return InvalidArgumentError(f"the engine was opened without keyspace {keyspace.name!r}")


# --- the engine -------------------------------------------------------------------------


class _Uses:
    """Counts calls that let other threads run while they are inside RocksDB; closing waits for them."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._count = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise DatabaseClosedError("the engine is closed")
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def end(self) -> bool:
        """Let no more calls in and wait for those inside; tell whether this was the first time."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._count)
            return first


_engines: WeakSet[RocksdbEngine] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked child, keep databases from ever being closed: that would wait for threads a fork lacks."""
    for engine in list(_engines):
        engine.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class RocksdbEngine(Engine):
    """One RocksDB database.

    Without ``sync`` a batch is in RocksDB's log, handed to the operating system, when `write`
    returns; with it the log is synced as well, in a second step that lets other threads run.
    """

    def __init__(
        self, path: Path, database: rocksdict.Rdict, keyspaces: Sequence[Keyspace], cache: rocksdict.Cache
    ) -> None:
        self._path = path
        self._database = database
        self._cache = cache
        self._translated = _Translated(path)
        self._families = {keyspace.name: _Family(database, keyspace) for keyspace in keyspaces}
        self._lock = Lock()
        """Held by a write, and while iterators are made: those of a snapshot must see the same writes."""
        # Weak, so that a scan that is dropped half way gives its iterator back at once.
        self._cursors: WeakSet[_Cursor] = WeakSet()
        self._uses = _Uses()
        self._closed = False
        _engines.add(self)

    def leave_to_parent(self) -> None:
        """Leak RocksDB's objects, so that nothing, not even the end of the process, closes them."""
        for held in (self._database, *self._families.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

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
        families = self._families
        try:
            for keyspace, start, end in batch.ranges:
                family = families[keyspace.name]
                first, last = family.encode(start), family.encode(end)
                if first < last:
                    changes.delete_range(first, last, family.handle)
            for keyspace, keys, values in batch.runs:
                _add(changes, families[keyspace.name], keys, values)
        except KeyError:
            raise _unknown(keyspace) from None
        return changes

    def flush_log(self) -> None:
        """Return when everything written so far is on disk. Other threads run meanwhile."""
        with self._translated, self._uses:
            self._database.flush_wal(True)

    def reclaim(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Compact the range now. Other threads run meanwhile."""
        family = self._family(keyspace)
        with self._translated, self._uses:
            self._database.flush(True)  # all families: they are only ever written out together
            family.data.compact_range(family.encode(start), family.encode(end))

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
                return _values(cursor.open_iterator(), encoded)
        with self._translated, self._uses:
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
        span = _encode_span(family, start, end)
        return _Scan(self._translated, family, self._open_cursor, span, reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a view of now. While it is open RocksDB keeps the files and buffers that it needs."""
        with self._translated, self._lock:
            self._check_open()
            cursors = {name: (family, _Cursor(family)) for name, family in self._families.items()}
            self._cursors.update(cursor for _, cursor in cursors.values())
        return _RocksdbSnapshot(self._translated, cursors)

    def stats(self) -> EngineStats:
        """Return the bytes of all files in the directory, and of buffers, open tables and the shared cache."""
        with self._translated, self._uses:
            buffers = self._property("rocksdb.cur-size-all-mem-tables")
            tables = self._property("rocksdb.estimate-table-readers-mem")
            details: dict[str, str | int] = {
                "cache_bytes": self._cache.get_usage(),
                "buffer_bytes": buffers,
                "table_files": len(self._database.live_files()),
                "pending_compaction_bytes": self._property("rocksdb.estimate-pending-compaction-bytes"),
            }
        memory = buffers + tables + self._cache.get_usage()
        return EngineStats(disk_bytes=self._disk_bytes(), memory_bytes=memory, details=details)

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
        with self._translated, self._uses:
            rocksdict.Checkpoint(self._database).create_checkpoint(str(path))
            _sync(path.parent)

    def close(self) -> None:
        """Write out the buffers and give back files and lock, whoever still refers to scans and snapshots.

        Waits for calls of other threads that are inside RocksDB. When writing out fails the error is
        raised after everything was given back; the data is in the log.
        """
        if not self._uses.end():
            return
        with self._lock:
            self._closed = True
            families, self._families = list(self._families.values()), {}
            cursors = list(self._cursors)
        for cursor in cursors:
            cursor.close()
        failed: Exception | None = None
        parts: list[_Family | rocksdict.Rdict] = [*families, self._database]
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

    def _family(self, keyspace: Keyspace) -> _Family:
        try:
            return self._families[keyspace.name]
        except KeyError:
            self._check_open()
            raise _unknown(keyspace) from None

    def _open_cursor(self, family: _Family, bound: bytes | None, *, caching: bool = True) -> _Cursor:
        with self._lock:
            self._check_open()
            cursor = _Cursor(family, bound, caching=caching)
            self._cursors.add(cursor)
        return cursor

    def _verify_family(self, family: _Family) -> Iterator[str]:
        start: bytes | None = b""
        told: set[str] = set()
        while start is not None:
            damage = self._walk(family, start)
            if damage is None:
                return
            if damage.reason not in told:
                told.add(damage.reason)
                yield f"keyspace {family.keyspace.name!r}: {damage}"
            start = self._behind(damage, start)

    def _walk(self, family: _Family, start: bytes) -> CorruptionError | None:
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
    def _steps(cursor: _Cursor) -> bool:
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
        name = _file_named(damage.reason)
        if name is None:
            return None
        with self._translated, self._uses:
            ends = [file["end_key"] for file in self._database.live_files() if file["name"].endswith(name)]
        return next((end + b"\0" for end in ends if end is not None and end >= start), None)

    def _property(self, name: str) -> int:
        return sum(family.data.property_int_value(name) or 0 for family in self._families.values())

    def _disk_bytes(self) -> int:
        total = 0
        for entry in self._path.iterdir():
            with suppress(FileNotFoundError):  # RocksDB deletes files whenever it likes
                total += entry.stat().st_size
        return total


class RocksdbReader(RocksdbEngine):
    """A RocksDB database as it was when it was opened, whoever writes it."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Raise `ReadOnlyDatabaseError`."""
        raise ReadOnlyDatabaseError(f"{self._path}: the engine was opened to be read")

    def flush_log(self) -> None:
        """Return when all that can be read here is on disk: its writer may not have synced the log yet."""
        for log in self._path.glob("*.log"):
            with suppress(FileNotFoundError), _Translated(self._path):  # written out, so on disk as a table
                _sync(log)

    def reclaim(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Leave the disk space to the writer."""

    def checkpoint(self, path: Path) -> None:
        """Raise `UnsupportedError`: RocksDB makes checkpoints only where it writes."""
        raise UnsupportedError("RocksDB makes no checkpoint of what is only read")
