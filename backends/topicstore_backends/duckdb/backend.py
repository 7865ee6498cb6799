"""Options of DuckDB, and opening shards: files attached to the one DuckDB of a backend."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import duckdb
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import CorruptionError, UnsupportedError

from topicstore_backends.files import (
    OWN_FILES,
    ReaderDirectory,
    check_there,
    make_directory,
    reader_directory,
    remove_abandoned,
    set_aside,
)
from topicstore_backends.options import whole_number

from .engine import FILE, DuckdbEngine
from .errors import Translated, WalDamagedError
from .instance import Instance, check_path

__all__ = ["DuckdbBackend", "DuckdbOptions"]

_NOT_LINKED = frozenset((errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.EPERM, errno.EROFS, errno.EXDEV))
"""The errors of a hard link that can't be made: another user's file, another disk, a file system without links."""


@attrs.frozen(kw_only=True)
class DuckdbOptions:
    """Tuning options of DuckDB. Each of them may change from one opening to the next."""

    threads: int = whole_number(1, least=1)
    """Threads that one statement may use, for all shards of a database together.

    Reads and writes of different threads run in parallel anyway. More threads speed up statements of
    `Database.sql` over many messages.
    """
    memory_bytes: int = whole_number(1 << 30, least=64 << 20)
    """Bytes that DuckDB may use for all shards of a database; sorts that need more go to the disk.

    It must be at least about three times the size of a batch.
    """
    log_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes of a shard's log from which on a commit writes it into the file. Opening a database reads its log,
    at about 100 MB a second."""


class DuckdbBackend(Backend):
    """A backend of DuckDB files, all attached to one in-memory DuckDB."""

    Options: ClassVar[type] = DuckdbOptions
    unneeded: ClassVar[Sequence[str]] = OWN_FILES

    def __init__(self, options: DuckdbOptions) -> None:
        super().__init__(options)
        self._instance = Instance(
            threads=options.threads, memory_bytes=options.memory_bytes, log_bytes=options.log_bytes
        )

    def check_path(self, path: Path) -> None:
        """Raise `InvalidArgumentError` for a path that DuckDB would not open under its own name."""
        check_path(path)

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> DuckdbEngine:
        """Open the file in the directory ``path``; with ``create``, create the file if it doesn't exist.

        Raises `EngineError` when there is no file, when it is already open, here or in another process, or when it
        holds other keyspaces; `CorruptionError` when it is damaged, and `LogDamagedError` when only its log is.
        """
        file = path / FILE
        with Translated(path):
            if create:
                make_directory(path)
            else:
                check_there(file, "DuckDB")
            remove_abandoned(path)
        return self._attach(file, keyspaces, create=create)

    def repair_log(self, path: Path, damaged: CorruptionError) -> None:
        """Truncate the log at the first entry that can't be read. See `Backend.repair_log`."""
        file = path / FILE
        if isinstance(damaged, WalDamagedError):
            with Translated(file):
                set_aside(_log_of(file), damaged.end)

    def open_damaged(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], damaged: CorruptionError, *, salvage: bool
    ) -> DuckdbEngine:
        """Open the part of the database before the damage; nothing after it can be read. See `Backend.open_damaged`."""
        if isinstance(damaged, WalDamagedError):
            return self._attach_before(path / FILE, keyspaces, damaged.end)
        return self.open_reader(path, keyspaces, alone=True)

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, alone: bool) -> DuckdbEngine:
        """Open the file in the directory ``path`` and leave it and its log unchanged.

        Raises `UnsupportedError` unless ``alone``: while one process has the file open for writing, DuckDB lets no
        other process read it.
        """
        if not alone:
            raise UnsupportedError(
                "on DuckDB one process has a database at a time, also to read: close it there first, read a checkpoint "
                "that is taken there, or let `topicstore serve` have it, which other commands then ask"
            )
        with Translated(path):
            check_there(path / FILE, "DuckDB")
        try:
            return self._attach(path / FILE, keyspaces, read_only=True)
        except WalDamagedError as damaged:
            return self._attach_before(path / FILE, keyspaces, damaged.end)

    def _attach_before(self, file: Path, keyspaces: Sequence[Keyspace[Any]], end: int) -> DuckdbEngine:
        """Attach a copy or hard link of a file, with the readable part of its log beside it.

        DuckDB follows a symbolic link and would use the log beside its target. A hard link must be on the same disk.
        Where links aren't supported, the file is copied.
        """
        with reader_directory(file.parent) as made:
            with Translated(file):
                twin = made.path / FILE
                try:
                    twin.hardlink_to(file)
                except OSError as bad:
                    if bad.errno not in _NOT_LINKED:
                        raise
                    shutil.copyfile(file, twin)
                with _log_of(file).open("rb") as log:
                    _log_of(twin).write_bytes(log.read(end))
            return self._attach(file, keyspaces, made=made, read_only=True)

    def _attach(
        self,
        file: Path,
        keyspaces: Sequence[Keyspace[Any]],
        *,
        made: ReaderDirectory | None = None,
        create: bool = False,
        read_only: bool = False,
    ) -> DuckdbEngine:
        """Attach a file or, if ``made`` is given, the copy or link in that directory, which closing removes."""
        opened = file if made is None else made.path / FILE
        translated = Translated(file, opened=opened)
        with translated:
            # Raises if the process has no free file descriptor: DuckDB would end the process then.
            os.close(os.open(os.devnull, os.O_RDONLY))
            name = self._instance.attach(opened, read_only=read_only)
        try:
            return DuckdbEngine(self._instance, name, opened, keyspaces, translated, create=create, made=made)
        except BaseException:
            with suppress(duckdb.Error):
                self._instance.detach(name)
            raise


def _log_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.wal")
