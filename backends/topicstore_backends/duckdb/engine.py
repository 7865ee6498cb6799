"""The engine on DuckDB: transactions, reads through views, and maintenance."""

# ruff: noqa: S608 - statements are built from quoted names; values are parameters

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
from topicstore.contract import forking
from topicstore.contract.engine import Engine, EngineInfo, K, Key, Keyspace, Snapshot, WriteBatch, is_empty
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    DataLossError,
    EngineError,
    InvalidArgumentError,
)

from topicstore_backends.files import ReaderDirectory, make_directory, sync
from topicstore_backends.keyspaces import ByKeyspace

from .errors import INVALIDATED, LEFT_IN_LOG, StatementRefused, Translated
from .instance import Instance, View, check_path, fetch, quoted, run
from .tables import FIRST_KEYS, GROWTH, Columns, Span, Table, lists

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE", "DuckdbEngine"]

FILE = "shard.duckdb"
_LISTED = "tables_of_rows"
_SHARE_PUT, _LEAST_PUT = 0.25, 1 << 20
"""The space of deleted rows is freed after puts of this share of the file's size, and of at least this many bytes."""
_COPIED = 2_048
"""Rows that a checkpoint copies at a time: as many as DuckDB reads at a time."""


# --- reading ----------------------------------------------------------------------------


class _DuckdbSnapshot(Snapshot):
    """A snapshot: one view that all its reads share."""

    def __init__(self, engine: DuckdbEngine, view: View) -> None:
        self._engine = engine
        self._view = view

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        return self._engine.get_in(self._view, keyspace, key)

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        return self._engine.get_many_in(self._view, keyspace, keys)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        return self._engine.scan_in(self._view, keyspace, Span(start, end), reverse, limit)

    def close(self) -> None:
        self._view.close()


# --- the engine -------------------------------------------------------------------------


class DuckdbEngine(Engine):
    """An engine on one DuckDB file. Every commit is fsynced, whether ``sync`` is requested or not."""

    def __init__(
        self,
        instance: Instance,
        name: str,
        file: Path,
        keyspaces: Sequence[Keyspace[Any]],
        translated: Translated,
        *,
        create: bool,
        made: ReaderDirectory | None = None,
    ) -> None:
        self._instance = instance
        self._name = name
        self._file = file
        self._translated = translated
        self._tables = ByKeyspace({keyspace.name: Table(name, keyspace) for keyspace in keyspaces})
        self._rows: dict[str, Columns[Any]] = {}
        """The key columns of each table of `WriteBatch.put_rows`, by the table's name."""
        self._write_lock = forking.ProcessLock()
        self._closed = False
        self._detached = False
        """Whether the file could not be attached again after a failed write. Guarded by `_write_lock`."""
        self._freed = False
        """Whether rows were deleted since the log was last written into the file. Guarded by `_write_lock`."""
        self._put = 0
        """The bytes of values put since the log was last written into the file. Guarded by `_write_lock`."""
        self._log: tuple[int, int] | None = None
        """The device and inode of the log whose directory entry is fsynced. Guarded by `_write_lock`."""
        self._open = contextlib.ExitStack()
        """Closes everything that is still open. Guarded by `_write_lock`."""
        with self._translated, contextlib.ExitStack() as failing:
            self._writer = instance.connect()
            failing.callback(self._writer.close)
            if create:
                self._create()
            self._look()
            failing.pop_all()
        if made is not None:
            self._open.callback(made.removal(self))
        self._open.callback(instance.detach, name)
        self._open.callback(self._writer.close)
        forking.remember(self)

    def _create(self) -> None:
        self._writer.begin()
        for table in self._tables.values():
            table.create(self._writer)
        run(self._writer, f"CREATE TABLE IF NOT EXISTS {self._qualified(_LISTED)} (name VARCHAR, keyspace VARCHAR)")
        self._writer.commit()

    def _look(self) -> None:
        """Check that every keyspace has its table and shape, and load the list of tables of rows.

        DuckDB's catalog functions are not used: the first call of one takes ten times as long as all of this.
        """
        there = {name: self._columns_of(self._writer, name) for name in self._tables}
        # New tables are in the log before they are in the file, so an empty file has lost its log.
        if not any((*there.values(), self._columns_of(self._writer, _LISTED))):
            raise DataLossError(f"it holds nothing, so its log {FILE}.wal is gone, or was cut", str(self._file))
        for name, table in self._tables.items():
            if there[name] != table.definition:
                raise EngineError(f"{self._file}: there is no keyspace {name!r} of the requested shape")
        for name, of in fetch(self._writer, f"SELECT name, keyspace FROM {self._qualified(_LISTED)}"):
            keyspace = self._tables[of].columns.keyspace
            names = [column[1:-1] for column, _ in self._columns_of(self._writer, name)[: len(keyspace.shape or ())]]
            self._rows[name] = Columns.of(keyspace, names)

    def _columns_of(self, connection: duckdb.DuckDBPyConnection, table: str) -> list[tuple[str, str]]:
        """Return a table's columns and their types; an empty list if there is no such table."""
        try:
            found = connection.sql(f"FROM {self._qualified(table)}")
        except duckdb.CatalogException:
            return []
        return [(quoted(name), str(kind)) for name, kind in zip(found.columns, found.types, strict=True)]

    def leave_to_parent(self) -> None:
        """Leave DuckDB's connections open in a forked child: closing the last one would write the log into the file."""
        forking.leak(self, self._writer, *self._instance.connections())

    # --- writing ----------------------------------------------------------------------

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch in one fsynced transaction: first range deletes, then puts and deletes in order, then rows.

        Raises `StorageFullError` when the disk is full, `EngineError` for other failures. If DuckDB then requires
        the file to be attached again, the engine does so: open scans and snapshots of all shards end with
        `EngineError`, and every acknowledged write stays readable.
        """
        final = self._checked(batch)
        with self._write_lock, self._translated:
            self.check_open()
            self._attach_if_detached_locked()
            try:
                self._writer.begin()
                self._apply(batch, final)
                self._writer.commit()
                self._sync_name_of_log()
            except BaseException as error:
                with suppress(duckdb.Error):
                    self._writer.rollback()
                if INVALIDATED.search(str(error)):
                    self._attach_again_locked()
                # An error that matches reports a failed checkpoint into the file: the batch itself is in the fsynced
                # log.
                if not LEFT_IN_LOG.search(str(error)):
                    raise
            self._free_locked(batch)

    def _free_locked(self, batch: WriteBatch) -> None:
        """Checkpoint the log into the file after deletes and large puts, because only a checkpoint frees deleted rows.

        DuckDB writes the log by itself only when it is large, but rows of large batches bypass the log.
        """
        self._put += batch.size
        self._freed |= bool(batch.ranges) or None in chain.from_iterable([values for _, _, values in batch.runs])
        if self._freed and self._put >= max(_LEAST_PUT, _size(self._file) * _SHARE_PUT):
            with suppress(duckdb.Error):  # the batch is in the log; a later write repeats the checkpoint
                self._write_log_locked()

    def _write_log_locked(self) -> None:
        try:
            run(self._writer, f"CHECKPOINT {self._name}")
        except duckdb.Error as error:
            if INVALIDATED.search(str(error)):
                self._attach_again_locked()
            raise
        self._freed, self._put = False, 0

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Write the log into the file, so that later writes reuse the space of deleted rows.

        Only free space at the end of the file is returned to the file system.
        """
        with self._write_lock, self._translated:
            self.check_open()
            self._attach_if_detached_locked()
            self._write_log_locked()

    def _sync_name_of_log(self) -> None:
        """Fsync the directory entry of the log, which DuckDB doesn't do when it begins a new log."""
        try:
            found = self._file.with_name(f"{FILE}.wal").stat()
        except FileNotFoundError:
            return  # DuckDB checkpointed in this commit, and removed the log
        if self._log != (found.st_dev, found.st_ino):
            sync(self._file.parent)
            self._log = found.st_dev, found.st_ino

    def _checked(self, batch: WriteBatch) -> list[tuple[Table[Any], dict[Key, bytes | None]]]:
        """Return each key's last value, by keyspace. Raises `InvalidArgumentError` if a key or table is invalid."""
        for keyspace, start, end in batch.ranges:
            self._tables[keyspace.name].columns.keys.encode_all([start, end])
        final: dict[str, dict[Key, bytes | None]] = {}
        for keyspace, keys, values in batch.runs:
            self._tables[keyspace.name].columns.keys.encode_all(keys)
            final.setdefault(keyspace.name, {}).update(zip(keys, values, strict=True))
        for keyspace, name, rows in batch.rows:
            self._check_rows(self._tables[keyspace.name].columns.keyspace, name, rows)
        return [(self._tables[name], values) for name, values in final.items()]

    def _check_rows(self, keyspace: Keyspace[Any], name: str, rows: pa.Table) -> None:
        if keyspace.shape is None or rows.num_columns < len(keyspace.shape):
            raise InvalidArgumentError(f"rows of table {name!r} don't begin with a key of keyspace {keyspace.name!r}")
        if name in (*self._tables, _LISTED):
            raise InvalidArgumentError(f"there is a table {name!r} already that is not one of rows")

    def _apply(self, batch: WriteBatch, final: list[tuple[Table[Any], dict[Key, bytes | None]]]) -> None:
        for keyspace, start, end in batch.ranges:
            if not is_empty(start, end):
                self._delete(keyspace, Span(start, end))
        for table, values in final:
            self._replace(table, values)
        for keyspace, name, rows in batch.rows:
            self._append(keyspace, name, rows)

    def _delete(self, keyspace: Keyspace[K], span: Span[K]) -> None:
        table = self._tables[keyspace.name]
        table.columns.delete(self._writer, table.name, span)
        for name, columns in self._rows_of(keyspace):
            columns.delete(self._writer, name, span)

    def _replace(self, table: Table[Any], values: dict[Key, bytes | None]) -> None:
        """Give keys their last values. Each is deleted before it is put, because no index keeps keys unique."""
        table.columns.delete_keys(self._writer, table.name, list(values))
        put = {key: value for key, value in values.items() if value is not None}
        gone = [key for key, value in values.items() if value is None]
        if put:
            table.insert(self._writer, list(put), list(put.values()))
        for name, columns in self._rows_of(table.columns.keyspace) if gone else ():
            columns.delete_keys(self._writer, name, gone)

    def _rows_of(self, keyspace: Keyspace[Any]) -> list[tuple[str, Columns[Any]]]:
        return [
            (self._qualified(name), each) for name, each in self._rows.items() if each.keyspace.name == keyspace.name
        ]

    def _qualified(self, table: str) -> str:
        return f"{self._name}.main.{quoted(table)}"

    def _append(self, keyspace: Keyspace[Any], name: str, rows: pa.Table) -> None:
        """Append rows to their table, which the first append creates."""
        table = self._qualified(name)
        if name not in self._rows:
            run(self._writer, f"CREATE TABLE IF NOT EXISTS {table} AS SELECT * FROM rows LIMIT 0", rows=rows)
            run(self._writer, f"INSERT INTO {self._qualified(_LISTED)} VALUES (?, ?)", [name, keyspace.name])
            # Set before the commit. If the commit fails, the entry is harmless: no write follows before `recover`
            # clears it.
            self._rows[name] = Columns.of(keyspace, rows.column_names[: len(keyspace.shape or ())])
        if rows.num_rows:
            run(self._writer, f"INSERT INTO {table} SELECT * FROM rows", rows=rows)

    def _attach_again_locked(self) -> None:
        self._detached = True
        # Only the write's error is raised; the next write tries to attach again.
        with suppress(duckdb.Error, EngineError):
            self._attach_if_detached_locked()

    def _attach_if_detached_locked(self) -> None:
        if self._detached:
            why = f"{self._file}: a write failed, after which the files were attached again; read again"
            try:
                self._instance.attach_again(self._file, self._name, why)
            except duckdb.ResourceInUseException as busy:
                raise EngineError(
                    f"{self._file}: a write failed, and the file can be used again when writes to other shards that "
                    "go on have ended; try again"
                ) from busy
            self._detached = False

    def recover(self) -> bool:
        """Attach the file again if a failed write requires that, load the list of its tables, and return True.

        Other failures need no recovery, because DuckDB rolls the transaction back.
        """
        with self._write_lock, self._translated:
            self.check_open()
            self._attach_if_detached_locked()
            self._rows.clear()  # a failed write may have added a table
            self._look()
        return True

    def flush_log(self) -> None:
        """Do nothing: every commit is already on disk."""
        self.check_open()

    # --- reading ----------------------------------------------------------------------

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        with self._passing_view() as view:
            return self.get_in(view, keyspace, key)

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, or None if there is none, with one join."""
        with self._passing_view() as view:
            return self.get_many_in(view, keyspace, keys)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield lists of the key-value pairs of a range, in the state at the time when the first list is requested.

        The first list costs a millisecond or more: DuckDB has no index and searches the row groups of the range.
        """
        return self.scan_in(None, keyspace, Span(start, end), reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state. While it is open, DuckDB keeps deleted rows."""
        return _DuckdbSnapshot(self, self._open_view())

    def get_in(self, view: View, keyspace: Keyspace[Any], key: Key) -> bytes | None:
        """Return the value of ``key`` in a view, or None."""
        table = self._tables[keyspace.name]
        with view.lock, view as connection:
            return table.get(connection, key)

    def get_many_in(self, view: View, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        """Return the value of each of ``keys`` in a view, or None."""
        table = self._tables[keyspace.name]
        with view.lock, view as connection:
            return table.get_many(connection, keys)

    def scan_in(
        self, view: View | None, keyspace: Keyspace[K], span: Span[K], reverse: bool, limit: int | None
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield lists of the key-value pairs of a range as ``view``, a snapshot, sees them.

        Without a view, the scan sees the state at the time when the first list is requested.
        """
        table = self._tables[keyspace.name]
        table.columns.condition(span)  # raises for keys of another shape now, not when the first list is requested
        return self._lists(view, table, span, reverse, limit)

    def _lists(
        self, shared: View | None, table: Table[K], span: Span[K], reverse: bool, limit: int | None
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the pairs of a range: those that one statement finds, then some keys at a time with their values."""
        view, left, count = shared, sys.maxsize if limit is None else limit, FIRST_KEYS
        try:
            view = view or self._open_view()
            with view.lock, view as connection:
                pairs, ended = table.first(connection, span, reverse)
            if pairs[:left]:
                yield pairs[:left]
                span = span.behind(pairs[-1][0], reverse)
            left -= len(pairs)
            while left > 0 and not ended:
                room = min(count, left)
                with view.lock, view as connection:
                    keys, sizes = table.keys(connection, span, reverse, room)
                for part in lists(sizes):
                    with view.lock, view as connection:
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
        """Run a statement that only reads, in DuckDB's SQL, and return its result.

        Parameters are ``?`` or ``$1`` in the statement. A statement can name and read any file that DuckDB can
        read: don't run untrusted statements. A table is the union of the tables of that name in this engine and in
        those ``beside`` it. Raises `InvalidArgumentError` for a statement that is wrong or writes.
        """
        engines = [self, *(self._sibling(other) for other in beside)]
        try:
            return self._sql(statement, parameters, engines)
        except (EngineError, InvalidArgumentError):
            for engine in engines:
                engine.check_open()  # the error of a shard that was closed meanwhile is `DatabaseClosedError`
            raise

    def _sql(self, statement: str, parameters: Sequence[Any], engines: Sequence[DuckdbEngine]) -> pa.Table:
        with self._passing_view() as view, view.lock, view as connection:
            with StatementRefused():
                parsed = self._instance.parsed(connection, statement)
            if len(engines) > 1:
                self._unite(connection, engines)
            else:
                run(connection, f"USE {self._name}.main")
            with StatementRefused(engine._file.parent for engine in engines):  # noqa: SLF001 - of this class
                return connection.sql(parsed, params=list(parameters)).to_arrow_table()

    def _sibling(self, other: Engine) -> DuckdbEngine:
        if not isinstance(other, DuckdbEngine) or other._instance is not self._instance:  # noqa: SLF001 - one of us
            raise InvalidArgumentError("only engines that one backend object opened can be read in one statement")
        return other

    @staticmethod
    def _unite(connection: duckdb.DuckDBPyConnection, engines: Sequence[DuckdbEngine]) -> None:
        """Create a view for each table of rows, visible to this connection only."""
        tables: dict[str, list[str]] = {}
        for engine in engines:
            for name, qualified in engine.tables_of_rows():
                tables.setdefault(name, []).append(f"SELECT * FROM {qualified}")
        for name, parts in tables.items():
            run(connection, f"CREATE TEMP VIEW {quoted(name)} AS {' UNION ALL BY NAME '.join(parts)}")

    def tables_of_rows(self) -> list[tuple[str, str]]:
        """Return the tables of `WriteBatch.put_rows` as (name, qualified name that is unique to this shard)."""
        return [(name, self._qualified(name)) for name in list(self._rows)]

    # --- maintenance ------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        """Return the bytes of the file and its log, and the memory that DuckDB uses for all shards of the database."""
        with self._passing_view() as view, view.lock, view as connection:
            used = fetch(connection, "SELECT sum(memory_usage_bytes)::BIGINT FROM duckdb_memory()")
        with self._translated:
            sizes = {name: _size(self._file.with_name(name)) for name in (FILE, f"{FILE}.wal")}
        details: dict[str, str | int] = {"log_bytes": sizes[f"{FILE}.wal"], "duckdb": duckdb.__version__}
        return EngineInfo(disk_bytes=sum(sizes.values()), memory_bytes=int(used[0][0]), details=details)

    def verify(self) -> Iterator[str]:
        """Read every column of every table, which checks the checksums of blocks that are not in memory."""
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
        with self._passing_view() as view, view.lock, view as connection:
            fetch(connection, " UNION ALL ".join(parts))

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard's current rows, without deleted ones, into the new directory ``path``."""
        deque(self.checkpoint_steps(path), maxlen=0)

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Create the new file, begin a transaction, and copy the rows that it sees; yield between these steps."""
        check_path(path)
        with Translated(path):
            if path.exists():
                raise EngineError(f"{path}: a checkpoint needs a new directory, and this exists")
            make_directory(path)
            sync(path)
        self.check_open()
        # A separate DuckDB, because any statement that runs meanwhile on a DuckDB keeps the files attached to it open.
        instance = self._instance.another()
        with Translated(path / FILE), contextlib.ExitStack() as closing:
            name = instance.attach(path / FILE)
            closing.callback(instance.detach, name)  # this writes the log into the file
            target = closing.enter_context(contextlib.closing(instance.connect()))
            yield
            with self._passing_view() as view:
                tables = (*self._tables, _LISTED, *self._rows)  # a table that is created later is not in the view
                yield
                self._copy(view, tables, target, name)

    def _copy(self, view: View, tables: Sequence[str], target: duckdb.DuckDBPyConnection, name: str) -> None:
        with view.lock, view as source:
            # Otherwise the values of 2,048 rows may have at most 2 GiB together.
            run(source, "SET SESSION arrow_large_buffer_size = true")
            target.begin()
            for table in tables:
                copy, columns = f"{name}.main.{quoted(table)}", self._columns_of(source, table)
                run(target, f"CREATE TABLE {copy} ({', '.join(map(' '.join, columns))})")
                rows = source.sql(f"FROM {self._qualified(table)}").to_arrow_reader(_COPIED)
                run(target, f"INSERT INTO {copy} FROM rows", rows=rows)
            target.commit()

    def close(self) -> None:
        """Write the log into the file and release file and lock, even if scans and snapshots are still referenced.

        Statements of other threads are interrupted. If writing fails, the error is raised
        after everything was released; the data is in the log.
        """
        self._closed = True
        with self._translated, contextlib.ExitStack() as closing:
            closing.callback(self._let_go)
            self._instance.end_views(DatabaseClosedError(f"{self._file}: the engine is closed"), self._name)

    def _let_go(self) -> None:
        with self._write_lock:
            self._open.close()  # each callback runs even if another raises

    # --- within -----------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` if the engine is closed."""
        if self._closed:
            raise DatabaseClosedError(f"{self._file}: the engine is closed")

    def _open_view(self) -> View:
        with self._translated:
            self.check_open()
            if self._detached:
                with self._write_lock:
                    self._attach_if_detached_locked()
            view = self._instance.open_view(self._name, self._translated)
            try:
                self.check_open()  # a concurrent `close` may not have seen this view
            except BaseException:
                view.close()
                raise
            return view

    @contextlib.contextmanager
    def _passing_view(self) -> Iterator[View]:
        """Provide a view for one read, and close it afterwards."""
        with contextlib.closing(self._open_view()) as view:
            yield view


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
