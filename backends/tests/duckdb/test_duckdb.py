"""What only the DuckDB engine does: files, locks, pieces of values, SQL, full disks and damage."""

from __future__ import annotations

import contextlib
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
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Engine, Key, Keyspace, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
    UnsupportedError,
)
from topicstore_backends.memory import MemoryEngine
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
    from collections.abc import Callable, Iterable, Iterator

MEGABYTE = 1 << 20


def open_engine(path: Path, *, create: bool = True, **options: Any) -> DuckdbEngine:
    return DuckdbBackend(DuckdbOptions(**options)).open_shard(path, KEYSPACES, create=create)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DuckdbEngine]:
    opened = open_engine(tmp_path / "shard")
    yield opened
    opened.close()


def put(engine: Engine, keyspace: Keyspace, pairs: Iterable[tuple[Key, bytes]]) -> None:
    batch = WriteBatch()
    for key, value in pairs:
        batch.put(keyspace, key, value)
    engine.write(batch)


def everything(engine: Engine, keyspace: Keyspace) -> list[tuple[Key, bytes]]:
    return [pair for chunk in engine.scan(keyspace) for pair in chunk]


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


@pytest.mark.parametrize("size", [0, 1, 3_999, 4_000, 4_001, 8_000, 100_000])
def test_pieces_make_the_value_again(engine: DuckdbEngine, size: int) -> None:
    """Whatever its size, beside small ones and large ones, by every way of reading."""
    value = random.Random(size).randbytes(size)
    pairs = [((1, 0, 1), b"small"), ((1, 0, 2), value), ((1, 0, 3), b""), ((1, 0, 4), value)]
    put(engine, DATA, pairs)
    assert value == engine.get(DATA, (1, 0, 2))
    assert [value, None, b"", value] == engine.get_many(DATA, [(1, 0, 4), (1, 0, 9), (1, 0, 3), (1, 0, 2)])
    assert pairs == everything(engine, DATA)
    assert pairs[::-1] == [pair for chunk in engine.scan(DATA, reverse=True) for pair in chunk]


@pytest.mark.slow
def test_a_value_of_300_megabytes(engine: DuckdbEngine) -> None:
    """It is stored, read and replaced, within the default memory."""
    value = bytes(range(256)) * (300 * MEGABYTE // 256)
    put(engine, DATA, [((1, 0, 1), value), ((1, 0, 2), b"next")])
    assert value == engine.get(DATA, (1, 0, 1))
    assert [1, 1] == [len(chunk) for chunk in engine.scan(DATA)]
    put(engine, DATA, [((1, 0, 1), b"small")])
    assert [((1, 0, 1), b"small"), ((1, 0, 2), b"next")] == everything(engine, DATA)


@pytest.mark.slow
def test_large_values_need_little_memory(tmp_path: Path) -> None:
    """Twice the memory that DuckDB may use is stored, written into the file and read, a value at a time."""
    engine = open_engine(tmp_path / "shard", memory_bytes=64 * MEGABYTE, log_bytes=16 * MEGABYTE)
    value = random.Random(1).randbytes(16 * MEGABYTE)
    for number in range(8):
        put(engine, DATA, [((1, 0, number), value)])
    assert 8 == sum(len(chunk) for chunk in engine.scan(DATA))
    assert value == engine.get(DATA, (1, 0, 7))
    assert [] == list(engine.verify())
    engine.close()


@pytest.mark.parametrize("held", [False, True])
def test_a_key_keeps_one_value(engine: DuckdbEngine, held: bool) -> None:
    """However often it is put, deleted and put again, in one batch or many, beside a snapshot or not."""
    put(engine, STATE, [(b"k", b"0")])
    snapshot = engine.snapshot() if held else None
    for number in range(30):
        batch = WriteBatch()
        batch.put(STATE, b"k", b"first")
        batch.delete(STATE, b"k")
        batch.put(STATE, b"k", b"%d" % number * (number % 3) * 3_000)
        batch.delete_range(STATE, b"a", b"z")
        engine.write(batch)
    assert [(b"k", b"29" * 6_000)] == everything(engine, STATE)
    if snapshot is not None:
        assert b"0" == snapshot.get(STATE, b"k")
        snapshot.close()


def test_a_scan_beyond_what_is_sorted_at_a_time(engine: DuckdbEngine) -> None:
    """Sixty thousand keys, put in any order, come in theirs, in both directions."""
    numbers = list(range(60_000))
    random.Random(1).shuffle(numbers)
    put(engine, INDEX, [((1, number % 7, number), b"%d" % number) for number in numbers])
    expected = sorted(((1, number % 7, number), b"%d" % number) for number in numbers)
    assert expected == everything(engine, INDEX)
    down = engine.scan(INDEX, (1, 2, 100), (1, 5, 7), reverse=True)
    wanted = [pair for pair in expected if (1, 2, 100) <= pair[0] < (1, 5, 7)]
    assert wanted[::-1] == [pair for chunk in down for pair in chunk]


# --- rows and SQL -----------------------------------------------------------------------------


def test_rows_can_be_queried_in_their_order(engine: DuckdbEngine) -> None:
    """As they were put; parameters count; what is found is an Arrow table."""
    put_rows(engine)
    assert [] == positions(engine)
    put_rows(engine, 5, 3, 4)
    put_rows(engine, 1, text="y")
    assert [5, 3, 4, 1] == positions(engine)
    found = engine.sql("SELECT text, sum(position)::BIGINT AS total FROM things WHERE position > ? GROUP BY 1", [3])
    assert [{"text": "x", "total": 9}] == found.to_pylist()


def test_rows_go_with_their_keys(engine: DuckdbEngine) -> None:
    """By a range and one by one, in the transaction that deletes the pairs; what is put in it stays."""
    put_rows(engine, *range(10))
    put(engine, DATA, [((1, 0, number), b"") for number in range(10)])
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 0, 2), (1, 0, 5))
    batch.delete(DATA, (1, 0, 7))
    batch.put(DATA, (1, 0, 8), b"new")
    batch.put_rows(DATA, "things", table(3), 0)
    engine.write(batch)
    assert [0, 1, 5, 6, 8, 9, 3] == positions(engine)
    assert [0, 1, 5, 6, 8, 9] == [key[2] for key, _ in everything(engine, DATA)]


def test_rows_are_atomic_with_pairs(engine: DuckdbEngine) -> None:
    """If rows can't be appended, nothing of their batch is there."""
    put_rows(engine, 1)
    batch = WriteBatch()
    batch.put(STATE, b"k", b"v")
    batch.put_rows(DATA, "things", table(2).append_column("more", pa.array([1])), 0)
    with pytest.raises(EngineError):
        engine.write(batch)
    assert None is engine.get(STATE, b"k")
    assert [1] == positions(engine)


def test_rows_of_wrong_kinds_are_refused(engine: DuckdbEngine) -> None:
    """In keyspaces of bytes, and under the name of a keyspace; and by engines without SQL."""
    for keyspace, name in ((META, "things"), (DATA, "state")):
        batch = WriteBatch()
        batch.put_rows(keyspace, name, table(1), 0)
        with pytest.raises(InvalidArgumentError):
            engine.write(batch)
    with pytest.raises(UnsupportedError):
        batch.without_rows()


def test_several_shards_are_one_table(tmp_path: Path) -> None:
    """In one statement, also when one of them has no rows yet; engines of other backends are refused."""
    backend = DuckdbBackend(DuckdbOptions())
    first, second, third = (backend.open_shard(tmp_path / name, KEYSPACES, create=True) for name in "abc")
    put_rows(first, 1, 2)
    put_rows(third, 7)
    assert [1, 2, 7] == sorted(positions(first, second, third))
    assert [1, 2, 7] == sorted(positions(second, first, third))
    assert [1, 2] == positions(first)
    other = open_engine(tmp_path / "other")
    for stranger in (other, MemoryEngine(KEYSPACES)):
        with pytest.raises(InvalidArgumentError, match="one backend object"):
            positions(first, stranger)
    for opened in (first, second, third, other):
        opened.close()


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO things SELECT * FROM things",
        "DELETE FROM things",
        "WITH gone AS (DELETE FROM things RETURNING *) SELECT * FROM gone",
        "EXPLAIN ANALYZE DELETE FROM things",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMP TABLE t AS SELECT 1",
        "COPY things TO 'things.csv'",
        "ATTACH 'other.duckdb' AS other",
        "SET threads = 2",
        "CHECKPOINT",
        "BEGIN",
        "SELECT 1; SELECT 2",
        "",
        "SELEC 1",
        "SELECT nothing FROM things",
        "SELECT * FROM nothing",
        "SELECT 'a'::INTEGER",
        "SELECT ? + ?",
        "SELECT * FROM 'missing.parquet'",
        "SELECT * FROM read_csv('missing.csv')",
        "SELECT * FROM read_json('missing*.json')",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "SELECT nextval('missing')",
    ],
)
def test_statements_that_are_not_reads_are_refused(
    engine: DuckdbEngine, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is wrong; nothing has changed, and the engine goes on."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    put_rows(engine, 1, 2)
    with pytest.raises(InvalidArgumentError):
        engine.sql(statement)
    assert before == sorted(tmp_path.iterdir())
    assert [1, 2] == positions(engine)


def test_a_damaged_file_in_a_statement_is_a_mistake_of_the_statement(engine: DuckdbEngine, tmp_path: Path) -> None:
    """The engine's own files are not, nor is a failure that names no file."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(90) + b"\xff\0\0\0PAR1")
    with pytest.raises(InvalidArgumentError, match=r"x\.parquet"):
        engine.sql(f"SELECT * FROM '{tmp_path}/x.parquet'")
    for text in (f'Could not read from file "{tmp_path}/shard/shard.duckdb"', "Could not write all bytes"):
        with pytest.raises(duckdb.IOException), StatementRefused([tmp_path / "shard"]):
            raise duckdb.IOException(text)


# --- files and locks --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a?b", "a\\b"])
def test_a_path_that_duckdb_takes_for_another_is_refused(engine: DuckdbEngine, tmp_path: Path, name: str) -> None:
    """For a checkpoint too, of which nothing is made; other characters are taken."""
    with pytest.raises(InvalidArgumentError, match=r"no \? and no backslash"):
        DuckdbBackend(DuckdbOptions()).check_path(tmp_path / name / "db")
    with pytest.raises(InvalidArgumentError, match=r"no \? and no backslash"):
        engine.checkpoint(tmp_path / name)
    assert not (tmp_path / name).exists()
    engine.checkpoint(tmp_path / "a'*[1]{}%20;#~\n\"é")
    open_engine(tmp_path / "a'*[1]{}%20;#~\n\"é", create=False).close()


def test_other_keyspaces_are_refused(tmp_path: Path) -> None:
    """Of another name or shape."""
    open_engine(tmp_path / "shard").close()
    for keyspace in (Keyspace("other"), Keyspace("state", (4, 8))):
        with pytest.raises(EngineError, match="no keyspace"):
            DuckdbBackend(DuckdbOptions()).open_shard(tmp_path / "shard", [keyspace], create=False)
    open_engine(tmp_path / "shard", create=False).close()


def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    """Of the same backend object or another; the first goes on, and still holds the lock."""
    backend = DuckdbBackend(DuckdbOptions())
    engine = backend.open_shard(tmp_path / "shard", KEYSPACES, create=True)
    for another in (backend, DuckdbBackend(DuckdbOptions())):
        with pytest.raises(EngineError, match="open in this process already"):
            another.open_shard(tmp_path / "shard", KEYSPACES, create=False)
    put(engine, STATE, [(b"k", b"v")])
    assert "EngineError" in opened_elsewhere(tmp_path / "shard")
    engine.close()


def opened_elsewhere(path: Path) -> str:
    """Return what another process says that tries to open a shard."""
    program = (
        "import sys, pathlib; from topicstore.contract.engine import KEYSPACES\n"
        "from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions\n"
        "try:\n"
        "    DuckdbBackend(DuckdbOptions()).open_shard(pathlib.Path(sys.argv[1]), KEYSPACES, create=False).close()\n"
        "    print('opened')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def test_other_processes_are_refused_with_the_reason(tmp_path: Path) -> None:
    """The message names the process that has the file; once that closed it, they can open it."""
    engine = open_engine(tmp_path / "shard")
    told = opened_elsewhere(tmp_path / "shard")
    assert f"PID {os.getpid()}" in told
    assert "no other can read it" in told
    scan = engine.scan(STATE)
    snapshot = engine.snapshot()
    put(engine, STATE, [(b"k", b"v")])
    assert [(b"k", b"v")] == next(scan)
    engine.close()
    assert "opened\n" == opened_elsewhere(tmp_path / "shard")
    snapshot.close()


def test_a_signal_that_interrupts_a_statement_is_told_as_such(engine: DuckdbEngine) -> None:
    """As Ctrl-C is: by `KeyboardInterrupt`, and the engine goes on."""
    put(engine, STATE, [(b"k", b"v")])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            engine.sql("SELECT count(*) FROM range(3_000_000) a, range(3_000_000) b")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert b"v" == engine.get(STATE, b"k")


class Interrupting:
    """Rows that are asked for when a signal arrives."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise self.raised


@pytest.mark.parametrize(
    "given",
    [Interrupting(KeyboardInterrupt()), Interrupting(SystemExit(3)), None],
    ids=["while they are read", "whose handler exits", "while they are looked for"],
)
def test_a_signal_that_interrupts_duckdb_reading_rows_is_told_as_such(engine: DuckdbEngine, given: Any) -> None:
    """DuckDB makes errors of its own of what is raised then, or forgets it and says that there are no rows."""
    put(engine, STATE, [(b"k", b"v")])
    statement = f"INSERT INTO {engine._qualified('state')} FROM rows"
    execute = engine._writer.execute if given is None else partial(run, engine._writer, rows=given)
    with pytest.raises(KeyboardInterrupt), engine._translated:
        execute(statement)
    assert b"v" == engine.get(STATE, b"k")


class Root:
    """DuckDB's first connection, which refuses a second thread; one that asks for a cursor stays until it is let go."""

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


def test_closing_waits_for_who_begins_to_read(tmp_path: Path) -> None:
    """And gives everything back: another can open the file."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, [(b"k", b"v")])
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
    """Say whether a thread is within `View.close`: there it waits, or has gone on to interrupt."""
    frame = sys._current_frames().get(thread[0]) if thread else None
    while frame is not None and frame.f_code is not View.close.__code__:
        frame = frame.f_back
    return frame is not None


class Ending:
    """A view's connection that can be held while it is closed, as DuckDB holds it: nobody may interrupt it then."""

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
    """As when a shard is closed at the moment at which a read ends; both return when it is closed."""
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
    """A thread that got it just before may be in a call; the engine closes when that has ended."""
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
    """Its tables are gone by then, which is no fault of the statement."""
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
    """The file alone holds nothing then, not even its tables."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, [(b"k", b"v")])
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
    """And is forgotten by the engine."""
    put(engine, DATA, [((1, 0, number), b"v") for number in range(500)])
    scan = engine.scan(DATA)
    next(scan)
    assert 1 == len(engine._instance._views)
    del scan
    gc.collect()
    assert 0 == len(engine._instance._views)


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    """What it does at its end, and what it drops, touches neither the file nor the log."""
    program = (
        "import gc, os, pathlib, sys; from topicstore.contract.engine import KEYSPACES, STATE, WriteBatch\n"
        "from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "engine = DuckdbBackend(DuckdbOptions()).open_shard(path, KEYSPACES, create=True)\n"
        "batch = WriteBatch(); batch.put(STATE, b'k', b'v'); engine.write(batch)\n"
        "before = {file.name: file.read_bytes() for file in path.iterdir()}\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del engine; gc.collect(); sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert before == {file.name: file.read_bytes() for file in path.iterdir()}\n"
        "assert engine.get(STATE, b'k') == b'v'\n"
        "engine.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "forked")], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": "many"}, {"memory_bytes": 1}, {"log_bytes": -1}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """By value and by type."""
    with pytest.raises((TypeError, ValueError)):
        DuckdbOptions(**options)


def test_a_name_with_quotes_is_a_name(tmp_path: Path) -> None:
    """Of a directory."""
    engine = open_engine(tmp_path / 'o\'clock "now"')
    put(engine, STATE, [(b"k", b"v")])
    assert b"v" == engine.get(STATE, b"k")
    engine.close()


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
def test_a_full_disk_is_told_and_what_was_acknowledged_is_read(tmp_path: Path, log_bytes: int, other: str) -> None:
    """Whether the log can't grow or can't be written into the file; also after an opening with room again.

    And whatever goes on in another shard: at the latest after that DuckDB gives the file back.
    """
    command = [sys.executable, "-c", FULL, str(tmp_path), str(log_bytes), other]
    acknowledged, seen, *told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    busy = other == "writing" and log_bytes == 1 << 20  # the file is needed again before the other write has ended
    assert (["EngineError", "Unreadable"] if busy else ["StorageFullError"]) == told[: 1 + busy]
    assert int(acknowledged) > 50
    assert int(seen) - int(acknowledged) in (0, 1)  # the last batch may be in the log: it was not acknowledged
    engine = open_engine(tmp_path / "full", create=False)
    assert list(range(int(seen))) == [key[2] for key, _ in everything(engine, DATA)]
    assert [] == list(engine.verify())
    engine.close()


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_told_by_readers_and_by_verify(tmp_path: Path) -> None:
    """Wherever a bit is flipped: at the opening, or by reading and by verify; the message names the file."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, [((1, 0, number), random.Random(number).randbytes(1_000)) for number in range(3_000)])
    put_rows(engine, *range(3_000))
    good = everything(engine, DATA)
    engine.close()
    outcomes = []
    for number in range(12):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "shard", copy)
        flip(copy / "shard.duckdb", (number + 0.5) / 12)
        outcomes.append(outcome(copy, good))
    assert {"harmless", "noticed", "not opened"}.issuperset(outcomes)
    assert outcomes.count("harmless") <= 6


def outcome(path: Path, good: list[tuple[Key, bytes]]) -> str:
    """Open a damaged shard and read it; return what came of it."""
    try:
        engine = open_engine(path, create=False)
    except CorruptionError as error:
        return "not opened" if str(path) in str(error) else str(error)
    with contextlib.closing(engine):
        damages = list(engine.verify())
        try:
            right = good == everything(engine, DATA) and list(range(3_000)) == positions(engine)
        except CorruptionError as error:
            return "noticed" if damages and str(path) in str(error) else f"{error}, {damages}"
        return "harmless" if right and not damages else f"wrong, {damages}"


def test_a_damaged_log_is_refused_and_one_cut_short_is_whole_batches(tmp_path: Path) -> None:
    """As a power failure leaves it: everything before the cut, and nothing of half a batch."""
    engine = open_engine(tmp_path / "shard")
    for number in range(20):
        put(engine, STATE, [(b"%02d/%d" % (number, each), bytes(50)) for each in range(5)])
    log = tmp_path / "shard" / "shard.duckdb.wal"
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "shard", copy)
    content = log.read_bytes()
    engine.close()
    (copy / log.name).write_bytes(content[: int(len(content) * 0.7)])
    engine = open_engine(copy, create=False)
    found = [key for key, _ in everything(engine, STATE)]
    assert 5 <= len(found) < 100
    assert [b"%02d/%d" % (number, each) for number in range(len(found) // 5) for each in range(5)] == found
    engine.close()
    shutil.rmtree(copy)
    copy.mkdir()
    shutil.copy(tmp_path / "shard" / "shard.duckdb", copy)
    (copy / "shard.duckdb").write_bytes(b"nonsense" * 4_000)
    with pytest.raises(CorruptionError, match=r"shard\.duckdb"):
        open_engine(copy, create=False)


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
def test_a_damaged_log_is_looked_at_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What comes before the damage is read, in whatever directory; nothing is left there or among temporary files."""
    with tempfile.TemporaryDirectory() as public:
        path, temporary = Path(public, "shard"), Path(public, "temporary")
        temporary.mkdir()
        for directory, mode in ((Path(public), 0o755), (temporary, 0o1777)):
            directory.chmod(mode)
        monkeypatch.setenv("TMPDIR", str(temporary))
        engine = open_engine(path)
        for number in range(20):
            put(engine, STATE, [(b"%02d" % number, bytes(50))])
        shutil.copytree(path, Path(public, "copy"))
        engine.close()
        path = Path(public, "copy")
        flip(path / "shard.duckdb.wal", 0.7)
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
    """The twin of a damaged file, which the parent goes on reading, is there when the child has ended."""
    engine = open_engine(tmp_path / "shard")
    for number in range(20):
        put(engine, STATE, [(b"%02d" % number, bytes(50))])
    shutil.copytree(tmp_path / "shard", tmp_path / "copy")
    engine.close()
    flip(tmp_path / "copy" / "shard.duckdb.wal", 0.7)
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


def test_statements_of_other_threads_end_with_the_engine(engine: DuckdbEngine) -> None:
    """A snapshot and a scan of one that was closed say so."""
    put(engine, STATE, [(b"k", b"v")])
    snapshot = engine.snapshot()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: snapshot.get(STATE, b"k"),
        lambda: engine.sql("SELECT 1"),
        lambda: list(engine.verify()),
    ]
    for call in calls:
        with pytest.raises(DatabaseClosedError):
            call()


# --- copies and sizes -------------------------------------------------------------------------


def test_a_checkpoint_is_independent(tmp_path: Path) -> None:
    """It has pairs and rows as they were, is a shard by itself, and the first goes on."""
    engine = open_engine(tmp_path / "shard")
    put(engine, META, [(b"k", b"1" * 9_000)])
    put_rows(engine, 3, 1, 2)
    engine.checkpoint(tmp_path / "copy")
    put(engine, META, [(b"k", b"2")])
    put_rows(engine, 4)
    with pytest.raises(EngineError, match="exists"):
        engine.checkpoint(tmp_path / "copy")
    copy = open_engine(tmp_path / "copy", create=False)
    put_rows(copy, 9)
    assert (b"1" * 9_000, b"2") == (copy.get(META, b"k"), engine.get(META, b"k"))
    assert ([3, 1, 2, 9], [3, 1, 2, 4]) == (positions(copy), positions(engine))
    copy.close()
    engine.close()
    assert ["shard.duckdb"] == [file.name for file in (tmp_path / "copy").iterdir()]


def test_a_checkpoint_is_whole_whoever_reads_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began to read while it was made, and goes on, keeps nothing of it back."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, [((1, 0, number), bytes(1_000)) for number in range(3_000)])
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


def test_an_empty_shard_is_lean(tmp_path: Path) -> None:
    """Less than a megabyte once closed, and what it says of its size is right."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, [(b"k", b"v")])
    on_disk = sum(file.stat().st_size for file in (tmp_path / "shard").iterdir())
    assert on_disk == engine.info().disk_bytes
    engine.close()
    assert ["shard.duckdb"] == [file.name for file in (tmp_path / "shard").iterdir()]
    assert (tmp_path / "shard" / "shard.duckdb").stat().st_size <= 2 * MEGABYTE


@pytest.mark.parametrize("gone", ["a range", "keys", "a range, and reclaimed"])
def test_the_room_of_what_was_deleted_is_used_again(tmp_path: Path, gone: str) -> None:
    """The file stays a few times as large as what it held at once, also if its log never grows large."""
    engine, chance = open_engine(tmp_path / "shard", log_bytes=1 << 30), random.Random(7)
    for number in range(30):
        keys = [(number, 0, position) for position in range(500)]
        put(engine, DATA, [(key, chance.randbytes(3_000)) for key in keys])
        batch = WriteBatch()
        if gone == "keys":
            batch.change_many(DATA, keys, [None] * len(keys))
        else:
            batch.delete_range(DATA, (number, 0, 0), (number + 1, 0, 0))
        engine.write(batch)
        if "reclaimed" in gone:
            engine.reclaim(DATA, (number, 0, 0), (number + 1, 0, 0))
    assert engine.info().disk_bytes <= 6 * 500 * 3_000  # 30 times as much was put
    assert [] == everything(engine, DATA)
    engine.close()


@pytest.mark.slow
def test_overwriting_one_key_costs_no_more_and_no_more(tmp_path: Path) -> None:
    """What is replaced doesn't pile up in the file: checkpoints drop it."""
    engine = open_engine(tmp_path / "shard", log_bytes=64 << 10)
    for number in range(600):
        put(engine, STATE, [(b"tail", b"%d" % number + bytes(1_000))])
    assert 1 == len(everything(engine, STATE))
    engine.close()
    assert (tmp_path / "shard" / "shard.duckdb").stat().st_size < 4 * MEGABYTE


def test_the_file_is_of_the_version_that_is_promised(tmp_path: Path) -> None:
    """DuckDB 2.0.0 can read it, whatever version wrote it."""
    open_engine(tmp_path / "shard").close()
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{tmp_path}/shard/shard.duckdb' AS shard (READ_ONLY)").complete()
        query = "SELECT tags['storage_version'] FROM duckdb_databases() WHERE database_name = 'shard'"
        assert [("v2.0.0+",)] == connection.execute(query).fetchall()


def test_a_reader_whose_twin_is_gone_ends_quietly(tmp_path: Path) -> None:
    """Anyone may remove the twin of a file with a damaged log; its reader may go after that."""
    program = """
import shutil, sys
from pathlib import Path
from topicstore.contract.engine import KEYSPACES, META, WriteBatch
from topicstore.contract.errors import LogDamagedError
from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions

path, backend = Path(sys.argv[1], "shard"), DuckdbBackend(DuckdbOptions())
engine = backend.open_shard(path, KEYSPACES, create=True)
for number in range(3):
    batch = WriteBatch()
    batch.put(META, b"%d" % number, bytes(1000))
    engine.write(batch)
killed = Path(shutil.copytree(path, Path(sys.argv[1], "killed")))
engine.close()
log = killed / "shard.duckdb.wal"
data = bytearray(log.read_bytes())
data[-500] ^= 1
log.write_bytes(data)
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
