"""Tests of behaviour that only the DuckDB engine has: files, locks, large values, SQL, full disks and damage."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from topicstore.contract.engine import DATA, KEYSPACES, STATE, Engine, Keyspace, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
)
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.backend.fixtures import pairs, put
from topicstore_conformance.faults import namespaces
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

import duckdb
from topicstore_backends.duckdb import DuckdbBackend, DuckdbEngine, DuckdbOptions
from topicstore_backends.duckdb import engine as engine_module
from topicstore_backends.duckdb import instance as instance_module
from topicstore_backends.duckdb.errors import StatementRefused
from topicstore_backends.duckdb.instance import View, run

if TYPE_CHECKING:
    from collections.abc import Iterator

MEGABYTE = 1 << 20


def open_engine(path: Path, *, create: bool = True, **options: Any) -> DuckdbEngine:
    return DuckdbBackend(DuckdbOptions(**options)).open_shard(path, KEYSPACES, create=create)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DuckdbEngine]:
    opened = open_engine(tmp_path / "shard")
    yield opened
    opened.close()


def table(*numbers: int, text: str = "x") -> pa.Table:
    """Return rows with the keys (1, 0, number)."""
    columns = {
        "generation": pa.array([1] * len(numbers), pa.uint32()),
        "stream": pa.array([0] * len(numbers), pa.uint64()),
        "position": pa.array(numbers, pa.uint64()),
        "text": pa.array([text] * len(numbers), pa.string()),
    }
    return pa.table(columns)


def put_rows(engine: Engine, *numbers: int, text: str = "x") -> None:
    batch = WriteBatch()
    batch.put_rows(DATA, "things", table(*numbers, text=text), 0)
    engine.write(batch)


def positions(engine: Engine, *beside: Engine) -> list[int]:
    found: list[int] = engine.sql("SELECT position FROM things", beside=beside)["position"].to_pylist()
    return found


# --- values -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_value_of_300_megabytes(engine: DuckdbEngine) -> None:
    """A value of 300 MB can be stored, read and replaced within the default memory limit."""
    value = bytes(range(256)) * (300 * MEGABYTE // 256)
    put(engine, DATA, {(1, 0, 1): value, (1, 0, 2): b"next"})
    assert value == engine.get(DATA, (1, 0, 1))
    assert [1, 1] == [len(chunk) for chunk in engine.scan(DATA)]
    put(engine, DATA, {(1, 0, 1): b"small"})
    assert [((1, 0, 1), b"small"), ((1, 0, 2), b"next")] == pairs(engine.scan(DATA))


@pytest.mark.slow
def test_large_values_need_little_memory(tmp_path: Path) -> None:
    """Values of twice DuckDB's memory limit can be stored, checkpointed and read, one at a time."""
    engine = open_engine(tmp_path / "shard", memory_bytes=64 * MEGABYTE, log_bytes=16 * MEGABYTE)
    value = random.Random(1).randbytes(16 * MEGABYTE)
    for number in range(8):
        put(engine, DATA, {(1, 0, number): value})
    assert 8 == sum(len(chunk) for chunk in engine.scan(DATA))
    assert value == engine.get(DATA, (1, 0, 7))
    assert [] == list(engine.verify())
    engine.close()


# --- rows and SQL -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "COPY things TO 'things.csv'",
        "ATTACH 'other.duckdb' AS other",
        "SET threads = 2",
        "CHECKPOINT",
        "SELECT * FROM 'missing.parquet'",
        "SELECT * FROM read_csv('missing.csv')",
        "SELECT * FROM read_json('missing*.json')",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "SELECT nextval('missing')",
    ],
)
def test_statements_about_files_and_settings_are_refused(
    engine: DuckdbEngine, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that writes, changes settings or names a missing file raises an error and changes nothing."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    put_rows(engine, 1, 2)
    with pytest.raises(InvalidArgumentError):
        engine.sql(statement)
    assert before == sorted(tmp_path.iterdir())
    assert [1, 2] == positions(engine)


def test_a_damaged_file_in_a_statement_is_a_mistake_of_the_statement(engine: DuckdbEngine, tmp_path: Path) -> None:
    """A damaged file that a statement names raises `InvalidArgumentError`.

    An error about the engine's own files, or about no file, stays an error of DuckDB.
    """
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(90) + b"\xff\0\0\0PAR1")
    with pytest.raises(InvalidArgumentError, match=r"x\.parquet"):
        engine.sql(f"SELECT * FROM '{tmp_path}/x.parquet'")
    for text in (f'Could not read from file "{tmp_path}/shard/shard.duckdb"', "Could not write all bytes"):
        with pytest.raises(duckdb.IOException), StatementRefused([tmp_path / "shard"]):
            raise duckdb.IOException(text)


# --- files and locks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a?b", "a\\b"])
def test_a_path_that_duckdb_takes_for_another_is_refused(engine: DuckdbEngine, tmp_path: Path, name: str) -> None:
    """A path with ``?`` or a backslash is refused, also for a checkpoint; other special characters work."""
    with pytest.raises(InvalidArgumentError, match=r"no \? and no backslash"):
        DuckdbBackend(DuckdbOptions()).check_path(tmp_path / name / "db")
    with pytest.raises(InvalidArgumentError, match=r"no \? and no backslash"):
        engine.checkpoint(tmp_path / name)
    assert not (tmp_path / name).exists()
    engine.checkpoint(tmp_path / "a'*[1]{}%20;#~\n\"é")
    open_engine(tmp_path / "a'*[1]{}%20;#~\n\"é", create=False).close()


def test_other_keyspaces_are_refused(tmp_path: Path) -> None:
    """Opening a shard with a keyspace of another name or shape raises `EngineError`."""
    open_engine(tmp_path / "shard").close()
    for keyspace in (Keyspace("other"), Keyspace("state", (4, 8))):
        with pytest.raises(EngineError, match="no keyspace"):
            DuckdbBackend(DuckdbOptions()).open_shard(tmp_path / "shard", [keyspace], create=False)
    open_engine(tmp_path / "shard", create=False).close()


@pytest.mark.usefixtures("engine")
def test_other_processes_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Another process that opens the shard gets an error with the id of the process that has the file open."""
    program = """
from pathlib import Path
from topicstore.contract.engine import KEYSPACES
from topicstore.contract.errors import EngineError
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions
try:
    DuckdbBackend(DuckdbOptions()).open_shard(Path(arguments[0]), KEYSPACES, create=False)
except EngineError as error:
    say(str(error))
"""
    ((told,),) = namespaces.run(program, tmp_path / "shard")
    assert f"PID {os.getpid()}" in told
    assert "no other can read it" in told


def test_a_signal_that_interrupts_a_statement_is_reported_as_such(engine: DuckdbEngine) -> None:
    """A signal handler that raises during a statement ends the statement with `KeyboardInterrupt`.

    The engine stays usable.
    """
    put(engine, STATE, {b"k": b"v"})
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            engine.sql("SELECT count(*) FROM range(3_000_000) a, range(3_000_000) b")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert b"v" == engine.get(STATE, b"k")


class Interrupting:
    """An Arrow stream that raises when it is read, as a signal handler would."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise self.raised


@pytest.mark.parametrize(
    "given",
    [Interrupting(KeyboardInterrupt()), Interrupting(SystemExit(3)), None],
    ids=["while they are read", "whose handler exits", "while they are looked for"],
)
def test_a_signal_that_interrupts_duckdb_reading_rows_is_reported_as_such(engine: DuckdbEngine, given: Any) -> None:
    """A signal handler that raises while DuckDB reads rows ends the statement with `KeyboardInterrupt`.

    DuckDB itself replaces the handler's error, or reports that there are no rows.
    """
    put(engine, STATE, {b"k": b"v"})
    statement = f"INSERT INTO {engine._qualified('state')} FROM rows"
    execute = engine._writer.execute if given is None else partial(run, engine._writer, rows=given)
    with pytest.raises(KeyboardInterrupt), engine._translated:
        execute(statement)
    assert b"v" == engine.get(STATE, b"k")


class Root:
    """A stand-in for DuckDB's first connection, which refuses a second thread; `cursor` blocks until ``go`` is set."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.busy, self.go = threading.Event(), threading.Event()

    def cursor(self) -> Any:
        self.busy.set()
        assert self.go.wait(PATIENCE)
        made = self.root.cursor()
        self.busy.clear()
        return made

    def close(self) -> None:
        assert not self.busy.is_set(), "connection is busy with another call"
        self.root.close()


def test_closing_waits_for_a_thread_that_begins_to_read(tmp_path: Path) -> None:
    """Closing waits for a thread that is beginning to read, and releases the file for another opening."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, {b"k": b"v"})
    root = Root(engine._instance._root)
    engine._instance._root = root  # type: ignore[assignment]
    reading = begin(partial(engine.get, STATE, b"k"))
    assert root.busy.wait(PATIENCE)
    closing = begin(engine.close)
    wait_until(lambda: engine._closed, "the engine to be closing")
    root.go.set()
    assert reading.exception(PATIENCE) is None or isinstance(reading.exception(), DatabaseClosedError)
    closing.result(PATIENCE)
    open_engine(tmp_path / "shard", create=False).close()


def ends_a_view(thread: list[int]) -> bool:
    """Return whether a thread is inside `View.close`, waiting for or interrupting the connection."""
    frame = sys._current_frames().get(thread[0]) if thread else None
    while frame is not None and frame.f_code is not View.close.__code__:
        frame = frame.f_back
    return frame is not None


class Ending:
    """A stand-in for a view's connection, whose `close` blocks until ``go`` is set.

    Until then `interrupt` raises, as DuckDB's does.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self.busy, self.go = threading.Event(), threading.Event()

    def interrupt(self) -> None:
        if self.busy.is_set():
            raise duckdb.ResourceInUseException("connection is busy with another call")
        self._connection.interrupt()

    def close(self) -> None:
        self.busy.set()
        assert self.go.wait(PATIENCE)
        self._connection.close()


def test_a_view_that_two_threads_close_is_not_interrupted_while_it_is_closed(tmp_path: Path) -> None:
    """Two threads can close a view at the same time, without interrupting its connection while it is closed.

    That happens when a shard is closed at the end of a read.
    """
    engine = open_engine(tmp_path / "shard")
    view = engine._open_view()
    connection = view._connection = Ending(view._connection)  # type: ignore[assignment]
    reading = begin(view.close)
    assert connection.busy.wait(PATIENCE)
    closing_thread: list[int] = []

    def close() -> None:
        closing_thread.append(threading.get_ident())
        engine.close()

    closing = begin(close)
    wait_until(lambda: ends_a_view(closing_thread), "the engine to end the view")
    connection.go.set()
    reading.result(PATIENCE)
    closing.result(PATIENCE)
    open_engine(tmp_path / "shard", create=False).close()


def test_an_engine_closes_though_a_cursor_is_in_use_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing an engine waits for another thread's current call on a cursor."""
    engine = open_engine(tmp_path / "shard")
    cursor = engine._instance.connect()
    busy, go = threading.Event(), threading.Event()

    def wait() -> bool:
        busy.set()
        return go.wait(PATIENCE)

    cursor.create_function("wait", wait, [], bool, side_effects=True)
    waiting = begin(lambda: cursor.execute("SELECT wait()").fetchall())
    assert busy.wait(PATIENCE)

    def refused(_: float) -> None:
        go.set()
        assert waiting.result(PATIENCE) == [(True,)]

    monkeypatch.setattr(instance_module, "time", SimpleNamespace(sleep=refused))
    engine.close()
    assert waiting.done()
    open_engine(tmp_path / "shard", create=False).close()


def test_a_statement_over_a_shard_that_is_closed_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement over several shards raises `DatabaseClosedError` if one of them is closed before it runs."""
    backend = DuckdbBackend(DuckdbOptions())
    engine, other = (backend.open_shard(tmp_path / name, KEYSPACES, create=True) for name in "ab")
    for one in (engine, other):
        put_rows(one, 1, 2)
    open_view = engine._instance.open_view

    def close_and_open_view(*arguments: Any) -> Any:
        other.close()
        return open_view(*arguments)

    monkeypatch.setattr(engine._instance, "open_view", close_and_open_view)
    with pytest.raises(DatabaseClosedError):
        engine.sql("SELECT count(*) FROM things", beside=[other])
    engine.close()


@pytest.mark.parametrize("size", [None, 0, 10])
def test_a_log_that_is_gone_before_it_was_written_into_the_file_is_a_loss(tmp_path: Path, size: int | None) -> None:
    """A missing or truncated log raises `CorruptionError` if the database file doesn't contain the log's writes yet."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, {b"k": b"v"})
    shutil.copytree(tmp_path / "shard", tmp_path / "copy")
    engine.close()
    log = tmp_path / "copy" / "shard.duckdb.wal"
    if size is None:
        log.unlink()
    else:
        os.truncate(log, size)
    with pytest.raises(CorruptionError, match=r"copy/shard.duckdb"):
        open_engine(tmp_path / "copy", create=False)


def test_a_dropped_scan_ends_its_transaction(engine: DuckdbEngine) -> None:
    """A dropped scan ends its transaction, and the engine no longer refers to the scan's view."""
    put(engine, DATA, {(1, 0, number): b"v" for number in range(500)})
    scan = engine.scan(DATA)
    next(scan)
    assert 1 == len(engine._instance._views)
    del scan
    gc.collect()
    assert 0 == len(engine._instance._views)


# --- failures ---------------------------------------------------------------------------------

FULL = """
import contextlib, duckdb, pathlib, resource, sys
from topicstore.contract.engine import DATA, KEYSPACES, WriteBatch
from topicstore.contract.errors import EngineError
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions
resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, resource.RLIM_INFINITY))
backend = DuckdbBackend(DuckdbOptions(log_bytes=int(sys.argv[2])))
path = pathlib.Path(sys.argv[1])
engine = backend.open_shard(path / "full", KEYSPACES, create=True)
other = backend.open_shard(path / "other", KEYSPACES, create=True)
early, kept = engine.snapshot(), other.snapshot()  # DuckDB keeps hold of all files for each of them
if sys.argv[3] == "writing":
    other._writer.begin()  # another thread is in the middle of a write then
acknowledged, told = 0, []
try:
    while True:
        batch = WriteBatch()
        batch.put(DATA, (1, 0, acknowledged), bytes((acknowledged % 256,)) * 50_000)
        engine.write(batch)
        acknowledged += 1
except Exception as error:
    told.append(type(error).__name__)
try:
    engine.get(DATA, (1, 0, 0))
except EngineError as error:
    told.append("Unreadable")
if sys.argv[3] == "writing":
    with contextlib.suppress(duckdb.IOException):  # DuckDB lets go of the full file now, and says what failed there
        other._writer.rollback()
seen = sum(len(chunk) for chunk in engine.scan(DATA))
try:
    engine.close()
except Exception as error:
    told.append(type(error).__name__)
other.close()
print(acknowledged, seen, *told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", ["reading", "writing"])
@pytest.mark.parametrize("log_bytes", [1 << 20, 64 << 20])
def test_a_full_disk_is_reported_and_what_was_acknowledged_is_read(tmp_path: Path, log_bytes: int, other: str) -> None:
    """On a full disk a write raises an error, and every acknowledged write stays readable.

    That holds whether the log can't grow or can't be copied into the database file, and also during a write to another
    shard. With free space again, reopening the shard shows these writes, too.
    """
    command = [sys.executable, "-c", FULL, str(tmp_path), str(log_bytes), other]
    acknowledged, seen, *told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    busy = other == "writing" and log_bytes == 1 << 20  # the file is read before the write to the other shard has ended
    assert (["EngineError", "Unreadable"] if busy else ["StorageFullError"]) == told[: 1 + busy]
    assert int(acknowledged) > 50
    assert int(seen) - int(acknowledged) in (0, 1)  # the last, unacknowledged batch may be in the log
    engine = open_engine(tmp_path / "full", create=False)
    assert list(range(int(seen))) == [key[2] for key, _ in pairs(engine.scan(DATA))]
    assert [] == list(engine.verify())
    engine.close()


def test_a_file_of_nonsense_is_damage(tmp_path: Path) -> None:
    open_engine(tmp_path / "shard").close()
    (tmp_path / "shard" / "shard.duckdb").write_bytes(b"nonsense" * 4_000)
    with pytest.raises(CorruptionError, match=r"shard\.duckdb"):
        open_engine(tmp_path / "shard", create=False)


LOOK = """
import duckdb
from pathlib import Path
from topicstore.contract.engine import KEYSPACES, STATE
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions
engine = DuckdbBackend(DuckdbOptions()).open_reader(Path(arguments[0]), KEYSPACES, alone=True)
say(sum(map(len, engine.scan(STATE))), list(engine.verify()))
engine.close()
del engine
"""


@pytest.mark.parametrize("where", ["owned", "read-only", "of another user"])
def test_a_damaged_log_is_read_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A reader returns the writes before the damage in a log, even in a read-only directory or another user's.

    The reader changes no file of the shard, and leaves no temporary file.
    """
    with tempfile.TemporaryDirectory() as public:
        path, temporary = Path(public, "shard"), Path(public, "temporary")
        temporary.mkdir()
        for directory, mode in ((Path(public), 0o755), (temporary, 0o1777)):
            directory.chmod(mode)
        monkeypatch.setenv("TMPDIR", str(temporary))
        engine = open_engine(path)
        for number in range(20):
            put(engine, STATE, {b"%02d" % number: bytes(50)})
        shutil.copytree(path, Path(public, "copy"))
        engine.close()
        path = Path(public, "copy")
        log = path / "shard.duckdb.wal"
        flip(log, log.stat().st_size * 7 // 10)
        before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir()}
        if where == "owned":
            found = namespaces.run(LOOK, path)
        elif where == "read-only":
            skip_if(namespaces.why_not())
            found = namespaces.run_mounted(namespaces.READ_ONLY, path, 0, LOOK, path)
        else:
            skip_if(namespaces.why_no_other_user(Path(public).parent))
            found = namespaces.run_as_another_user(LOOK, path, shutil.copytree(path, Path(public, "rehearsal")))
        assert 5 <= found[0][0] < 20
        assert [] == found[0][1]
        assert before == {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir()}
        assert [] == list(temporary.iterdir())


def test_a_fork_leaves_what_a_reader_made_to_its_owner(tmp_path: Path) -> None:
    """A forked child that ends doesn't remove the temporary directory from which its parent reads."""
    engine = open_engine(tmp_path / "shard")
    for number in range(20):
        put(engine, STATE, {b"%02d" % number: bytes(50)})
    shutil.copytree(tmp_path / "shard", tmp_path / "copy")
    engine.close()
    log = tmp_path / "copy" / "shard.duckdb.wal"
    flip(log, log.stat().st_size * 7 // 10)
    program = """
import os, sys
from pathlib import Path
from topicstore.contract.engine import KEYSPACES
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions
path = Path(arguments[0])
reader = DuckdbBackend(DuckdbOptions()).open_reader(path, KEYSPACES, alone=True)
child = os.fork()
if not child:
    sys.exit(3)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(path.glob("topicstore-reader-*"))))
reader.close()
say(len(list(path.glob("topicstore-reader-*"))))
"""
    assert [[3, 1], [0]] == namespaces.run(program, tmp_path / "copy")


def skip_if(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


# --- copies and sizes -------------------------------------------------------------------------


def test_a_checkpoint_is_whole_while_snapshots_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is complete even while snapshots opened during it stay open."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, {(1, 0, number): bytes(1_000) for number in range(3_000)})
    views = []

    def run_and_look(connection: duckdb.DuckDBPyConnection, *statement: Any, **rows: Any) -> None:
        views.append(engine.snapshot())
        run(connection, *statement, **rows)

    monkeypatch.setattr(engine_module, "run", run_and_look)
    engine.checkpoint(tmp_path / "copy")
    monkeypatch.undo()
    made = {file.name: file.stat().st_size for file in (tmp_path / "copy").iterdir()}
    assert len(views) > 1
    for view in views:
        view.close()
    engine.close()
    assert made == {file.name: file.stat().st_size for file in (tmp_path / "copy").iterdir()}
    assert ["shard.duckdb"] == list(made)


@pytest.mark.parametrize("gone", ["a range", "keys", "a range, and reclaimed"])
def test_the_room_of_what_was_deleted_is_used_again(tmp_path: Path, gone: str) -> None:
    """The space of deleted rows is reused, so the file stays within a small multiple of its largest content.

    That holds even if the log never grows enough to trigger DuckDB's own checkpoint.
    """
    engine, chance = open_engine(tmp_path / "shard", log_bytes=1 << 30), random.Random(7)
    for number in range(15):
        keys = [(number, 0, position) for position in range(500)]
        put(engine, DATA, {key: chance.randbytes(3_000) for key in keys})
        batch = WriteBatch()
        if gone == "keys":
            batch.change_many(DATA, keys, [None] * len(keys))
        else:
            batch.delete_range(DATA, (number, 0, 0), (number + 1, 0, 0))
        engine.write(batch)
        if "reclaimed" in gone:
            engine.reclaim(DATA, (number, 0, 0), (number + 1, 0, 0))
    assert engine.info().disk_bytes <= 6 * 500 * 3_000  # all puts together are 15 times as large as one generation
    assert [] == pairs(engine.scan(DATA))
    engine.close()


@pytest.mark.slow
def test_overwriting_one_key_does_not_make_the_file_grow(tmp_path: Path) -> None:
    """Overwriting one key many times doesn't make the file grow, because checkpoints drop replaced values."""
    engine = open_engine(tmp_path / "shard", log_bytes=64 << 10)
    for number in range(600):
        put(engine, STATE, {b"tail": b"%d" % number + bytes(1_000)})
    assert 1 == len(pairs(engine.scan(STATE)))
    engine.close()
    assert (tmp_path / "shard" / "shard.duckdb").stat().st_size < 4 * MEGABYTE


def test_the_file_is_of_the_version_that_is_promised(tmp_path: Path) -> None:
    """The file has the storage version of DuckDB 2.0.0, whatever DuckDB version wrote it."""
    open_engine(tmp_path / "shard").close()
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{tmp_path}/shard/shard.duckdb' AS shard (READ_ONLY)").complete()
        query = "SELECT tags['storage_version'] FROM duckdb_databases() WHERE database_name = 'shard'"
        assert [("v2.0.0+",)] == connection.execute(query).fetchall()


def test_a_reader_whose_twin_is_gone_ends_quietly(tmp_path: Path) -> None:
    """A reader of a shard with a damaged log closes without error even if its temporary copy was removed."""
    program = """
import shutil, sys
from pathlib import Path
from topicstore.contract.engine import KEYSPACES, META, WriteBatch
from topicstore.contract.errors import LogDamagedError
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions
from topicstore_conformance.backend.damage import flip

path, backend = Path(sys.argv[1], "shard"), DuckdbBackend(DuckdbOptions())
engine = backend.open_shard(path, KEYSPACES, create=True)
for number in range(3):
    batch = WriteBatch()
    batch.put(META, b"%d" % number, bytes(1000))
    engine.write(batch)
killed = Path(shutil.copytree(path, Path(sys.argv[1], "killed")))
engine.close()
log = killed / "shard.duckdb.wal"
flip(log, log.stat().st_size - 500)
reader = backend.open_reader(killed, KEYSPACES, alone=True)
(twin,) = killed.glob("topicstore-reader-*")
shutil.rmtree(twin)
reader.close()
try:
    backend.open_shard(killed, KEYSPACES, create=False)
except LogDamagedError as damaged:
    backend.repair_log(killed, damaged)
backend.open_shard(killed, KEYSPACES, create=False).close()
print("done")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ("done\n", "") == (ended.stdout, ended.stderr)
