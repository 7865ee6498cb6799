"""Options of LevelDB, and opening databases: creating them, and checking their format and keyspaces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import attrs
import plyvel
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import CorruptionError, EngineError, UnsupportedError
from topicstore.contract.forking import LibraryThreads

from topicstore_backends.files import (
    OWN_FILES,
    ReaderDirectory,
    check_there,
    make_directory,
    reader_directory,
    remove_abandoned,
)
from topicstore_backends.options import whole_number
from topicstore_backends.write_ahead_logs import (
    Cut,
    apply_cuts,
    check_logs,
    cuts,
    cuts_of,
    least_sequence,
    link_uncut,
)

from .engine import LeveldbEngine
from .errors import Translated
from .instance import Instance
from .keeping import drop_kept, keep_files, restore_unread
from .keys import FORMAT, FORMAT_NAME, LAST

__all__ = ["LeveldbBackend", "LeveldbOptions"]

_THREADS = LibraryThreads("LevelDB")
"""LevelDB's only thread, which LevelDB starts for the first compaction in the process."""
_COMPRESSION = {"none": None, "snappy": "snappy"}


@attrs.frozen(kw_only=True)
class LeveldbOptions:
    """Tuning options of LevelDB. Each of them may change from one opening to the next."""

    write_buffer_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes that a shard keeps in memory before it writes them out as a table file.

    While they are written out, as many again may be taken in. Logs grow to about this size, and are read
    when the shard is opened.
    """
    cache_bytes: int = whole_number(8 << 20, least=0)
    """Bytes of table blocks kept in memory, for each shard. Indexes of open tables take additional memory."""
    block_bytes: int = whole_number(16 << 10, least=1 << 10)
    """Bytes of a table block before compression. A value that is larger gets a block of its own."""
    file_bytes: int = whole_number(16 << 20, least=1 << 20)
    """Bytes of a table file that compaction writes; LevelDB takes 1 GB at most."""
    compression: str = attrs.field(default="none", validator=attrs.validators.in_(tuple(_COMPRESSION)))
    """The compression of table blocks: ``none`` or ``snappy``. The log is never compressed.

    ``none`` suits layouts that compress their values themselves, as ``block`` does.
    """
    max_open_files: int = whole_number(256, least=74)
    """The number of table files that a shard keeps open. Each takes a descriptor and the memory of its index."""


class LeveldbBackend(Backend):
    """A backend of LevelDB databases."""

    Options: ClassVar[type] = LeveldbOptions
    unneeded: ClassVar[Sequence[str]] = ("LOG", "LOG.old", *OWN_FILES)

    def __init__(self, options: LeveldbOptions) -> None:
        super().__init__(options)
        _THREADS.check()

    @property
    def room(self) -> int:
        """The disk space, in bytes, of two logs and the tables flushed from them, and of two compactions.

        When a shard is opened, LevelDB may compact its first level, of some tables as large as the buffer, into the
        second, of 10 MB. Then it compacts a part of the second, while a replay may keep the files that the first
        compaction has replaced.
        """
        return 4 * int(self.options.write_buffer_bytes) + (32 << 20)

    @property
    def room_at_once(self) -> int:
        """Equal to `room`: compactions can't be delayed, and LevelDB refuses writes after a failed compaction."""
        return self.room

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> LeveldbEngine:
        """Open the database in ``path``; with ``create`` create it if it doesn't exist.

        Raises `EngineError` when there is no database, when another engine has it open or when it has another format or
        other keyspaces; `CorruptionError` when it is damaged, and `LogDamagedError` when only the end of its logs is.
        """
        with Translated(path):
            if create:
                make_directory(path)
            else:
                check_there(path / "CURRENT", "LevelDB")
            remove_abandoned(path)
            restore_unread(path)  # if a process died while it opened the database, this finishes or undoes that opening
            check_logs(path, manifest_counts=True)
            if (path / "CURRENT").exists():
                keep_files(path)
        try:
            engine = self._open(path, keyspaces)
        except BaseException as failed:
            with Translated(path):
                restore_unread(path)
                if isinstance(failed, CorruptionError):
                    check_logs(path, manifest_counts=True, refused=True)
            raise
        with ExitStack() as failing:
            failing.callback(engine.close)
            with Translated(path):
                drop_kept(path)
            failing.pop_all()
        return engine

    def repair_log(self, path: Path, damaged: CorruptionError) -> None:
        """Truncate the logs at the first damage. See `Backend.repair_log`."""
        with Translated(path):
            apply_cuts(cuts_of(damaged, path, manifest_counts=True))

    def open_damaged(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], damaged: CorruptionError, *, salvage: bool
    ) -> LeveldbEngine:
        """Open the database with its logs truncated at the damage or, with ``salvage``, as much as can be read.

        See `Backend.open_damaged`. With ``salvage``, writes that share a 32 KB block of the log with the damage
        are lost, too.
        """
        with Translated(path):
            found = [] if salvage else cuts_of(damaged, path, manifest_counts=True)
        return self._open_linked(path, keyspaces, found, paranoid=not salvage)

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, alone: bool) -> LeveldbEngine:
        """Open the database in ``path`` and leave its files unchanged. Raises `UnsupportedError` unless ``alone``."""
        if not alone:
            raise UnsupportedError(
                "on LevelDB one process has a database at a time, also to read: close it there first, or let "
                "`topicstore serve` have it, which other commands then ask"
            )
        with Translated(path):
            found = cuts(path, manifest_counts=True)
        try:
            return self._open_linked(path, keyspaces, found)
        except CorruptionError:
            with Translated(path):
                more = [] if found else cuts(path, manifest_counts=True, refused=True)
            if not more:
                raise
        return self._open_linked(path, keyspaces, more)

    def _open(
        self,
        path: Path,
        keyspaces: Sequence[Keyspace[Any]],
        *,
        made: ReaderDirectory | None = None,
        paranoid: bool = True,
    ) -> LeveldbEngine:
        """Open the database in ``path`` or, if ``made`` is given, its copy in that directory, which closing removes."""
        _THREADS.begin()
        opened = path if made is None else made.path
        with Translated(path, opened=opened, opening=True):
            instance = Instance(opened, Translated(path, opened=opened))
            try:
                before = least_sequence(opened) if paranoid else 0
                instance.database = _open_database(opened, self.options, paranoid=paranoid)
                if paranoid and least_sequence(opened) < before:
                    raise EngineError(f"{path}: LevelDB has not read all of its logs; open the database again")
                if paranoid:  # after salvage, the record of the format may be missing
                    _check_format(path, instance.database, keyspaces)
                return LeveldbEngine(opened, instance, keyspaces, made)
            except BaseException:
                instance.close()
                raise

    def _open_linked(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], found: Sequence[Cut], *, paranoid: bool = True
    ) -> LeveldbEngine:
        """Open a directory with links to a database's files, and with copies of those that must be cut.

        LevelDB writes a new manifest and log whenever it opens a database, and deletes old files. Here it does so in
        that directory, which is removed when the engine is closed.
        """
        with Translated(path), reader_directory(path) as made:
            check_there(path / "CURRENT", "LevelDB")  # LevelDB would create a missing database
            link_uncut(path, str(made.path), found, without=("LOCK", "LOG", "LOG.old"))
            return self._open(path, keyspaces, made=made, paranoid=paranoid)


def _open_database(path: Path, options: LeveldbOptions, *, paranoid: bool) -> Any:
    return plyvel.DB(
        os.fsencode(path),
        create_if_missing=True,
        paranoid_checks=paranoid,
        write_buffer_size=options.write_buffer_bytes,
        lru_cache_size=options.cache_bytes,
        block_size=options.block_bytes,
        max_file_size=options.file_bytes,
        compression=_COMPRESSION[options.compression],
        max_open_files=options.max_open_files,
    )


def _check_format(path: Path, database: Any, keyspaces: Sequence[Keyspace[Any]]) -> None:
    """Raise `EngineError` for a database of another format or keyspaces; write the format into a new database."""
    lines = [" ".join([keyspace.name, *map(str, keyspace.shape or ())]) for keyspace in keyspaces]
    expected = "\n".join([FORMAT_NAME, *lines]).encode()
    found = database.get(FORMAT, verify_checksums=True)
    if found is None and next(database.iterator(include_value=False), None) is None:
        with database.write_batch(transaction=True, sync=True) as changes:
            changes.put(FORMAT, expected)
            changes.put(LAST, b"")
    elif found is None:
        raise EngineError(f"{path}: the LevelDB database is not one of topicstore's")
    elif found != expected:
        there = ", ".join(found.decode(errors="replace").split("\n"))
        raise EngineError(f"{path}: the LevelDB database holds {there}; expected {', '.join([FORMAT_NAME, *lines])}")
