"""Options, and opening: files attached to the one DuckDB of a backend."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import attrs
import duckdb
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import EngineError, UnsupportedError

from topicstore_backends.files import make_directory
from topicstore_backends.options import whole_number

from .engine import FILE, DuckdbEngine
from .errors import Translated, WalDamagedError
from .instance import Instance

__all__ = ["DuckdbBackend", "DuckdbOptions"]

_READER = "reader-"
"""What the names of directories begin with in which a damaged database is looked at."""


@attrs.frozen(kw_only=True)
class DuckdbOptions:
    """How DuckDB is tuned. All of it may differ from one opening to the next."""

    threads: int = whole_number(1, least=1)
    """Threads that one statement may use, for all shards of a database together.

    Reads and writes of different threads run beside each other anyway. More help statements of
    `Database.sql` over many messages.
    """
    memory_bytes: int = whole_number(1 << 30, least=64 << 20)
    """Bytes that DuckDB may use for all shards of a database; sorts that need more go to the disk.

    A batch must fit in it about three times.
    """
    log_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes of a shard's log at which a commit writes it into the file. Opening reads the log, at about
    100 MB a second."""


class DuckdbBackend(Backend):
    """Opens files of DuckDB, attached to one DuckDB in memory."""

    Options: ClassVar[type] = DuckdbOptions

    def __init__(self, options: DuckdbOptions) -> None:
        super().__init__(options)
        self._instance = Instance(
            threads=options.threads, memory_bytes=options.memory_bytes, log_bytes=options.log_bytes
        )

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> DuckdbEngine:
        """Open the file in the directory ``path``; with ``create`` make it unless it is there already.

        Raises `EngineError` when there is none, when it is open already, here or in another process,
        or when it holds other keyspaces, and `CorruptionError` when it is damaged, `LogDamagedError` if its log is.
        """
        file = path / FILE
        if create:
            with Translated(path):
                make_directory(path)
        elif not file.exists():
            raise EngineError(f"{path}: there is no DuckDB database")
        for left in path.glob(f"{_READER}*"):  # by who was killed
            shutil.rmtree(left)
        return self._attach(file, keyspaces, create=create)

    def repair_log(self, path: Path, *, salvage: bool) -> None:
        """Cut the log where it can't be read; behind that nothing can be salvaged. See `Backend.repair_log`."""
        file = path / FILE
        try:
            with Translated(file):
                self._instance.detach(self._instance.attach(file, read_only=True))
        except WalDamagedError as damaged:
            with Translated(file), _log_of(file).open("r+b") as log:
                log.truncate(damaged.end)
                os.fsync(log.fileno())

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> DuckdbEngine:
        """Open the file in the directory ``path`` and leave it, and its log, as they are.

        Raises `UnsupportedError` unless ``alone``: beside a writer DuckDB lets nobody read.
        """
        if not alone:
            raise UnsupportedError("DuckDB opens no file that another process may write")
        if not (path / FILE).exists():
            raise EngineError(f"{path}: there is no DuckDB database")
        try:
            return self._attach(path / FILE, keyspaces, read_only=True)
        except WalDamagedError as damaged:
            return self._attach_before(path / FILE, keyspaces, damaged.end)

    def _attach_before(self, file: Path, keyspaces: Sequence[Keyspace], end: int) -> DuckdbEngine:
        """Attach a link to a file, beside as much of its log as can be read.

        A hard link, because DuckDB follows others and finds the log there; so it is made on the same disk.
        """
        links = tempfile.TemporaryDirectory(prefix=_READER, dir=file.parent)
        try:
            link = Path(links.name, FILE)
            link.hardlink_to(file)
            with _log_of(file).open("rb") as log:
                _log_of(link).write_bytes(log.read(end))
            engine = self._attach(link, keyspaces, read_only=True)
        except BaseException:
            links.cleanup()
            raise
        weakref.finalize(engine, links.cleanup)
        return engine

    def _attach(
        self, file: Path, keyspaces: Sequence[Keyspace], *, create: bool = False, read_only: bool = False
    ) -> DuckdbEngine:
        with Translated(file):
            os.close(os.open(os.devnull, os.O_RDONLY))  # DuckDB ends the process where no more files can be opened
            name = self._instance.attach(file, read_only=read_only)
        try:
            return DuckdbEngine(self._instance, name, file, keyspaces, create=create)
        except BaseException:
            with suppress(duckdb.Error):
                self._instance.detach(name)
            raise


def _log_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.wal")
