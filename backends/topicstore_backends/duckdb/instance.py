"""The in-memory DuckDB to which a backend attaches the files of its shards, and its connections.

DuckDB's connections are not thread safe: each reader has its own (`View`), and so has the writer of
each shard (https://duckdb.org/docs/current/connect/concurrency).
"""

# ruff: noqa: ARG001 - DuckDB looks arguments up by their names

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import duckdb
import pyarrow as pa
from topicstore.contract.arguments import check_reading
from topicstore.contract.errors import DatabaseClosedError, EngineError, InvalidArgumentError
from topicstore.contract.forking import ProcessLock, remember

from topicstore_backends.files import sync

from .errors import Translated

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Instance", "View", "check_path", "fetch", "quoted", "run"]

# DuckDB rewrites and skips whole row groups. Small row groups don't slow scans measurably.
# https://duckdb.org/docs/2.0/sql/statements/attach
ROW_GROUP = 8_192
# Fixed, so that a later DuckDB still writes files that this version can read.
STORAGE_VERSION = "v2.0.0"
STATEMENTS = 100
"""The number of parsed statements that are cached."""


def quoted(name: str) -> str:
    """Return a name quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def run(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Sequence[Any] = (), rows: pa.Table | None = None
) -> None:
    """Run a statement to its end. The statement may name ``rows``: DuckDB finds this local variable as a table."""
    connection.execute(statement, list(parameters)).complete()


def fetch(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Sequence[Any] = (), rows: pa.Table | None = None
) -> list[tuple[Any, ...]]:
    """Return all rows of a query's result. The query may name ``rows``, as in `run`."""
    found: list[tuple[Any, ...]] = connection.execute(statement, list(parameters)).fetchall()
    return found


def check_path(path: Path) -> None:
    """Raise `InvalidArgumentError` for a path that DuckDB would not open under its own name.

    DuckDB inserts the suffix of the log's name before a ``?``, as in a URL, and treats a backslash as a slash.
    """
    if set("?\\").intersection(str(path)):
        raise InvalidArgumentError(f"{path}: the path of a database on DuckDB has no ? and no backslash")


def _reading(connection: duckdb.DuckDBPyConnection, statement: str) -> duckdb.Statement:
    """Parse a statement. Raises `InvalidArgumentError` unless it is a single statement that only reads."""
    statements = connection.extract_statements(statement)
    check_reading([one.type.name for one in statements])
    return statements[0]


def _close(connection: duckdb.DuckDBPyConnection) -> None:
    """Close a connection with its cursors; while another thread is in a call of one of them, try again for a second.

    DuckDB closes a connection's cursors with it, and refuses while one of them is in use: a thread may have got a
    cursor just before, and not know yet that the database is closed. Raises `duckdb.ResourceInUseException` if it
    still refuses then.
    """
    for _ in range(1_000):
        try:
            return connection.close()
        except duckdb.ResourceInUseException:
            time.sleep(0.001)
    return connection.close()


class Instance:
    """A DuckDB in memory, which exists while a file is attached to it."""

    def __init__(self, *, threads: int, memory_bytes: int, log_bytes: int) -> None:
        self._settings = {"threads": threads, "memory_bytes": memory_bytes, "log_bytes": log_bytes}
        self._config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads,
            "memory_limit": f"{memory_bytes >> 10}KiB",
            "wal_autocheckpoint": f"{log_bytes >> 10}KiB",
            # Without this a transaction would begin only with its first statement, and see later commits.
            "immediate_transaction_mode": True,
            # A statement that mentions an extension must not load it from the network.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._root: duckdb.DuckDBPyConnection | None = None
        self._attached: dict[str, Path | None] = {}
        """The attached files by name, None for one that is only read. Guarded by `_lock`."""
        self._detached: set[str] = set()
        """The names of files that could not be attached again. Guarded by `_lock`."""
        self._left: list[Path] = []
        """Files that were written and detached since DuckDB was started. Guarded by `_lock`."""
        # Weak, so that garbage collection of an unfinished scan ends its transaction.
        self._views: WeakSet[View] = WeakSet()
        """Guarded by `_viewing`."""
        self._viewing = ProcessLock()
        self._connecting = ProcessLock()
        """Held while `_root` is used, which refuses a second thread. No statement runs on that connection."""
        self._numbers = 0
        self._parsed: dict[str, duckdb.Statement] = {}
        self._lock = ProcessLock()

    def attach(self, file: Path, *, read_only: bool = False) -> str:
        """Attach a file, created if it doesn't exist, and return its name in statements.

        With ``read_only`` the file must exist, and DuckDB spills to the system's temporary directory.
        """
        with self._lock:
            if self._root is None:
                spill = tempfile.gettempdir() if read_only else file.with_suffix(".spill")
                self._config["temp_directory"] = str(spill)
                self._root = duckdb.connect(":memory:", config=self._config)
            self._numbers += 1
            name = f"shard_{self._numbers}"
            try:
                self._attach(file, name, read_only=read_only)
            except BaseException:
                self._close_unused()
                raise
            self._attached[name] = None if read_only else file
            return name

    def another(self) -> Instance:
        """Return another instance with the same settings and no files attached."""
        return Instance(**self._settings)

    def attach_again(self, file: Path, name: str, why: str) -> None:
        """Detach a file and attach it under the same name, so that DuckDB reads the file and its log again.

        DuckDB releases a file when the last transaction ends that began while it was attached, and each transaction
        holds all files. So all views are ended, with `EngineError` and the reason ``why``. Raises
        `duckdb.ResourceInUseException` while a transaction that writes to another file is open; a later call then
        attaches the file.
        """
        self.end_views(EngineError(why))
        with self._lock:
            if name not in self._detached:
                self._run(f"DETACH {name}")
                self._detached.add(name)
            self._attach(file, name)
            self._detached.discard(name)

    def detach(self, name: str) -> None:
        """Detach a file. Its log is written into it when the last transaction ends that began while it was attached.

        Once no file is attached, all logs are written and on disk. Errors are raised after the file was detached.
        """
        with self._lock:
            file = self._attached.pop(name, None)
            if file is not None:
                self._left.append(file)
            try:
                if name in self._detached:
                    self._detached.discard(name)
                else:
                    self._run(f"DETACH {name}")
            finally:
                self._close_unused()

    def open_view(self, name: str, translated: Translated) -> View:
        """Return a new view, a snapshot for reading, of the shard ``name``."""
        view = View(self.connect(), name, translated)
        with self._viewing:
            self._views.add(view)
        return view

    def end_views(self, error: Exception, name: str | None = None) -> None:
        """Close all views, or those of the shard ``name``. Later uses of them raise ``error``."""
        with self._viewing:
            views = [view for view in self._views if name in (None, view.name)]
        with contextlib.ExitStack() as ending:
            for view in views:
                ending.callback(view.close, error)

    def connections(self) -> list[duckdb.DuckDBPyConnection]:
        """Return the connections that keep the files open. Takes no lock, because a forked child may find it held."""
        root = [] if self._root is None else [self._root]
        return root + [view.connection() for view in list(self._views)]

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection."""
        with self._connecting:
            root = self._root
            if root is None:
                raise DatabaseClosedError("the engine is closed")
            return root.cursor()

    def parsed(self, connection: duckdb.DuckDBPyConnection, statement: str) -> duckdb.Statement:
        """Return a parsed statement that only reads; its read-only transaction enforces that.

        Statements are often repeated, so the last ones are cached.
        """
        found = self._parsed.get(statement)
        if found is None:
            found = self._parsed[statement] = _reading(connection, statement)
            if len(self._parsed) > STATEMENTS:
                self._parsed.pop(next(iter(self._parsed)), None)
        return found

    def _attach(self, file: Path, name: str, *, read_only: bool = False) -> None:
        options = "READ_ONLY" if read_only else f"STORAGE_VERSION '{STORAGE_VERSION}', ROW_GROUP_SIZE {ROW_GROUP}"
        self._run(f"ATTACH {_text(str(file))} AS {name} ({options})")

    def _run(self, statement: str) -> None:
        with contextlib.closing(self.connect()) as connection:
            run(connection, statement)

    def _close_unused(self) -> None:
        if not self._attached and self._root is not None:
            with self._connecting:
                root, self._root = self._root, None
                _close(root)
            left, self._left = self._left, []
            for file in left:
                # Detaching truncates the file without an fsync. Another process may have removed the file since.
                with contextlib.suppress(FileNotFoundError):
                    sync(file)


class View:
    """A snapshot that later writes don't affect: a connection in a read-only transaction.

    One thread at a time uses it, ``with view.lock, view as connection: …``; `close` waits for that thread.
    """

    __slots__ = ("__weakref__", "_closed", "_connection", "_ending", "_error", "_translated", "lock", "name")

    def __init__(self, connection: duckdb.DuckDBPyConnection, name: str, translated: Translated) -> None:
        self.name = name
        self.lock = ProcessLock()
        self._ending = ProcessLock()
        """Held while the connection is interrupted or closed: DuckDB refuses to do both at the same time."""
        self._error: Exception | None = None
        self._closed = False
        self._connection = connection
        self._translated = translated
        try:
            run(connection, "BEGIN TRANSACTION READ ONLY")
        except BaseException:
            connection.close()
            raise
        remember(self)

    def leave_to_parent(self) -> None:
        """Leave the connection open in a forked child, because the parent continues to use it."""
        self._closed = True

    def __enter__(self) -> duckdb.DuckDBPyConnection:
        """Return the connection to this thread, which holds `lock`, and translate its errors."""
        if self._error is not None:
            raise self._error
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._translated.__exit__(kind, error, trace)

    def close(self, error: Exception | None = None) -> None:
        """End the transaction. Later uses raise ``error``. Idempotent."""
        if self._closed:
            return
        self._error = self._error or error or DatabaseClosedError("the snapshot is closed")
        with self._translated, contextlib.ExitStack() as closing:
            closing.callback(self._close)
            with self._ending:
                if not self._closed:  # otherwise another thread closed it at the same time
                    self._connection.interrupt()

    def _close(self) -> None:
        with self.lock, self._ending:
            self._connection.close()
            self._closed = True

    def connection(self) -> duckdb.DuckDBPyConnection:
        """Return the connection; a reference keeps the connection open."""
        return self._connection
