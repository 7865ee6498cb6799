"""The one DuckDB to which the files of a backend's shards are attached, and connections to it.

DuckDB's connections are not thread safe: each reader has one of its own (`View`), and so has the
writer of each shard.
"""

# ruff: noqa: ARG001 - DuckDB finds arguments by their names

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Instance", "View", "fetch", "quoted", "run"]

# Row groups are what is rewritten, and passed over, as a whole. Small ones cost scans nothing measurable.
ROW_GROUP = 8_192
# Written out, so that a later DuckDB goes on writing files that an earlier one can read.
STORAGE_VERSION = "v2.0.0"
STATEMENTS = 100
"""Parsed statements that are kept."""


def quoted(name: str) -> str:
    """Return a name as SQL spells it."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def run(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Sequence[Any] = (), rows: pa.Table | None = None
) -> None:
    """Run a statement to its end. It may read ``rows``: DuckDB looks for tables among its caller's variables, too."""
    connection.execute(statement, list(parameters)).complete()


def fetch(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Sequence[Any] = (), rows: pa.Table | None = None
) -> list[tuple[Any, ...]]:
    """Return all that a query gives. It may read ``rows``, as with `run`."""
    found: list[tuple[Any, ...]] = connection.execute(statement, list(parameters)).fetchall()
    return found


def _reading(connection: duckdb.DuckDBPyConnection, statement: str) -> duckdb.Statement:
    """Parse a statement. Raises `InvalidArgumentError` if it isn't one, or is one that doesn't read."""
    statements = connection.extract_statements(statement)
    if len(statements) != 1:
        raise InvalidArgumentError(f"one statement at a time is run, not {len(statements)}")
    if (kind := statements[0].type.name) not in ("SELECT", "EXPLAIN"):
        raise InvalidArgumentError(f"only statements that read are run, such as SELECT, not {kind}")
    return statements[0]


class Instance:
    """A DuckDB in memory; there while a file is attached to it."""

    def __init__(self, *, threads: int, memory_bytes: int, log_bytes: int) -> None:
        self._config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads,
            "memory_limit": f"{memory_bytes >> 10}KiB",
            "wal_autocheckpoint": f"{log_bytes >> 10}KiB",
            # Else a transaction would see what is committed before its first statement.
            "immediate_transaction_mode": True,
            # Nothing is to be fetched from the network because a statement mentions it.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._root: duckdb.DuckDBPyConnection | None = None
        self._attached: set[str] = set()
        self._numbers = 0
        self._parsed: dict[str, duckdb.Statement] = {}
        self._lock = Lock()

    def attach(self, file: Path, *, read_only: bool = False) -> str:
        """Attach a file, made if it isn't there, and return the name by which statements know it.

        With ``read_only`` it must be there; what DuckDB spills goes to the system's temporary directory then.
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
            self._attached.add(name)
            return name

    def attach_again(self, file: Path, name: str) -> None:
        """Detach a file and attach it under the same name: it is read anew, the log first."""
        with self._lock:
            run(self._open(), f"DETACH {name}")
            self._attach(file, name)

    def detach(self, name: str) -> None:
        """Write a file's log into it, and let go of it. What fails is raised after it was let go of."""
        with self._lock:
            self._attached.discard(name)
            try:
                run(self._open(), f"DETACH {name}")
            finally:
                self._close_unused()

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection."""
        return self._open().cursor()

    def parsed(self, connection: duckdb.DuckDBPyConnection, statement: str) -> duckdb.Statement:
        """Return a statement that may be run: one that can't change anything; that it doesn't, its transaction sees to.

        The same ones come again and again, so the last of them are kept.
        """
        found = self._parsed.get(statement)
        if found is None:
            found = self._parsed[statement] = _reading(connection, statement)
            if len(self._parsed) > STATEMENTS:
                self._parsed.pop(next(iter(self._parsed)), None)
        return found

    def root(self) -> duckdb.DuckDBPyConnection | None:
        """Return what keeps the files open."""
        return self._root

    def _open(self) -> duckdb.DuckDBPyConnection:
        root = self._root
        if root is None:
            raise DatabaseClosedError("the engine is closed")
        return root

    def _attach(self, file: Path, name: str, *, read_only: bool = False) -> None:
        options = "READ_ONLY" if read_only else f"STORAGE_VERSION '{STORAGE_VERSION}', ROW_GROUP_SIZE {ROW_GROUP}"
        run(self._open(), f"ATTACH {_text(str(file))} AS {name} ({options})")

    def _close_unused(self) -> None:
        if not self._attached and self._root is not None:
            self._root.close()
            self._root = None


class View:
    """What is there now, whatever is written later: a connection in a transaction that only reads.

    One thread at a time uses it; who closes it waits for that one.
    """

    __slots__ = ("__weakref__", "_connection", "_error", "_lock")

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._lock = Lock()
        self._error: Exception | None = None
        self._connection = connection
        try:
            run(connection, "BEGIN TRANSACTION READ ONLY")
        except BaseException:
            connection.close()
            raise

    @contextlib.contextmanager
    def use(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give the connection to one thread."""
        with self._lock:
            if self._error is not None:
                raise self._error
            yield self._connection

    def close(self, error: Exception | None = None) -> None:
        """End the transaction. Later uses raise ``error``. May be called twice."""
        if self._error is not None:
            return
        self._error = error or DatabaseClosedError("the snapshot is closed")
        self._connection.interrupt()
        with self._lock:
            self._connection.close()

    def connection(self) -> duckdb.DuckDBPyConnection:
        """Return the connection, to keep it from being closed."""
        return self._connection
