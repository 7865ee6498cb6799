"""Options of RocksDB, and opening databases for writing, or for reading while another process writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import rocksdict
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import CorruptionError, EngineError, StorageFullError, TooManyOpenFilesError
from topicstore.contract.forking import LibraryThreads

from topicstore_backends.files import (
    OWN_FILES,
    READER,
    check_there,
    make_directory,
    reader_directory,
    remove_abandoned,
    resource_error,
)
from topicstore_backends.options import whole_number
from topicstore_backends.write_ahead_logs import Cut, apply_cuts, check_logs, cuts, cuts_of, isolated, link_uncut

from .engine import Opened, RocksdbEngine, RocksdbReader
from .errors import Translated

__all__ = ["RocksdbBackend", "RocksdbOptions"]

# The most open table files of a shard. Each takes a file descriptor and memory outside the block cache; without a
# bound, both would grow with the stored data.
OPEN_FILES = 128
# The index has one entry per block: with 16 KB it is a quarter of the size that it has with RocksDB's
# default of 4 KB, and scans of small values are a tenth faster. A larger value gets a block of its own.
BLOCK_BYTES = 16 << 10
# The number of times that a reader tries to open a database while its files change.
MOMENTS = 20
# While less than this multiple of `RocksdbBackend.room` is free, automatic compactions are off until a reclaim.
SCARCE = 2
_THREADS = LibraryThreads("RocksDB", joined_at_exit=True)
"""The threads that flush and compact. They belong to the process (`rocksdict.Env`) and can't be started again."""
_NOT_READ = frozenset(("LOCK", "LOG", "rocksdict-config.json"))
"""The files that every opening writes."""

_COMPRESSION: dict[str, Callable[[], rocksdict.DBCompressionType]] = {
    "none": rocksdict.DBCompressionType.none,
    "lz4": rocksdict.DBCompressionType.lz4,
    "snappy": rocksdict.DBCompressionType.snappy,
    "zstd": rocksdict.DBCompressionType.zstd,
}


@attrs.frozen(kw_only=True)
class RocksdbOptions:
    """Tuning options of RocksDB. Each of them may change from one opening to the next."""

    compression: str = attrs.field(default="none", validator=attrs.validators.in_(tuple(_COMPRESSION)))
    """The compression of table blocks: ``none``, ``lz4``, ``snappy`` or ``zstd``. The log is never compressed.

    ``none`` suits layouts that compress their values themselves, as ``block`` does.
    """
    write_buffer_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes that a shard keeps in memory, over all its keyspaces, before it writes them out as table files.

    While they are written out, as many again may be taken in. The log grows to about this size.
    """
    cache_bytes: int = whole_number(32 << 20, least=0)
    """Bytes of table blocks, indexes included, kept in memory: one cache for all shards of a database."""


class RocksdbBackend(Backend):
    """A backend of RocksDB databases that share one block cache."""

    Options: ClassVar[type] = RocksdbOptions
    unneeded: ClassVar[Sequence[str]] = ("LOG*", "OPTIONS-*", "IDENTITY", "rocksdict-config.json", *OWN_FILES)

    def __init__(self, options: RocksdbOptions) -> None:
        super().__init__(options)
        _THREADS.check()
        self._cache = rocksdict.Cache(options.cache_bytes)

    @property
    def room(self) -> int:
        """The disk space, in bytes, of two logs, and of the tables that are flushed before these logs are removed."""
        return 2 * int(self.options.write_buffer_bytes) + (4 << 20)

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> RocksdbEngine:
        """Open the database in ``path``; with ``create`` create it if it doesn't exist.

        Raises `EngineError` when there is no database, when another engine has it open or when it holds other
        keyspaces; `CorruptionError` when it is damaged, and `LogDamagedError` when only the end of its logs is.
        """
        with Translated(path):
            if create:
                make_directory(path)
            else:
                check_there(path / "CURRENT", "RocksDB")
            remove_abandoned(path)
            check_logs(path, manifest_counts=False)
        _THREADS.begin()
        options = _database_options(self.options, self._cache)
        families = dict.fromkeys((keyspace.name for keyspace in keyspaces), options)
        with Translated(path, opening=True):
            scarce = shutil.disk_usage(path).free < SCARCE * self.room
            # Otherwise a compaction could start during the opening and fill the disk, and RocksDB could neither free
            # space nor close cleanly.
            options.set_disable_auto_compactions(scarce)
            try:
                with Translated(path, opening=True):
                    database = rocksdict.Rdict(str(path), options, families)
            except CorruptionError:
                check_logs(path, manifest_counts=False, refused=True)
                raise
        engine = RocksdbEngine(path, database, keyspaces, self._cache, scarce=scarce)
        with ExitStack() as failing:
            failing.callback(engine.close)
            engine.merge_small_tables()
            failing.pop_all()
        return engine

    def repair_log(self, path: Path, damaged: CorruptionError) -> None:
        """Truncate the logs at the first damage. See `Backend.repair_log`."""
        with Translated(path):
            apply_cuts(cuts_of(damaged, path, manifest_counts=False))

    def open_damaged(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], damaged: CorruptionError, *, salvage: bool
    ) -> RocksdbReader:
        """Open the database with its logs truncated at the damage or, with ``salvage``, as much as can be read.

        See `Backend.open_damaged`. With ``salvage``, writes that share a 32 KB block of the log with the damage
        are lost, too.
        """
        _THREADS.begin()
        options, families = self._reading(keyspaces)
        if salvage:
            options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.skip_any_corrupted_record())
        with Translated(path):
            check_there(path / "CURRENT", "RocksDB")
            changed = isolated(path) if salvage else cuts_of(damaged, path, manifest_counts=False)
            opened = _open_linked(path, options, families, changed)
        return RocksdbReader(path, opened, keyspaces, self._cache)

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, alone: bool) -> RocksdbReader:
        """Open the current state of the database in ``path``, without its lock, even while another process writes.

        Opening reads the log twice, at about 150 MB a second or 4 µs for each write. A database that was closed in
        order has an empty log.
        """
        _THREADS.begin()
        options, families = self._reading(keyspaces)
        with Translated(path):
            check_there(path / "CURRENT", "RocksDB")
            opened = _open_moment(path, options, families)
        return RocksdbReader(path, opened, keyspaces, self._cache)

    def _reading(self, keyspaces: Sequence[Keyspace[Any]]) -> tuple[rocksdict.Options, dict[str, rocksdict.Options]]:
        """Return the options of a database that is only read, and of its families. All are the same object."""
        options = _database_options(self.options, self._cache)
        options.create_if_missing(False)
        options.create_missing_column_families(False)
        return options, dict.fromkeys((keyspace.name for keyspace in keyspaces), options)


def _database_options(chosen: RocksdbOptions, cache: rocksdict.Cache) -> rocksdict.Options:
    """Return the options of the database and of every column family."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    # All families are written out together. Otherwise, if the newest log loses its end, a family that was flushed alone
    # has later writes than the others: a part of a batch is stored, and RocksDB refuses to open.
    # https://github.com/facebook/rocksdb/wiki/Atomic-flush
    options.set_atomic_flush(True)
    options.set_compression_type(_COMPRESSION[chosen.compression]())
    options.set_block_based_table_factory(_table_options(cache))
    # Memory: one limit counts the buffers of all families, and the number of open table files is bounded.
    options.set_write_buffer_size(chosen.write_buffer_bytes)
    options.set_db_write_buffer_size(chosen.write_buffer_bytes)
    # More than two buffers, so that a write need not hold the GIL while it waits for a memtable's flush. The longest
    # write of 40 KB took 5 to 30 ms instead of 40 to 100 ms.
    options.set_max_write_buffer_number(4)
    options.set_max_open_files(OPEN_FILES)
    # Small shards should take little space. By default, RocksDB writes an info log of 75 KB at every opening and keeps
    # a thousand of them, and reserves 4 MB for the manifest.
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
    # Outside the cache, indexes would take memory that grows with the stored data.
    # https://github.com/facebook/rocksdb/wiki/Memory-usage-in-RocksDB
    tables.set_cache_index_and_filter_blocks(True)
    return tables


def _open_moment(path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options]) -> Opened:
    """Open a database for reading while its files may change.

    The opening fails if a file is removed between listing and opening. But a log that was written out as a table and
    removed between reading the manifest and reading the logs would be missing silently. So the manifest and the list
    of files must be the same before and after. Then no log was added or removed, and only the newest may have grown:
    a torn end that `cuts` finds was left by a power failure, or is the beginning of an uncommitted write.
    """
    for _ in range(MOMENTS):
        before = _moment(path)
        try:
            with Translated(path):
                opened = _open_cut(path, options, families)
        except EngineError:
            if _moment(path) == before:
                raise
            continue
        database, made = opened
        unchanged = False
        try:
            unchanged = _moment(path) == before
        finally:
            if not unchanged:
                database.close()
                made.remove()
        if unchanged:
            return opened
    raise EngineError(f"{path}: its files changed each of the {MOMENTS} times that it was opened; try again")


def _open_cut(path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options]) -> Opened:
    """Open a database for reading, with its logs truncated where that is needed."""
    found = cuts(path, manifest_counts=False)
    try:
        return _open_linked(path, options, families, found)
    except CorruptionError:
        more = [] if found else cuts(path, manifest_counts=False, refused=True)
        if not more:
            raise
    return _open_linked(path, options, families, more)


def _moment(path: Path) -> dict[str, int]:
    """Return the names of all files, with the sizes of manifests only, because logs may grow at their ends."""
    sizes = {}
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            if entry.name not in _NOT_READ and not entry.name.startswith(READER):
                sizes[entry.name] = entry.stat().st_size if entry.name.startswith("MANIFEST") else 0
    return sizes


def _open_linked(
    path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options], found: Sequence[Cut]
) -> Opened:
    """Open a directory with links to a database's files, and with copies of those that must be cut.

    At every opening rocksdict writes ``rocksdict-config.json``, and RocksDB its info log: here they write them beside
    the links. The directory is made beside the tables, which get hard links: compactions of the writer remove tables.
    If that fails, as on a full disk or in another user's directory, the system's temporary directory is used. RocksDB
    then opens all tables at once and keeps them open.
    """
    options.set_max_open_files(OPEN_FILES)
    try:
        return _open_links(path, options, families, found, beside=path)
    except (OSError, StorageFullError) as failed:
        if isinstance(resource_error(path, failed, str(failed)), TooManyOpenFilesError):
            raise
    options.set_max_open_files(-1)
    return _open_links(path, options, families, found, beside=None)


def _open_links(
    path: Path,
    options: rocksdict.Options,
    families: dict[str, rocksdict.Options],
    found: Sequence[Cut],
    *,
    beside: Path | None,
) -> Opened:
    with reader_directory(beside) as made:
        link_uncut(path, str(made.path), found, without=_NOT_READ, lasting=".sst" if beside else None)
        with Translated(path, opened=made.path, opening=True):
            mode = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
            return rocksdict.Rdict(str(made.path), options, families, access_type=mode), made
