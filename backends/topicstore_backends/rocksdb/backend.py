"""Options, and opening: to write, and to read beside whoever writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import attrs
import rocksdict
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import EngineError, LogDamagedError
from topicstore.contract.forking import LibraryThreads

from topicstore_backends.files import make_directory
from topicstore_backends.options import whole_number
from topicstore_backends.write_ahead_logs import Cut, apply_cuts, cuts, link_uncut

from .engine import RocksdbEngine, RocksdbReader
from .errors import Translated

__all__ = ["RocksdbBackend", "RocksdbOptions"]

# Open table files of a shard. Each costs a descriptor and some memory outside the block cache,
# so without a bound both would grow with what is stored.
OPEN_FILES = 128
# One index entry a block: with 16 KB the index is a quarter of what it is with RocksDB's 4 KB, and
# scans of small values are a tenth faster. Values larger than a block get a block of their own.
BLOCK_BYTES = 16 << 10
# How often a reader tries to open a database whose files come and go.
MOMENTS = 20
# Where less than so many times `RocksdbBackend.room` is free, nothing is compacted before space was reclaimed.
SCARCE = 2
_THREADS = LibraryThreads("RocksDB")
"""They flush and compact. `rocksdict.Env` knows none but the process's, and those can't be begun again."""
_NOT_READ = frozenset(("LOCK", "LOG", "rocksdict-config.json"))
"""Files that an opening writes."""

_COMPRESSION: dict[str, Callable[[], rocksdict.DBCompressionType]] = {
    "none": rocksdict.DBCompressionType.none,
    "lz4": rocksdict.DBCompressionType.lz4,
    "snappy": rocksdict.DBCompressionType.snappy,
    "zstd": rocksdict.DBCompressionType.zstd,
}


@attrs.frozen(kw_only=True)
class RocksdbOptions:
    """How RocksDB is tuned. All of it may differ from one opening to the next."""

    compression: str = attrs.field(default="none", validator=attrs.validators.in_(tuple(_COMPRESSION)))
    """Of table blocks: ``none``, ``lz4``, ``snappy`` or ``zstd``; the log is never compressed.

    ``none`` suits layouts that compress their values themselves, as ``block`` does.
    """
    write_buffer_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes a shard keeps in memory, over all its keyspaces, before it writes them out as table files.

    While they are written out as many again may come in. The log grows to about this size.
    """
    cache_bytes: int = whole_number(32 << 20, least=0)
    """Bytes of table blocks, indexes included, kept in memory: one cache for all shards of a database."""


class RocksdbBackend(Backend):
    """Opens RocksDB databases that share one block cache."""

    Options: ClassVar[type] = RocksdbOptions

    def __init__(self, options: RocksdbOptions) -> None:
        super().__init__(options)
        _THREADS.check()
        self._cache = rocksdict.Cache(options.cache_bytes)

    @property
    def room(self) -> int:
        """Two logs: they are written out before they are removed. And what is written beside them."""
        return 2 * int(self.options.write_buffer_bytes) + (4 << 20)

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> RocksdbEngine:
        """Open the database in ``path``; with ``create`` make it unless it is there already.

        Raises `EngineError` when there is none, when another engine has it open or when it holds
        other keyspaces, and `CorruptionError` when it is damaged, `LogDamagedError` if only the end of its logs is.
        """
        if create:
            with Translated(path):
                make_directory(path)
        elif not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no RocksDB database")
        with Translated(path):
            found = _cuts(path)
        if found:
            named = ", ".join(cut.file.name for cut in found)
            raise LogDamagedError(f"its end can't be read, or isn't there: {named}", str(path))
        _THREADS.begin()
        options = _database_options(self.options, self._cache)
        families = dict.fromkeys((keyspace.name for keyspace in keyspaces), options)
        with Translated(path, opening=True), ExitStack() as failing:
            scarce = shutil.disk_usage(path).free < SCARCE * self.room
            # Otherwise a compaction could start at once and fill the disk, after which RocksDB neither frees space
            # nor closes cleanly.
            options.set_disable_auto_compactions(scarce)
            database = rocksdict.Rdict(str(path), options, families)
            failing.callback(database.close)
            engine = RocksdbEngine(path, database, keyspaces, self._cache, scarce=scarce)
            failing.pop_all()
        return engine

    def repair_log(self, path: Path, *, salvage: bool) -> None:
        """Cut the logs, or write what can be read of them into tables. See `Backend.repair_log`.

        With ``salvage`` writes go that share the damaged one's 32 KB of the log.
        """
        if not salvage:
            apply_cuts(_cuts(path, within=True))
            return
        _THREADS.begin()
        options = _database_options(self.options, self._cache)
        options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.skip_any_corrupted_record())
        with Translated(path, opening=True):
            families = dict.fromkeys(rocksdict.Rdict.list_cf(str(path)), options)
            rocksdict.Rdict(str(path), options, families).close()

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> RocksdbReader:
        """Open the database in ``path`` as it is now, whoever writes it, without its lock.

        Costs reading the log, at about 150 MB a second; the log of a database that was closed is empty.
        """
        if not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no RocksDB database")
        _THREADS.begin()
        options = _database_options(self.options, self._cache)
        options.create_if_missing(False)
        options.create_missing_column_families(False)
        options.set_max_open_files(-1)  # all at once, because compactions remove files that are not open
        families = dict.fromkeys((keyspace.name for keyspace in keyspaces), options)
        if alone:
            with Translated(path, opening=True):
                database = _open_linked(path, options, families, _cuts(path))
        else:
            database = _open_moment(path, options, families)
        return RocksdbReader(path, database, keyspaces, self._cache)


def _database_options(chosen: RocksdbOptions, cache: rocksdict.Cache) -> rocksdict.Options:
    """Return the options of the database, which are also those of every column family."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
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


def _open_moment(path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options]) -> rocksdict.Rdict:
    """Open a database to read in which files may come and go meanwhile.

    Files that are removed between listing and opening make the opening fail. A log that was written out as
    a table and removed between reading the manifest and reading the logs would be missing without a
    word: so what the manifest and the list of files say must be the same before and after.
    """
    for left in reversed(range(MOMENTS)):
        before = _moment(path)
        try:
            with Translated(path, opening=True):
                database = _open_linked(path, options, families, [])
        except EngineError:
            if _moment(path) == before or not left:
                raise
            continue
        if _moment(path) == before:
            return database
        database.close()
    raise EngineError(f"{path}: its files changed each of the {MOMENTS} times that it was opened; try again")


def _cuts(path: Path, *, within: bool = False) -> list[Cut]:
    there = (path / "CURRENT").exists()
    return cuts(path, manifest_counts=False, within=within) if there else []


def _moment(path: Path) -> dict[str, int]:
    """Return the names of all files, and the size of the manifests; logs grow at their ends only."""
    sizes = {}
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            if entry.name not in _NOT_READ:
                sizes[entry.name] = entry.stat().st_size if entry.name.startswith("MANIFEST") else 0
    return sizes


def _open_linked(
    path: Path, options: rocksdict.Options, families: dict[str, rocksdict.Options], found: list[Cut]
) -> rocksdict.Rdict:
    """Open a directory of links to a database's files, and of what is kept of those that are to be cut.

    rocksdict writes ``rocksdict-config.json`` at every opening, and RocksDB a log of its own: here they do it
    beside the links. RocksDB keeps the files open, so the links may go.
    """
    with tempfile.TemporaryDirectory(prefix="topicstore-reader-") as links:
        link_uncut(path, links, found, without=_NOT_READ)
        mode = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
        return rocksdict.Rdict(links, options, families, access_type=mode)
