"""Options, and opening: files attached to the one DuckDB of a backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import attrs
import duckdb
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import EngineError, UnsupportedError

from topicstore_backends.files import make_directory, sync
from topicstore_backends.options import whole_number

from .engine import FILE, DuckdbEngine
from .errors import Translated
from .instance import Instance

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DuckdbBackend", "DuckdbOptions"]


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
        or when it holds other keyspaces, and `CorruptionError` when it or its log is damaged.
        """
        file = path / FILE
        if create:
            with Translated(path):
                make_directory(path)
                sync(path)
        elif not file.exists():
            raise EngineError(f"{path}: there is no DuckDB database")
        return self._attach(file, keyspaces, create=create)

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> DuckdbEngine:
        """Open the file in the directory ``path`` and leave it, and its log, as they are.

        Raises `UnsupportedError` unless ``alone``: beside a writer DuckDB lets nobody read.
        """
        if not alone:
            raise UnsupportedError("DuckDB opens no file that another process may write")
        if not (path / FILE).exists():
            raise EngineError(f"{path}: there is no DuckDB database")
        return self._attach(path / FILE, keyspaces, read_only=True)

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
