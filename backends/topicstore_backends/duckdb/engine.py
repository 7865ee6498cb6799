"""The engine: transactions, reads through views, and care."""

# ruff: noqa: S608 - statements are put together of names that are quoted; values are parameters

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import duckdb
import pyarrow as pa
from topicstore.contract import forking
from topicstore.contract.engine import Engine, EngineStats, Key, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
)

from topicstore_backends.files import make_directory, sync
from topicstore_backends.keyspaces import ByKeyspace

from .errors import INVALIDATED, StatementRefused, Translated
from .instance import Instance, View, fetch, quoted, run
from .tables import FIRST_KEYS, GROWTH, Columns, Span, Table, lists

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE", "DuckdbEngine"]

FILE = "shard.duckdb"
_LISTED = "tables_of_rows"


# --- reading ----------------------------------------------------------------------------


class _DuckdbSnapshot(Snapshot):
    """One view, which all its reads share."""

    def __init__(self, engine: DuckdbEngine, view: View) -> None:
        self._engine = engine
        self._view = view

    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        return self._engine.get_in(self._view, keyspace, key)

    def get_many(self, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        return self._engine.get_many_in(self._view, keyspace, keys)

    def scan(
        self,
        keyspace: Keyspace,
        start: Key | None = None,
        end: Key | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[Key, bytes]]]:
        return self._engine.scan_in(self._view, keyspace, Span(start, end), reverse, limit)

    def close(self) -> None:
        self._view.close()


# --- the engine -------------------------------------------------------------------------


class DuckdbEngine(Engine):
    """One file of DuckDB. Every commit is synced, whether ``sync`` is asked for or not."""

    def __init__(
        self, instance: Instance, name: str, file: Path, keyspaces: Sequence[Keyspace], *, create: bool
    ) -> None:
        self._instance = instance
        self._name = name
        self._file = file
        self._translated = Translated(file)
        self._tables = ByKeyspace({keyspace.name: Table(name, keyspace) for keyspace in keyspaces})
        self._rows: dict[str, Columns] = {}
        """The tables of `WriteBatch.put_rows`, and which of their columns are keys."""
        self._write_lock = Lock()
        self._lock = Lock()
        """Held while views are added or listed."""
        # Weak, so that a scan that is dropped half way ends its transaction at once.
        self._views: WeakSet[View] = WeakSet()
        self._closed = False
        self._log: tuple[int, int] | None = None
        """The log whose name in the directory is on disk: its device and number. Guarded by `_write_lock`."""
        with self._translated, contextlib.ExitStack() as failing:
            self._writer = instance.connect()
            failing.callback(self._writer.close)
            if create:
                self._create()
            self._look()
            failing.pop_all()
        forking.remember(self)

    def _create(self) -> None:
        self._writer.begin()
        for table in self._tables.values():
            table.create(self._writer)
        run(self._writer, f"CREATE TABLE IF NOT EXISTS {self._qualified(_LISTED)} (name VARCHAR, keyspace VARCHAR)")
        self._writer.commit()

    def _look(self) -> None:
        """See that all keyspaces are there in their shape, and which tables of rows there are.

        Not by DuckDB's catalog functions: the first call of one takes ten times as long as all of this.
        """
        for name, table in self._tables.items():
            if self._columns_of(name) != table.definition:
                raise EngineError(f"{self._file}: there is no keyspace {name!r} of the shape that was asked for")
        for name, of in fetch(self._writer, f"SELECT name, keyspace FROM {self._qualified(_LISTED)}"):
            keyspace = self._tables[of].columns.keyspace
            names = [column[1:-1] for column, _ in self._columns_of(name)[: len(keyspace.shape or ())]]
            self._rows[name] = Columns.of(keyspace, names)

    def _columns_of(self, table: str) -> list[tuple[str, str]]:
        """Return a table's columns and their types; none if there is no such table."""
        try:
            found = self._writer.sql(f"FROM {self._qualified(table)}")
        except duckdb.CatalogException:
            return []
        return [(quoted(name), str(kind)) for name, kind in zip(found.columns, found.types, strict=True)]

    def leave_to_parent(self) -> None:
        """Leak DuckDB's connections: closing the last one writes the log into the file."""
        views = (view.connection() for view in list(self._views))
        forking.leak(self, self._writer, self._instance.root(), *views)

    # --- writing ----------------------------------------------------------------------

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch in one transaction, synced: ranges first, then operations in their order, then rows.

        Raises `StorageFullError` when the disk is full, `EngineError` for what else fails. If DuckDB
        then wants the file attached again that is done, which ends open scans and snapshots with
        `EngineError`; everything acknowledged can be read anew.
        """
        final = self._checked(batch)
        with self._write_lock, self._translated:
            self._check_open()
            try:
                self._writer.begin()
                self._apply(batch, final)
                self._writer.commit()
                self._sync_name_of_log()
            except BaseException as error:
                with suppress(duckdb.Error):
                    self._writer.rollback()
                if INVALIDATED.search(str(error)):
                    self._attach_again()
                raise

    def _sync_name_of_log(self) -> None:
        """Have the log's name on disk, which DuckDB leaves to the system: it begins a new log now and then."""
        try:
            found = self._file.with_name(f"{FILE}.wal").stat()
        except FileNotFoundError:
            return  # written into the file by this commit
        if self._log != (found.st_dev, found.st_ino):
            sync(self._file.parent)
            self._log = found.st_dev, found.st_ino

    def _checked(self, batch: WriteBatch) -> list[tuple[Table, dict[Key, bytes | None]]]:
        """Return the last value of each key by keyspace; refuse the whole batch if one doesn't fit."""
        for keyspace, start, end in batch.ranges:
            self._tables[keyspace.name].columns.keys.encode_all([start, end])
        final: dict[str, dict[Key, bytes | None]] = {}
        for keyspace, keys, values in batch.runs:
            self._tables[keyspace.name].columns.keys.encode_all(keys)
            final.setdefault(keyspace.name, {}).update(zip(keys, values, strict=True))
        for keyspace, name, rows in batch.rows:
            self._check_rows(self._tables[keyspace.name].columns.keyspace, name, rows)
        return [(self._tables[name], values) for name, values in final.items()]

    def _check_rows(self, keyspace: Keyspace, name: str, rows: pa.Table) -> None:
        if keyspace.shape is None or rows.num_columns < len(keyspace.shape):
            raise InvalidArgumentError(f"rows of table {name!r} don't begin with a key of keyspace {keyspace.name!r}")
        if name in (*self._tables, _LISTED):
            raise InvalidArgumentError(f"there is a table {name!r} already that is not one of rows")

    def _apply(self, batch: WriteBatch, final: list[tuple[Table, dict[Key, bytes | None]]]) -> None:
        for keyspace, start, end in batch.ranges:
            if start < end:
                self._delete(keyspace, Span(start, end))
        for table, values in final:
            self._replace(table, values)
        for keyspace, name, rows in batch.rows:
            self._append(keyspace, name, rows)

    def _delete(self, keyspace: Keyspace, span: Span) -> None:
        table = self._tables[keyspace.name]
        table.columns.delete(self._writer, table.name, span)
        for name, columns in self._rows_of(keyspace):
            columns.delete(self._writer, name, span)

    def _replace(self, table: Table, values: dict[Key, bytes | None]) -> None:
        """Give keys their last values. A key is deleted before it is put: nothing else keeps it single."""
        table.columns.delete_keys(self._writer, table.name, list(values))
        put = {key: value for key, value in values.items() if value is not None}
        gone = [key for key, value in values.items() if value is None]
        if put:
            table.insert(self._writer, list(put), list(put.values()))
        for name, columns in self._rows_of(table.columns.keyspace) if gone else ():
            columns.delete_keys(self._writer, name, gone)

    def _rows_of(self, keyspace: Keyspace) -> list[tuple[str, Columns]]:
        return [
            (self._qualified(name), each) for name, each in self._rows.items() if each.keyspace.name == keyspace.name
        ]

    def _qualified(self, table: str) -> str:
        return f"{self._name}.main.{quoted(table)}"

    def _append(self, keyspace: Keyspace, name: str, rows: pa.Table) -> None:
        """Append rows; the first make the table."""
        table = self._qualified(name)
        if name not in self._rows:
            run(self._writer, f"CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM rows LIMIT 0", rows=rows)
            run(self._writer, f"INSERT INTO {self._qualified(_LISTED)} VALUES (?, ?)", [name, keyspace.name])
            # Known before the commit, and still known if that fails: then nothing is written any more.
            self._rows[name] = Columns.of(keyspace, rows.column_names[: len(keyspace.shape or ())])
        if rows.num_rows:
            run(self._writer, f"INSERT INTO {table} SELECT * FROM rows", rows=rows)

    def _attach_again(self) -> None:
        self._end_views(EngineError(f"{self._file}: it was attached again after a failed write; read anew"))
        with suppress(duckdb.Error):  # the write's own error is the one to tell
            self._instance.attach_again(self._file, self._name)

    def flush_log(self) -> None:
        """Do nothing: whatever was written is on disk."""
        self._check_open()

    # --- reading ----------------------------------------------------------------------

    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        with self._passing_view() as view:
            return self.get_in(view, keyspace, key)

    def get_many(self, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the value of each key, None where there is none, by one join."""
        with self._passing_view() as view:
            return self.get_many_in(view, keyspace, keys)

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

        The first list costs a millisecond or more: DuckDB looks through the keys of the range.
        """
        return self.scan_in(None, keyspace, Span(start, end), reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a view of now. While it is open DuckDB keeps what is deleted."""
        with self._translated:
            return _DuckdbSnapshot(self, self._open_view())

    def get_in(self, view: View, keyspace: Keyspace, key: Key) -> bytes | None:
        """Return what a view sees under ``key``."""
        table = self._tables[keyspace.name]
        with self._translated, view.use() as connection:
            return table.get(connection, key)

    def get_many_in(self, view: View, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        """Return what a view sees under each of ``keys``."""
        table = self._tables[keyspace.name]
        with self._translated, view.use() as connection:
            return table.get_many(connection, keys)

    def scan_in(
        self, view: View | None, keyspace: Keyspace, span: Span, reverse: bool, limit: int | None
    ) -> Iterator[list[tuple[Key, bytes]]]:
        """Yield what a view, or one opened at the first list, sees of a range."""
        table = self._tables[keyspace.name]
        table.columns.condition(span)  # refuses keys that don't fit now, not at the first list
        return self._lists(view, table, span, reverse, limit)

    def _lists(
        self, shared: View | None, table: Table, span: Span, reverse: bool, limit: int | None
    ) -> Iterator[list[tuple[Key, bytes]]]:
        """Yield what one statement finds of a range; if there is more, keys some at a time and then their values."""
        view, left, count = shared, sys.maxsize if limit is None else limit, FIRST_KEYS
        try:
            with self._translated:
                view = view or self._open_view()
                with view.use() as connection:
                    pairs, ended = table.first(connection, span, reverse)
            if pairs[:left]:
                yield pairs[:left]
                span = span.behind(pairs[-1][0], reverse)
            left -= len(pairs)
            while left > 0 and not ended:
                room = min(count, left)
                with self._translated, view.use() as connection:
                    keys, sizes = table.keys(connection, span, reverse, room)
                for part in lists(sizes):
                    with self._translated, view.use() as connection:
                        values = table.values(connection, keys[part], sizes[part], reverse)
                    yield list(zip(keys[part], values, strict=True))
                if len(keys) < room:
                    return
                span = span.behind(keys[-1], reverse)
                count = min(count * GROWTH, table.most_keys)
                left -= len(keys)
        finally:
            if shared is None and view is not None:
                view.close()

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a statement that only reads, in DuckDB's SQL; return what it gives.

        Parameters are ``?`` or ``$1`` in the statement. It may read other files that DuckDB can read,
        if it names them: don't run statements of strangers. With ``beside``, tables that not all
        shards have are made up of those that have them.
        """
        engines = [self, *(self._sibling(other) for other in beside)]
        with self._translated, self._passing_view() as view, view.use() as connection:
            with StatementRefused():
                parsed = self._instance.parsed(connection, statement)
            if beside:
                self._unite(connection, engines)
            else:
                run(connection, f"USE {self._name}.main")
            with StatementRefused():
                return connection.sql(parsed, params=list(parameters)).to_arrow_table()

    def _sibling(self, other: Engine) -> DuckdbEngine:
        if not isinstance(other, DuckdbEngine) or other._instance is not self._instance:  # noqa: SLF001 - one of us
            raise InvalidArgumentError("only engines that one backend object opened can be read in one statement")
        return other

    @staticmethod
    def _unite(connection: duckdb.DuckDBPyConnection, engines: Sequence[DuckdbEngine]) -> None:
        """Make one view, of this connection only, of each table of rows."""
        tables: dict[str, list[str]] = {}
        for engine in engines:
            for name, qualified in engine.tables_of_rows():
                tables.setdefault(name, []).append(f"SELECT * FROM {qualified}")
        for name, parts in tables.items():
            run(connection, f"CREATE TEMP VIEW {quoted(name)} AS {' UNION ALL BY NAME '.join(parts)}")

    def tables_of_rows(self) -> list[tuple[str, str]]:
        """Return the tables of `WriteBatch.put_rows`: (name, name that tells shards apart)."""
        return [(name, self._qualified(name)) for name in list(self._rows)]

    # --- care -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the bytes of the file and its log, and what DuckDB uses for all shards of the database."""
        with self._translated, self._passing_view() as view, view.use() as connection:
            used = fetch(connection, "SELECT sum(memory_usage_bytes)::BIGINT FROM duckdb_memory()")
        sizes = {name: _size(self._file.with_name(name)) for name in (FILE, f"{FILE}.wal")}
        details: dict[str, str | int] = {"log_bytes": sizes[f"{FILE}.wal"], "duckdb": duckdb.__version__}
        return EngineStats(disk_bytes=sum(sizes.values()), memory_bytes=int(used[0][0]), details=details)

    def verify(self) -> Iterator[str]:
        """Read every column of every table, checking the checksums of blocks that are not in memory."""
        names = (*self._tables, _LISTED, *self._rows)
        try:
            self._read_whole(names)
        except CorruptionError:
            for name in names:
                try:
                    self._read_whole([name])
                except CorruptionError as bad:
                    yield f"table {name!r}: {bad}"

    def _read_whole(self, names: Sequence[str]) -> None:
        parts = (f"SELECT bit_xor(hash(stored)) FROM {self._qualified(name)} stored" for name in names)
        with self._translated, self._passing_view() as view, view.use() as connection:
            fetch(connection, " UNION ALL ".join(parts))

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard, as it is now, into the new directory ``path``: row by row, without dead ones."""
        if path.exists():
            raise EngineError(f"{path}: a checkpoint needs a new directory, and this exists")
        with Translated(path):
            make_directory(path)
            sync(path)
        self._check_open()
        with Translated(path / FILE):
            copy = self._instance.attach(path / FILE)
            try:
                self._copy(copy)
            finally:
                self._instance.detach(copy)  # writes the log into the file

    def _copy(self, copy: str) -> None:
        connection = self._instance.connect()
        try:
            connection.begin()
            for name in (*self._tables, _LISTED, *self._rows):
                target = f"{copy}.main.{quoted(name)}"
                run(connection, f"CREATE TABLE {target} AS SELECT * FROM {self._qualified(name)}")
            connection.commit()
        finally:
            connection.close()

    def close(self) -> None:
        """Write the log into the file and give back file and lock, whoever still refers to scans and snapshots.

        Statements of other threads are interrupted. When writing fails the error is raised after
        everything was given back; the data is in the log.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end_views(DatabaseClosedError(f"{self._file}: the engine is closed"))
        with self._write_lock, self._translated, contextlib.ExitStack() as closing:
            closing.callback(self._instance.detach, self._name)
            closing.callback(self._writer.close)

    # --- within -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError(f"{self._file}: the engine is closed")

    def _open_view(self) -> View:
        with self._lock:
            self._check_open()
            view = View(self._instance.connect())
            self._views.add(view)
            return view

    @contextlib.contextmanager
    def _passing_view(self) -> Iterator[View]:
        """Give a view for one read."""
        with self._translated:
            view = self._open_view()
        try:
            yield view
        finally:
            view.close()

    def _end_views(self, error: Exception) -> None:
        with self._lock:
            views = list(self._views)
        for view in views:
            view.close(error)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
