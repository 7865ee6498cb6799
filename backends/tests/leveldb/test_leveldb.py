"""What only the LevelDB engine does: hidden ranges, files, crashes, damage, and plyvel's traps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    KEYSPACES,
    META,
    STATE,
    Engine,
    Key,
    Keyspace,
    Reader,
    WriteBatch,
)
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    LogDamagedError,
)
from topicstore_conformance.backend.fixtures import remove
from topicstore_conformance.faults.threads import PATIENCE, Beside, wait_until
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


def open_repaired(path: Path) -> LeveldbEngine:
    backend = LeveldbBackend(LeveldbOptions())
    try:
        return backend.open_shard(path, KEYSPACES, create=False)
    except LogDamagedError as damaged:
        backend.repair_log(path, damaged)
    return backend.open_shard(path, KEYSPACES, create=False)


def open_damaged(path: Path, *, salvage: bool) -> LeveldbEngine:
    backend = LeveldbBackend(LeveldbOptions())
    with pytest.raises(LogDamagedError) as damaged:
        backend.open_shard(path, KEYSPACES, create=False)
    return backend.open_damaged(path, KEYSPACES, damaged.value, salvage=salvage)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.stem != "LOG"}


def put(engine: Engine, keyspace: Keyspace, pairs: Iterable[tuple[Key, bytes]]) -> None:
    batch = WriteBatch()
    for key, value in pairs:
        batch.put(keyspace, key, value)
    engine.write(batch)


def numbered(count: int, size: int) -> list[tuple[Key, bytes]]:
    return [((1, 0, number), random.Random(number).randbytes(size)) for number in range(count)]


def pairs_of(chunks: Iterable[list[tuple[Key, bytes]]]) -> list[tuple[Key, bytes]]:
    return [pair for chunk in chunks for pair in chunk]


def damage(path: Path, where: float = 0.5) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def open_files(directory: Path) -> list[Path]:
    """Return which files of a directory this process has open, where the system tells."""
    opened: list[Path] = []
    for descriptor in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with suppress(FileNotFoundError):  # that of the listing itself
            opened.append(descriptor.readlink())
    return [file for file in opened if directory in file.parents]


def stored_keys(engine: LeveldbEngine) -> int:
    """Return how many keys of DATA LevelDB holds, hidden ones too."""
    return len(list(engine._database.iterator(start=b"\x12", stop=b"\x13", include_value=False)))


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program beside this module in another process."""
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_leveldb import *\n"
    command = [sys.executable, "-c", begin + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


# --- opening and closing ------------------------------------------------------------


def test_reopening_finds_everything(tmp_path: Path) -> None:
    """From the log, and from table files of either compression; options may change each time."""
    for opening, compression in enumerate(("none", "snappy", "none")):
        engine = open_engine(tmp_path / "shard", compression=compression, block_bytes=1024 << opening)
        assert [((1, 0, number), b"v") for number in range(opening)] == pairs_of(engine.scan(DATA))
        put(engine, DATA, [((1, 0, opening), b"v")])
        engine.close()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    """One without the format record, and one with other keyspaces; neither is changed."""
    with plyvel.DB(str(tmp_path / "foreign"), create_if_missing=True) as foreign:
        foreign.put(b"k", b"v")
    with pytest.raises(EngineError, match="not one of topicstore's"):
        open_engine(tmp_path / "foreign")
    LeveldbBackend(LeveldbOptions()).open_shard(tmp_path / "other", [STATE, DATA], create=True).close()
    with pytest.raises(EngineError, match=r"holds topicstore leveldb 1, state, data 4 8 8; expected .*, meta, "):
        open_engine(tmp_path / "other")
    with plyvel.DB(str(tmp_path / "foreign")) as foreign:
        assert list(foreign) == [(b"k", b"v")]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"write_buffer_bytes": 0},
        {"cache_bytes": -1},
        {"max_open_files": 1},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(ValueError, match=next(iter(options))):
        LeveldbOptions(**options)


def test_what_was_read_is_given_back(tmp_path: Path) -> None:
    """At the end of a scan, when it is closed or dropped, and when a snapshot is."""
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
    assert len(pairs_of(within)) == 500 - 16
    del within
    assert not engine._instance._given
    engine.close()


def test_closing_beside_threads_that_do_everything(tmp_path: Path) -> None:
    """Whatever they are inside of, the process lives, and they end with `DatabaseClosedError`."""
    program = (
        "from threading import Event, Thread\n"
        "for opening in range(12):\n"
        "    engine = open_engine(Path(sys.argv[1]), write_buffer_bytes=1 << 20)\n"
        "    put(engine, DATA, numbered(2000, 100))\n"
        "    ends, started = [], Event()\n"
        "    def work(do):\n"
        "        try:\n"
        "            while True:\n"
        "                do()\n"
        "                started.set()\n"
        "        except Exception as error:\n"
        "            ends.append(type(error).__name__)\n"
        "    shared = engine.snapshot()\n"
        "    jobs = [\n"
        "        lambda: pairs_of(engine.scan(DATA)),\n"
        "        lambda: next(engine.snapshot().scan(DATA, reverse=True)),\n"
        "        lambda: shared.get_many(DATA, [(1, 0, number) for number in range(50)]),\n"
        "        lambda: put(engine, INDEX, numbered(300, 1000)),\n"
        "        lambda: engine.reclaim(DATA, *WHOLE),\n"
        "        lambda: (engine.get(DATA, (1, 0, 1)), engine.info(), list(engine.verify())),\n"
        "        lambda: engine.flush_log(),\n"
        "    ]\n"
        "    threads = [Thread(target=work, args=(job,)) for job in jobs]\n"
        "    for thread in threads: thread.start()\n"
        "    assert started.wait(PATIENCE)\n"
        "    for _ in range(opening): engine.get(DATA, (1, 0, 1))\n"
        "    engine.close()\n"
        "    for thread in threads: thread.join()\n"
        "    assert ends == ['DatabaseClosedError'] * len(jobs), ends\n"
        "print('alive')\n"
    )
    done = run(program, tmp_path / "shard")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_fork_leaves_the_database_alone(tmp_path: Path) -> None:
    """The child's engine is closed; the parent's goes on, and its lock holds."""
    program = (
        "engine = open_engine(Path(sys.argv[1]))\n"
        "put(engine, DATA, numbered(500, 100))\n"
        "scan, snapshot = engine.scan(DATA), engine.snapshot()\n"
        "first = next(scan)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    for call in (lambda: next(scan), lambda: engine.get(DATA, (1, 0, 1)), engine.snapshot):\n"
        "        with pytest.raises(DatabaseClosedError):\n"
        "            call()\n"
        "    engine.close()\n"
        "    snapshot.close()\n"
        "    del engine, scan, snapshot\n"
        "    sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
        "assert len(first + pairs_of(scan)) == 500\n"
        "put(engine, STATE, [(b'k', b'v')])\n"
        "engine.close()\n"
        "print('well')\n"
    )
    done = run(program, tmp_path / "shard")
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_a_fork_leaves_what_a_reader_made_to_its_owner(tmp_path: Path) -> None:
    """The directory of links, from which the parent reads on, is there when the child has ended."""
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
    """United, split around keys, ascending and apart, whatever overlaps or is empty."""
    hidden = HiddenRanges((bytes([start]), bytes([end])) for start, end in spans).without(bytes([k]) for k in keys)
    expected = spans_without(spans, keys)
    assert expected == {number for number in range(41) if hidden.around(bytes([number]))}
    flat = [end for span in hidden for end in span]
    assert flat == sorted(set(flat))
    assert bool(expected) <= bool(hidden)


class Twin:
    """An engine beside a dict, with few keys deleted at once, so that ranges are hidden."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = open_engine(path)
        self.model: dict[Key, bytes] = {}

    def write(self, changes: list[tuple[int, int | None]], ranges: list[tuple[int, int]]) -> None:
        batch = WriteBatch()
        for start, end in ranges:
            batch.delete_range(DATA, (1, 0, start), (1, 0, end))
            self.model = {key: value for key, value in self.model.items() if not start <= key[2] < end}
        for number, value in changes:
            key = (1, 0, number)
            self.model.pop(key, None)
            if value is None:
                batch.delete(DATA, key)
            else:
                batch.put(DATA, key, b"%d" % value)
                self.model[key] = b"%d" % value
        self.engine.write(batch)

    def reopen(self) -> None:
        self.engine.close()
        self.engine = open_engine(self.path, create=False)


CHANGES = st.lists(st.tuples(st.integers(0, 40), st.none() | st.integers(0, 9)), max_size=6)


@given(st.lists(st.tuples(CHANGES, SPANS, st.booleans()), max_size=10), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=60)
def test_ranges_delete_at_once(steps: list[Any], deletes: int, removed: int) -> None:
    """Every reader sees what a dict holds, and snapshots what it held, however slowly keys are removed."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr(engine_module, "MOST_DELETES", deletes)
        patch.setattr(engine_module, "REMOVED_A_WRITE", removed)
        patch.setattr(engine_module, "REMOVED_AT_ONCE", removed + 1)
        patch.setattr(scans, "PART_PAIRS", 3)
        twin = Twin(Path(directory) / "shard")
        before = twin.engine.snapshot(), dict(twin.model)
        for changes, ranges, reopening in steps:
            twin.write(changes, ranges)
            expect(twin.engine, twin.model)
            expect(*before)
            if reopening:
                twin.reopen()
                expect(twin.engine, twin.model)
                before = twin.engine.snapshot(), dict(twin.model)
        twin.engine.reclaim(DATA, (0, 0, 0), (2, 0, 0))
        expect(twin.engine, twin.model)
        assert len(twin.model) == stored_keys(twin.engine)
        assert twin.engine.info().details["hidden_ranges"] == 0
        twin.engine.close()


def expect(reader: Reader, model: dict[Key, bytes]) -> None:
    """Compare all ways of reading."""
    pairs = sorted(model.items())
    assert pairs == pairs_of(reader.scan(DATA))
    assert pairs[::-1] == pairs_of(reader.scan(DATA, reverse=True))
    for start in range(0, 41, 5):
        span = (1, 0, start), (1, 0, start + 7)
        inside = [pair for pair in pairs if span[0] <= pair[0] < span[1]]
        assert inside == pairs_of(reader.scan(DATA, *span))
        assert inside[::-1][:2] == pairs_of(reader.scan(DATA, *span, reverse=True, limit=2))
    keys = [(1, 0, number) for number in range(41)]
    assert [model.get(key) for key in keys] == reader.get_many(DATA, keys) == [reader.get(DATA, key) for key in keys]


@pytest.mark.parametrize("kind", [scans.Scan, scans.Past])
def test_what_a_signal_kept_from_being_made_is_collected(kind: type[Any]) -> None:
    """Its construction may have ended before its first attribute was set."""
    kind.__new__(kind).__del__()


@pytest.fixture
def wide(tmp_path: Path) -> Iterable[LeveldbEngine]:
    """Return an engine with 60,000 keys, written out to table files and in the buffer."""
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=1 << 20)
    for part in range(60):
        put(engine, DATA, (((1, 0, part * 1000 + number), bytes(100)) for number in range(1000)))
    put(engine, DATA, [((2, 0, 0), b"neighbour")])
    yield engine
    engine.close()


def test_a_wide_range_is_hidden_and_then_removed(wide: LeveldbEngine) -> None:
    """The batch stays small; writes remove what is hidden bit by bit, and later openings go on."""
    engine, path = wide, wide._path
    log = sum(file.stat().st_size for file in files(path, ".log"))
    remove(engine, DATA, *WHOLE)
    assert sum(file.stat().st_size for file in files(path, ".log")) < log + 1000
    assert pairs_of(engine.scan(DATA)) == [((2, 0, 0), b"neighbour")] == pairs_of(engine.scan(DATA, reverse=True))
    assert None is engine.get(DATA, (1, 0, 5))
    for number in range(10):
        put(engine, DATA, [((1, 0, number * 3000), b"again")])
    left = stored_keys(engine)
    assert 58_000 < left < 60_001
    engine.close()
    engine = open_engine(path, create=False)
    assert [((1, 0, number * 3000), b"again") for number in range(10)] == pairs_of(engine.scan(DATA, *WHOLE))
    for _ in range(40):
        put(engine, INDEX, numbered(1000, 1))
    assert stored_keys(engine) == 11
    assert engine.info().details["hidden_ranges"] == 0
    engine.close()


def test_reclaim_gives_the_disk_space_back(wide: LeveldbEngine) -> None:
    """All of it, with no write after the delete."""
    full = wide.info().disk_bytes
    assert full > 6_000_000
    remove(wide, DATA, *WHOLE)
    wide.reclaim(DATA, *WHOLE)
    tables = sum(file.stat().st_size for file in files(wide._path, ".ldb"))
    assert tables < 10_000
    assert stored_keys(wide) == 1
    assert pairs_of(wide.scan(DATA)) == [((2, 0, 0), b"neighbour")]


@pytest.mark.parametrize("keyspace", [DATA, KEYS])
def test_reclaim_reaches_what_was_never_written_out(tmp_path: Path, keyspace: Keyspace) -> None:
    """Puts and deletes that were together in the buffer, twice; keys around and within stay."""
    engine = open_engine(tmp_path / "shard")

    def key(generation: int, number: int) -> Key:
        return (generation, 0, number) if keyspace is DATA else b"%c\0%08d" % (generation, number)

    start, end = ((1, 0, 0), (2, 0, 0)) if keyspace is DATA else (b"\1", b"\2")
    kept = [(key(0, 0), b"before"), (start, b"first"), (key(1, 7), b"within"), (end, b"behind")]
    if keyspace is KEYS:
        kept[2:2] = [(start + b"\0", b"second")]
    for _ in range(2):
        put(engine, keyspace, ((key(1, number), random.Random(number).randbytes(1000)) for number in range(5000)))
        remove(engine, keyspace, start, end)
        put(engine, keyspace, kept)
        engine.reclaim(keyspace, start, end)
        assert engine.info().disk_bytes < 100_000
        assert kept == pairs_of(engine.scan(keyspace))
    engine.close()


def test_deleting_a_wide_range_with_its_successor_is_one_step(wide: LeveldbEngine) -> None:
    """Readers beside it see the old keys or the new one, never neither, never both."""
    seen: list[int] = []

    def read() -> None:
        with wide.snapshot() as snapshot:
            one, all_ = snapshot.get(STATE, b"new"), len(pairs_of(snapshot.scan(DATA, *WHOLE, limit=3)))
        seen.append(all_ if one is None else 10 + all_)

    batch = WriteBatch()
    batch.delete_range(DATA, *WHOLE)
    batch.put(STATE, b"new", b"")
    batch.put(DATA, (1, 0, 5), b"within")
    with Beside(read) as beside:
        wide.write(batch)
        count = len(seen)
        wait_until(lambda: beside.failed or len(seen) >= count + 2, "a read that began after the write")
    assert {3, 11} == set(seen)


def test_a_range_with_damage_can_be_deleted(tmp_path: Path) -> None:
    """What can't be read stays hidden, also from later openings; the rest goes."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(3000, 1000))
    engine.close()
    open_engine(tmp_path / "shard").close()  # writes the table
    damage(files(tmp_path / "shard", ".ldb")[0])
    engine = open_engine(tmp_path / "shard", create=False)
    remove(engine, DATA, *WHOLE)
    for number in range(5):
        put(engine, DATA, [((1, 0, number), b"again")])
    assert len(pairs_of(engine.scan(DATA))) == 5
    engine.close()
    engine = open_engine(tmp_path / "shard", create=False)
    assert len(pairs_of(engine.scan(DATA))) == 5
    assert engine.info().details["hidden_ranges"] > 0
    engine.close()


# --- crashes -------------------------------------------------------------------------


def write_batches(engine: LeveldbEngine, first: int, batches: int) -> None:
    """Write batches over three keyspaces, each of which deletes a hundred keys of the one before."""
    for number in range(first, first + batches):
        batch = WriteBatch()
        batch.delete_range(DATA, (1, 0, 0), (1, number, 0))
        for part in range(100):
            batch.put(DATA, (1, number, part), random.Random(number).randbytes(300))
        batch.put(META, b"%08d" % number, b"")
        batch.put(STATE, b"last", b"%d" % number)
        engine.write(batch)


def check_whole(engine: LeveldbEngine) -> int:
    """Return the last batch there is, after checking that exactly it and those before have been applied."""
    last = int(engine.get(STATE, b"last") or b"-1")
    assert [b"%08d" % number for number in range(last + 1)] == [key for key, _ in pairs_of(engine.scan(META))]
    value = random.Random(last).randbytes(300)
    assert [((1, last, part), value) for part in range(100)] == pairs_of(engine.scan(DATA))
    return last


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [5, 10_000])
def test_a_killed_process_loses_nothing(tmp_path: Path, deletes: int) -> None:
    """SIGKILL at any moment leaves whole batches, and all that were acknowledged, with ranges hidden or not."""
    program = (
        "engine_module.MOST_DELETES = int(sys.argv[2])\n"
        "engine = open_engine(Path(sys.argv[1]), write_buffer_bytes=1 << 20)\n"
        "first = check_whole(engine) + 1 if engine.get(STATE, b'last') else 0\n"
        "for number in range(first, 1 << 30):\n"
        "    write_batches(engine, number, 1)\n"
        "    print(number, flush=True)\n"
    )
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_leveldb import *\n"
    for round_ in range(4):
        command = [sys.executable, "-c", begin + program, str(tmp_path / "shard"), str(deletes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(30 + 7 * round_):
                acknowledged = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            rest = child.stdout.read().split("\n")
        acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
        engine = open_engine(tmp_path / "shard", create=False)
        assert acknowledged <= check_whole(engine) <= acknowledged + 1
        engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_log_cut_short_leaves_whole_batches(tmp_path: Path, seed: int) -> None:
    """Wherever power loss cuts it, a prefix of the batches is left, which LevelDB finds by itself."""
    engine = open_engine(tmp_path / "shard")
    write_batches(engine, 0, 50)
    shard = shutil.copytree(tmp_path / "shard", tmp_path / "lost")
    engine.close()
    (log,) = files(shard, ".log")
    os.truncate(log, random.Random(seed).randrange(40_000, log.stat().st_size))
    engine = open_engine(shard)
    last = check_whole(engine)
    assert last < 49
    write_batches(engine, last + 1, 3)
    engine.close()
    engine = open_engine(shard)
    assert last + 3 == check_whole(engine)
    engine.close()


def test_flush_log_syncs_every_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was begun since, with the directory that names it; write does it when told to."""
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
        with pytest.raises(DatabaseClosedError):  # so no compaction writes any more
            engine.get(DATA, (0, 0, 0))
        synced.append(path.relative_to(tmp_path).name)

    monkeypatch.setattr(engine_module, "sync", sync)
    engine.close()
    assert ["999999.ldb", ""] == synced


def test_a_full_disk_is_told_apart(tmp_path: Path) -> None:
    """What was acknowledged before stays readable, then and after opening again; writes are refused until then."""
    program = (
        "import resource; from topicstore.contract.errors import StorageFullError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "engine = open_engine(Path(sys.argv[1]))\n"
        "write_batches(engine, 0, 10)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))\n"
        "with pytest.raises(StorageFullError, match='File too large'):\n"
        "    put(engine, DATA, [((1, 0, 20), bytes(300_000))])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert check_whole(engine) == 9\n"
        "with pytest.raises(EngineError, match='open the shard again'):\n"
        "    put(engine, STATE, [(b'k', b'v')])\n"
        "engine.close()\n"
        "engine = open_repaired(Path(sys.argv[1]))\n"
        "assert check_whole(engine) == 9\n"
        "write_batches(engine, 10, 1)\n"
        "engine.close()\n"
        "engine = open_engine(Path(sys.argv[1]))\n"
        "assert check_whole(engine) == 10\n"
        "print('well')\n"
    )
    done = run(program, tmp_path / "shard")
    assert done.stdout == "well\n", done.stderr


# --- damage --------------------------------------------------------------------------


@pytest.fixture(params=[0.01, 0.5, 0.985])
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Iterable[tuple[LeveldbEngine, list[tuple[Key, bytes]]]]:
    """Return an engine of one table file, damaged near its beginning, in the middle or near its end."""
    pairs = numbered(2000, 1000)
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, pairs)
    put(engine, STATE, ((b"%03d" % number, bytes(1000)) for number in range(100)))
    put(engine, KEYS, ((b"%03d" % number, bytes(1000)) for number in range(100)))
    engine.close()
    open_engine(tmp_path / "shard").close()  # writes the table
    (table,) = files(tmp_path / "shard", ".ldb")
    damage(table, request.param)
    engine = open_engine(tmp_path / "shard", create=False)
    yield engine, pairs
    engine.close()


def test_damage_is_told_and_the_rest_can_be_read(
    damaged: tuple[LeveldbEngine, list[tuple[Key, bytes]]], request: pytest.FixtureRequest
) -> None:
    """No read takes a damaged block for the end of the data, or leaves it out; other keyspaces are whole."""
    engine, pairs = damaged
    place = {0.01: STATE, 0.5: DATA, 0.985: KEYS}[request.node.callspec.params["damaged"]]
    rest = {STATE: 100, DATA: 2000, KEYS: 100}
    whole = rest.pop(place)
    for keyspace, count in rest.items():
        assert len(pairs_of(engine.scan(keyspace))) == count == len(pairs_of(engine.scan(keyspace, reverse=True)))
    with engine.snapshot() as snapshot:
        readers: list[Reader] = [engine, snapshot]
        for reader in readers:
            for reverse in (False, True):
                found: list[tuple[Key, bytes]] = []
                with pytest.raises(CorruptionError, match="checksum mismatch"):
                    read_into(found, reader.scan(place, reverse=reverse))
                assert len(found) < whole
                if place is DATA:
                    assert found == (pairs[::-1] if reverse else pairs)[: len(found)] != []
            if place is DATA:
                with pytest.raises(CorruptionError):
                    reader.get_many(DATA, [key for key, _ in pairs])
    readable = 0
    for key, value in pairs:
        try:
            assert value == engine.get(DATA, key)
            readable += 1
        except CorruptionError:
            assert place is DATA
    assert readable >= 1980
    (sentence,) = engine.verify()
    assert sentence.startswith(f"keyspace {place.name!r}, ")
    assert "block checksum mismatch" in sentence


def read_into(found: list[tuple[Key, bytes]], scan: Iterable[list[tuple[Key, bytes]]]) -> None:
    for chunk in scan:
        found += chunk


def test_verify_names_every_damaged_place_once(tmp_path: Path) -> None:
    """It goes on behind a damage, and finds none where there is none."""
    for generation in (1, 2, 3):
        engine = open_engine(tmp_path / "shard")
        put(engine, DATA, (((generation, 0, number), random.Random(number).randbytes(1000)) for number in range(500)))
        assert list(engine.verify()) == []
        engine.close()
    open_engine(tmp_path / "shard").close()
    for table in files(tmp_path / "shard", ".ldb"):
        damage(table)
    engine = open_engine(tmp_path / "shard")
    assert [f"({generation}, 0, " in sentence for generation, sentence in enumerate(engine.verify(), 1)] == [True] * 3
    engine.close()


def test_a_missing_table_is_told_at_opening(tmp_path: Path) -> None:
    """With its name, and what to do."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(1000, 100))
    engine.close()
    open_engine(tmp_path / "shard").close()
    (table,) = files(tmp_path / "shard", ".ldb")
    table.unlink()
    with pytest.raises(CorruptionError, match=r"missing files.*repair_db") as caught:
        open_engine(tmp_path / "shard")
    assert str(table) == caught.value.place


def test_a_damaged_log_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    """Repairing keeps what is before the damage; what is behind it can be looked at before."""
    engine = open_engine(tmp_path / "shard")
    put(engine, STATE, [(b"%03d" % number, bytes(1000)) for number in range(20)])
    for number in range(100):
        put(engine, META, [(b"%03d" % number, bytes(1000))])
    engine.close()
    damage(files(tmp_path / "shard", ".log")[0], 0.6)
    with pytest.raises(LogDamagedError, match=r"\.log"):
        open_engine(tmp_path / "shard")
    before = contents(tmp_path / "shard")
    engine = open_damaged(tmp_path / "shard", salvage=True)
    assert len(pairs_of(engine.scan(STATE))) == 20
    left = [int(key) for key, _ in pairs_of(engine.scan(META))]
    assert 0 < len(set(range(100)) - set(left)) <= 33
    assert {0, 99} <= set(left)
    engine.close()
    engine = open_damaged(tmp_path / "shard", salvage=False)
    whole = [int(key) for key, _ in pairs_of(engine.scan(META))]
    assert whole == left[: len(whole)] == list(range(len(whole)))
    engine.close()
    assert before == contents(tmp_path / "shard")
    engine = open_repaired(tmp_path / "shard")
    assert whole == [int(key) for key, _ in pairs_of(engine.scan(META))]
    engine.close()


# --- plyvel's other traps -----------------------------------------------------------------


@pytest.mark.parametrize("past", [False, True])
def test_a_range_backwards_whose_only_key_is_its_start(tmp_path: Path, past: bool) -> None:
    """Plyvel's reverse iterator gives nothing for it."""
    engine = open_engine(tmp_path / "shard")
    put(engine, META, [(b"", b"0"), (b"a", b"1"), (b"c", b"3")])
    with engine.snapshot() as snapshot:
        reader: Reader = snapshot if past else engine
        spans: list[tuple[bytes | None, bytes | None]] = [
            (b"a", b"b"),
            (b"a", b"c"),
            (b"c", None),
            (None, b"a"),
            (b"b", b"c"),
        ]
        found = [[key for key, _ in pairs_of(reader.scan(META, *span, reverse=True))] for span in spans]
        assert found == [[b"a"], [b"a"], [b"c"], [b""], []]
    engine.close()


def test_leaps_backwards_stay_in_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plyvel's seek goes on below the start of the range."""
    monkeypatch.setattr(engine_module, "MOST_DELETES", 2)
    monkeypatch.setattr(engine_module, "REMOVED_A_WRITE", 0)
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(100, 1))
    remove(engine, DATA, (1, 0, 20), (1, 0, 80))
    assert stored_keys(engine) == 100

    def numbers(start: int, end: int) -> list[int]:
        return [key[2] for key, _ in pairs_of(engine.scan(DATA, (1, 0, start), (1, 0, end), reverse=True))]

    assert numbers(0, 100) == [*range(99, 79, -1), *range(19, -1, -1)]
    assert numbers(20, 90) == numbers(25, 90) == list(range(89, 79, -1))
    assert numbers(19, 81) == [80, 19]
    assert numbers(20, 80) == numbers(30, 40) == []
    engine.close()


# --- sizes -----------------------------------------------------------------------------


def test_an_empty_shard_is_lean(tmp_path: Path) -> None:
    """Under 200 KB, however often it was opened."""
    for number in range(5):
        engine = open_engine(tmp_path / "shard")
        put(engine, STATE, [(b"k", b"%d" % number)])
        engine.close()
        assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "shard").iterdir()) < 200_000


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Buffers and cache stay near their options however much is stored."""
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=2 << 20, cache_bytes=1 << 20)
    value = random.Random(0).randbytes(40_000)
    most = 0
    for number in range(1500):
        put(engine, DATA, [((1, 0, number), value)])
        most = max(most, engine.info().memory_bytes)
    assert len(pairs_of(engine.scan(DATA))) == 1500
    assert max(most, engine.info().memory_bytes) < 12 << 20
    assert engine.info().disk_bytes > 50_000_000
    engine.close()


def test_no_log_is_left_empty_for_another(tmp_path: Path) -> None:
    """Whenever LevelDB begins another log to compact, the one before has a write: an empty one would mean a loss."""
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
