"""Tests of behaviour that only the LevelDB engine has: hidden ranges, files, and faults of plyvel."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    KEYSPACES,
    STATE,
    Key,
    Keyspace,
    WriteBatch,
)
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    StorageFullError,
)
from topicstore_conformance.backend.crashes import open_killed
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.backend.faults import full_disk
from topicstore_conformance.backend.fixtures import pairs, put, remove
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.pairs import absent

pytest.importorskip("plyvel", reason=absent().get("leveldb", ""))

import plyvel
from topicstore_backends.leveldb import LeveldbBackend, LeveldbEngine, LeveldbOptions, scans
from topicstore_backends.leveldb import engine as engine_module
from topicstore_backends.leveldb.keys import HiddenRanges

if TYPE_CHECKING:
    from collections.abc import Iterable

WHOLE = (1, 0, 0), (1, 1, 0)


def open_engine(path: Path, *, create: bool = True, **options: Any) -> LeveldbEngine:
    return LeveldbBackend(LeveldbOptions(**options)).open_shard(path, KEYSPACES, create=create)


def numbered(count: int, size: int) -> dict[tuple[int, int, int], bytes]:
    return {(1, 0, number): random.Random(number).randbytes(size) for number in range(count)}


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def stored_keys(engine: LeveldbEngine) -> int:
    """Return the number of keys in the keyspace DATA that LevelDB holds, including hidden keys."""
    return len(list(engine._database.iterator(start=b"\x12", stop=b"\x13", include_value=False)))


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in another process, which imports this module."""
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_leveldb import *\n"
    command = [sys.executable, "-c", begin + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


# --- opening and closing ------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 100, 200_000])
def test_a_log_that_begins_with_nothing_or_half_a_write_is_read(tmp_path: Path, size: int | None) -> None:
    """A shard opens after a kill that left an empty write or half of a write in the log."""
    first, second = numbered(2, 50).items()
    with closing(open_engine(tmp_path / "shard")) as engine:
        put(engine, DATA, dict([first]))
    with closing(open_engine(tmp_path / "shard", create=False)) as engine:
        if size is None:
            engine.write(WriteBatch(), sync=True)
        else:
            put(engine, DATA, {(1, 0, 9): random.Random(size).randbytes(size)})
        shutil.copytree(tmp_path / "shard", tmp_path / "killed")
    [log] = (log for log in files(tmp_path / "killed", ".log") if log.stat().st_size)
    if size is not None:
        os.truncate(log, log.stat().st_size // 2)
    with closing(open_killed(LeveldbBackend(LeveldbOptions()), tmp_path / "killed")) as engine:
        put(engine, DATA, dict([second]))
        assert dict(pairs(engine.scan(DATA))) == dict([first, second])


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    """A LevelDB database without the format record, or with other keyspaces, is refused and not changed."""
    with plyvel.DB(str(tmp_path / "foreign"), create_if_missing=True) as foreign:
        foreign.put(b"k", b"v")
    with pytest.raises(EngineError, match="not one of topicstore's"):
        open_engine(tmp_path / "foreign")
    LeveldbBackend(LeveldbOptions()).open_shard(tmp_path / "other", [STATE, DATA], create=True).close()
    with pytest.raises(EngineError, match=r"holds topicstore leveldb 1, state, data 4 8 8; expected .*, meta, "):
        open_engine(tmp_path / "other")
    with plyvel.DB(str(tmp_path / "foreign")) as foreign:
        assert list(foreign) == [(b"k", b"v")]


def test_iterators_and_snapshots_are_released(tmp_path: Path) -> None:
    """A scan releases its iterator when it ends, is closed or is dropped; a snapshot is released after its last use."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(500, 100))
    ended, closed, dropped, snapshot = (
        engine.scan(DATA, limit=3),
        engine.scan(DATA),
        engine.scan(DATA),
        engine.snapshot(),
    )
    within = snapshot.scan(DATA)
    for scan in (ended, closed, dropped, within):
        next(scan)
    assert len(engine._instance._given) == 4
    closed.close()  # type: ignore[attr-defined]
    del dropped, scan
    assert len(engine._instance._given) == 2
    del snapshot
    assert len(pairs(within)) == 500 - 16
    del within
    assert not engine._instance._given
    engine.close()


def test_a_fork_leaves_what_a_reader_made_to_its_owner(tmp_path: Path) -> None:
    """A forked child that ends doesn't remove the directory of links from which its parent reads."""
    open_engine(tmp_path / "shard").close()
    program = (
        "reader = LeveldbBackend(LeveldbOptions()).open_reader(Path(sys.argv[1]), KEYSPACES, alone=True)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
        "print(reader._path.is_dir())\n"
        "path = reader._path\n"
        "reader.close()\n"
        "del reader\n"
        "print(path.is_dir())\n"
    )
    done = run(program, tmp_path / "shard")
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stderr


# --- ranges --------------------------------------------------------------------------


def spans_without(spans: list[tuple[int, int]], keys: set[int]) -> set[int]:
    return {number for start, end in spans for number in range(start, end)} - keys


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(SPANS, st.sets(st.integers(0, 40), max_size=12))
def test_hidden_ranges_are_sets(spans: list[tuple[int, int]], keys: set[int]) -> None:
    """Hidden ranges are merged if they overlap and split around written keys; they stay ascending and disjoint."""
    hidden = HiddenRanges((bytes([start]), bytes([end])) for start, end in spans).without(bytes([k]) for k in keys)
    expected = spans_without(spans, keys)
    assert expected == {number for number in range(41) if hidden.around(bytes([number]))}
    flat = [end for span in hidden for end in span]
    assert flat == sorted(set(flat))
    assert bool(expected) <= bool(hidden)


@pytest.mark.parametrize("kind", [scans.Scan, scans.Past])
def test_what_a_signal_kept_from_being_made_is_collected(kind: type[Any]) -> None:
    """An object can be garbage-collected if a signal interrupted its constructor before the first attribute was set."""
    kind.__new__(kind).__del__()


@pytest.fixture
def wide(tmp_path: Path) -> Iterable[LeveldbEngine]:
    """Return an engine with 60,000 keys in table files and in the write buffer."""
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=1 << 20)
    for part in range(60):
        put(engine, DATA, {(1, 0, part * 1000 + number): bytes(100) for number in range(1000)})
    put(engine, DATA, {(2, 0, 0): b"neighbour"})
    yield engine
    engine.close()


def test_a_wide_range_is_hidden_and_then_removed(wide: LeveldbEngine) -> None:
    """Deleting a large range writes a small batch that hides the range.

    Later writes gradually remove the hidden keys, even after the shard is opened again.
    """
    engine, path = wide, wide._path
    log = sum(file.stat().st_size for file in files(path, ".log"))
    remove(engine, DATA, *WHOLE)
    assert sum(file.stat().st_size for file in files(path, ".log")) < log + 1000
    assert pairs(engine.scan(DATA)) == [((2, 0, 0), b"neighbour")] == pairs(engine.scan(DATA, reverse=True))
    assert None is engine.get(DATA, (1, 0, 5))
    for number in range(10):
        put(engine, DATA, {(1, 0, number * 3000): b"again"})
    left = stored_keys(engine)
    assert 58_000 < left < 60_001
    engine.close()
    engine = open_engine(path, create=False)
    assert [((1, 0, number * 3000), b"again") for number in range(10)] == pairs(engine.scan(DATA, *WHOLE))
    for _ in range(40):
        put(engine, INDEX, numbered(1000, 1))
    assert stored_keys(engine) == 11
    assert engine.info().details["hidden_ranges"] == 0
    engine.close()


def test_reclaim_frees_the_disk_space(wide: LeveldbEngine) -> None:
    """`reclaim` frees all disk space of a deleted range, without a further write."""
    full = wide.info().disk_bytes
    assert full > 6_000_000
    remove(wide, DATA, *WHOLE)
    wide.reclaim(DATA, *WHOLE)
    tables = sum(file.stat().st_size for file in files(wide._path, ".ldb"))
    assert tables < 10_000
    assert stored_keys(wide) == 1
    assert pairs(wide.scan(DATA)) == [((2, 0, 0), b"neighbour")]


@pytest.mark.parametrize("keyspace", [DATA, KEYS])
def test_reclaim_reaches_what_was_never_written_out(tmp_path: Path, keyspace: Keyspace) -> None:
    """`reclaim` frees the space of keys that were put and deleted while in the write buffer, and keeps other keys."""
    engine = open_engine(tmp_path / "shard")

    def key(generation: int, number: int) -> Key:
        return (generation, 0, number) if keyspace is DATA else b"%c\0%08d" % (generation, number)

    start, end = ((1, 0, 0), (2, 0, 0)) if keyspace is DATA else (b"\1", b"\2")
    kept = [(key(0, 0), b"before"), (start, b"first"), (key(1, 7), b"within"), (end, b"behind")]
    if keyspace is KEYS:
        kept[2:2] = [(start + b"\0", b"second")]
    for _ in range(2):
        put(engine, keyspace, {key(1, number): random.Random(number).randbytes(1000) for number in range(5000)})
        remove(engine, keyspace, start, end)
        put(engine, keyspace, dict(kept))
        engine.reclaim(keyspace, start, end)
        assert engine.info().disk_bytes < 100_000
        assert kept == pairs(engine.scan(keyspace))
    engine.close()


def test_a_range_with_damage_can_be_deleted(tmp_path: Path) -> None:
    """A range with unreadable keys can be deleted: these keys stay hidden, even after the shard is opened again."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(3000, 1000))
    engine.close()
    open_engine(tmp_path / "shard").close()  # closing and opening again writes the log into a table file
    (table,) = files(tmp_path / "shard", ".ldb")
    flip(table, table.stat().st_size // 2)
    engine = open_engine(tmp_path / "shard", create=False)
    remove(engine, DATA, *WHOLE)
    for number in range(5):
        put(engine, DATA, {(1, 0, number): b"again"})
    assert len(pairs(engine.scan(DATA))) == 5
    engine.close()
    engine = open_engine(tmp_path / "shard", create=False)
    assert len(pairs(engine.scan(DATA))) == 5
    assert engine.info().details["hidden_ranges"] > 0
    engine.close()


# --- logs and tables -----------------------------------------------------------------------


def test_flush_log_syncs_every_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flush_log` and a synced write fsync every log, and the directory if a log was created since the last call."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    if sys.platform != "linux":
        pytest.skip("needs Linux: names of open files are read from /proc")
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=1 << 20)
    monkeypatch.setattr(os, "fsync", note)
    put(engine, DATA, numbered(10, 10))
    assert synced == []
    engine.flush_log()
    assert sorted(synced) == sorted(["shard", *(log.name for log in files(tmp_path / "shard", ".log"))])
    for _ in range(3):
        put(engine, DATA, numbered(900, 1000))
    synced.clear()
    engine.write(WriteBatch(), sync=True)
    assert {files(tmp_path / "shard", ".log")[-1].name, "shard"} <= set(synced)
    synced.clear()
    engine.flush_log()
    assert "shard" not in synced
    engine.close()


def test_close_syncs_the_table_that_an_ended_compaction_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tmp_path)
    put(engine, DATA, numbered(100, 10))
    engine.reclaim(DATA, *WHOLE)
    assert files(tmp_path, ".ldb")
    (tmp_path / "999999.ldb").write_bytes(b"the beginning of a table")
    synced: list[str] = []

    def sync(path: Path) -> None:
        with pytest.raises(DatabaseClosedError):  # the engine is already closed, so that no compaction writes
            engine.get(DATA, (0, 0, 0))
        synced.append(path.relative_to(tmp_path).name)

    monkeypatch.setattr(engine_module, "sync", sync)
    engine.close()
    assert ["999999.ldb", ""] == synced


# --- damage --------------------------------------------------------------------------


def test_verify_names_every_damaged_place_once(tmp_path: Path) -> None:
    """Verification continues after damage, reports each damaged place once, and reports nothing for intact tables."""
    for generation in (1, 2, 3):
        engine = open_engine(tmp_path / "shard")
        put(engine, DATA, {(generation, 0, number): random.Random(number).randbytes(1000) for number in range(500)})
        assert list(engine.verify()) == []
        engine.close()
    open_engine(tmp_path / "shard").close()
    for table in files(tmp_path / "shard", ".ldb"):
        flip(table, table.stat().st_size // 2)
    engine = open_engine(tmp_path / "shard")
    assert [f"({generation}, 0, " in sentence for generation, sentence in enumerate(engine.verify(), 1)] == [True] * 3
    engine.close()


def test_a_missing_table_is_reported_at_opening(tmp_path: Path) -> None:
    """A missing table raises `CorruptionError` at opening, with the table's path and a hint to repair."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(1000, 100))
    engine.close()
    open_engine(tmp_path / "shard").close()
    (table,) = files(tmp_path / "shard", ".ldb")
    table.unlink()
    with pytest.raises(CorruptionError, match=r"missing files.*repair_db") as caught:
        open_engine(tmp_path / "shard")
    assert str(table) == caught.value.place


def test_leaps_backwards_stay_in_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reverse scan that seeks past a hidden range returns no keys below the scan's start, unlike plyvel's seek."""
    monkeypatch.setattr(engine_module, "MOST_DELETES", 2)
    monkeypatch.setattr(engine_module, "REMOVED_A_WRITE", 0)
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(100, 1))
    remove(engine, DATA, (1, 0, 20), (1, 0, 80))
    assert stored_keys(engine) == 100

    def numbers(start: int, end: int) -> list[int]:
        return [key[2] for key, _ in pairs(engine.scan(DATA, (1, 0, start), (1, 0, end), reverse=True))]

    assert numbers(0, 100) == [*range(99, 79, -1), *range(19, -1, -1)]
    assert numbers(20, 90) == numbers(25, 90) == list(range(89, 79, -1))
    assert numbers(19, 81) == [80, 19]
    assert numbers(20, 80) == numbers(30, 40) == []
    engine.close()


def test_a_failed_write_is_the_last(tmp_path: Path) -> None:
    """After a failed write the engine refuses writes until the shard is opened again."""
    engine = open_engine(tmp_path / "shard")
    with full_disk(), pytest.raises(StorageFullError, match="File too large"):
        put(engine, STATE, {b"k": b"v"})
    with pytest.raises(EngineError, match="open the shard again"):
        put(engine, STATE, {b"k": b"v"})
    engine.close()


def test_no_log_is_left_empty_for_another(tmp_path: Path) -> None:
    """Before LevelDB starts a new log to compact, the previous log has a write, because an empty log counts as lost."""
    engine = open_engine(tmp_path / "shard")
    sizes: list[int] = []

    class Watched:
        def compact_range(self, **span: bytes) -> None:
            sizes.append(files(tmp_path / "shard", ".log")[-1].stat().st_size)
            database.compact_range(**span)

        def __getattr__(self, name: str) -> Any:
            return getattr(database, name)

    database, engine._database = engine._database, Watched()
    for _ in range(3):
        engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
    engine.close()
    assert 6 == len(sizes)
    assert all(size > 0 for size in sizes)
