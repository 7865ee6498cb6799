"""What only the RocksDB engine does: files, crashes, damage, and rocksdict's traps."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Key, Keyspace, Reader, WriteBatch
from topicstore.contract.errors import CorruptionError, LogDamagedError
from topicstore_conformance.backend.leaks import linux, open_files
from topicstore_conformance.faults import namespaces
from topicstore_conformance.faults.threads import wait_until

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')

from topicstore_backends import write_ahead_logs
from topicstore_backends.rocksdb import RocksdbBackend, RocksdbEngine, RocksdbOptions
from topicstore_backends.rocksdb.engine import RocksdbReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WHOLE = (1, 0, 0), (1, 1, 0)


def open_engine(path: Path, *, create: bool = True, **options: Any) -> RocksdbEngine:
    return RocksdbBackend(RocksdbOptions(**options)).open_shard(path, KEYSPACES, create=create)


def open_repaired(path: Path) -> RocksdbEngine:
    backend = RocksdbBackend(RocksdbOptions())
    try:
        return backend.open_shard(path, KEYSPACES, create=False)
    except LogDamagedError as damaged:
        backend.repair_log(path, damaged)
    return backend.open_shard(path, KEYSPACES, create=False)


def open_damaged(path: Path, *, salvage: bool) -> RocksdbReader:
    backend = RocksdbBackend(RocksdbOptions())
    with pytest.raises(LogDamagedError) as damaged:
        backend.open_shard(path, KEYSPACES, create=False)
    return backend.open_damaged(path, KEYSPACES, damaged.value, salvage=salvage)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.stem != "LOG"}


def put(engine: RocksdbEngine, keyspace: Keyspace, pairs: Iterable[tuple[Key, bytes]]) -> None:
    batch = WriteBatch()
    for key, value in pairs:
        batch.put(keyspace, key, value)
    engine.write(batch)


def numbered(count: int, size: int) -> list[tuple[Key, bytes]]:
    return [((1, 0, number), random.Random(number).randbytes(size)) for number in range(count)]


def count(chunks: Iterable[list[tuple[Key, bytes]]]) -> int:
    return sum(map(len, chunks))


def damage(path: Path, where: float = 0.5) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1
    path.write_bytes(content)


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


def disk_bytes(directory: Path) -> int:
    """Return what the directory takes, room reserved for files included; RocksDB may delete some meanwhile."""
    taken = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            taken += file.stat().st_blocks * 512
    return taken


# --- opening and closing ------------------------------------------------------------


def test_reopening_finds_everything(tmp_path: Path) -> None:
    """From the log alone, and from table files; a closed shard needs no options to be read."""
    for opening, compression in enumerate(("none", "zstd", "lz4")):
        engine = open_engine(tmp_path / "shard", compression=compression)
        assert [((1, 0, number), b"v") for number in range(opening)] == [
            pair for chunk in engine.scan(DATA) for pair in chunk
        ]
        put(engine, DATA, [((1, 0, opening), b"v")])
        engine.close()


def sessions(path: Path, numbers: Iterable[int], size: int = 1) -> None:
    """Store a value in each of some sessions. RocksDB moves their tables to the last level without merging them."""
    for number in numbers:
        engine = open_engine(path)
        put(engine, DATA, [((1, 0, number), random.Random(number).randbytes(size))])
        engine.close()


def test_short_sessions_leave_few_tables(tmp_path: Path) -> None:
    """Small tables are merged when a shard is opened, 16 or more at a time; four may lie in the first level."""
    sessions(tmp_path / "shard", range(50))
    assert len(files(tmp_path / "shard", ".sst")) < 16 + 4 + 1
    engine = open_engine(tmp_path / "shard")
    assert 50 == count(engine.scan(DATA))
    engine.close()


def test_small_tables_are_not_merged_with_a_damaged_one(tmp_path: Path) -> None:
    """RocksDB writes no more after a compaction that met damage, so the shard would be lost for writing."""
    sessions(tmp_path / "shard", range(12))
    broken = files(tmp_path / "shard", ".sst")[0]
    damage(broken, 0.02)
    sessions(tmp_path / "shard", range(12, 30))
    engine = open_engine(tmp_path / "shard")
    (sentence,) = engine.verify()
    assert str(broken) in sentence
    engine.close()


@linux
@pytest.mark.parametrize("linking", [True, False], ids=["hard links", "no hard links"])
def test_a_reader_has_what_the_writer_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linking: bool) -> None:
    """By hard links, with few tables open; where a file system has none, by opening all tables at once."""
    sessions(tmp_path / "shard", range(24), 1 << 20)
    if not linking:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    reader = RocksdbBackend(RocksdbOptions()).open_reader(tmp_path / "shard", KEYSPACES, alone=False)
    opened = sum(name.endswith(".sst") for name in open_files(tmp_path))
    assert (opened < 24) == linking
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, [((1, 0, number), b"") for number in range(24)])
    engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
    assert 2 > len(files(tmp_path / "shard", ".sst"))
    engine.close()
    assert [1 << 20] * 24 == [len(value) for chunk in reader.scan(DATA) for _, value in chunk]
    reader.close()


@pytest.mark.parametrize(
    "options",
    [{"compression": "zlib"}, {"write_buffer_bytes": 0}, {"cache_bytes": -1}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """Zlib is none of the choices, because rocksdict's does not compress."""
    with pytest.raises(ValueError, match=next(iter(options))):
        RocksdbOptions(**options)


def test_close_releases_the_lock_whoever_still_reads(tmp_path: Path) -> None:
    """Trap 5: an iterator, a snapshot or a handle that is alive keeps the lock after rocksdict's close."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(500, 100))
    scan, snapshot = engine.scan(DATA), engine.snapshot()
    within = snapshot.scan(DATA)
    kept = [next(scan), next(within), scan, within, snapshot, engine, next(iter(engine.verify()), None)]
    engine.checkpoint(tmp_path / "copy")
    engine.close()
    again = open_engine(tmp_path / "shard", create=False)
    assert count(again.scan(DATA)) == 500
    again.close()
    assert len(kept) == 7


def test_a_dropped_scan_gives_its_iterator_back(tmp_path: Path) -> None:
    """At once, by counting references, so that RocksDB may delete files."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(500, 100))
    scans = [engine.scan(DATA) for _ in range(10)]
    for scan in scans:
        next(scan)
    assert len(engine._cursors) == 10
    gc.disable()
    try:
        del scans, scan
        assert len(engine._cursors) == 0
    finally:
        gc.enable()
    engine.close()


# --- rocksdict's other traps ----------------------------------------------------------


def test_snapshots_isolate_scans(tmp_path: Path) -> None:
    """Trap 1: iterators of rocksdict's snapshots show later writes. Also across a flush to table files."""
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=1 << 20)
    before = numbered(200, 1000)
    put(engine, DATA, before)
    with engine.snapshot() as snapshot:
        for part in range(10):
            put(engine, DATA, (((1, 0, number), bytes(1000)) for number in range(part * 400, part * 400 + 400)))
        batch = WriteBatch()
        batch.delete_range(DATA, *WHOLE)
        engine.write(batch)
        wait_until(lambda: files(tmp_path / "shard", ".sst"), "a table file")
        assert before == [pair for chunk in snapshot.scan(DATA) for pair in chunk]
        assert before[::-1] == [pair for chunk in snapshot.scan(DATA, reverse=True) for pair in chunk]
        assert [value for _, value in before] == snapshot.get_many(DATA, [key for key, _ in before])
    assert count(engine.scan(DATA)) == 0
    engine.close()


def test_the_upper_bound_does_not_dangle(tmp_path: Path) -> None:
    """Trap 3: once options and key were freed and their memory used again, rows went missing."""
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, numbered(30_000, 20))
    scans = [engine.scan(DATA, (1, 0, 0), (1, 0, 20_000 + number)) for number in range(50)]
    found = [len(next(scan)) for scan in scans]
    gc.collect()
    litter = [bytes([number % 256]) * (number % 64) for number in range(200_000)]
    assert [20_000 + number for number in range(50)] == [
        first + count(scan) for first, scan in zip(found, scans, strict=True)
    ]
    assert len(litter) == 200_000
    engine.close()


@pytest.mark.parametrize("compression", ["lz4", "snappy", "zstd"])
def test_compression_compresses(tmp_path: Path, compression: str) -> None:
    """Trap 4: zlib did not; and without compression the bytes are all there."""
    sizes = {}
    for chosen in ("none", compression):
        engine = open_engine(tmp_path / chosen, compression=chosen)
        put(engine, DATA, (((1, 0, number), b"temperature 21.5 " * 60) for number in range(4000)))
        engine.close()
        sizes[chosen] = sum(file.stat().st_size for file in files(tmp_path / chosen, ".sst"))
    assert sizes["none"] > 4_000_000
    assert sizes[compression] < 1_000_000


def test_a_scan_does_not_end_at_damage(tmp_path: Path) -> None:
    """A sixth trap: rocksdict's items() takes a damaged block for the end of the data."""
    shard = tmp_path / "shard"
    pairs = numbered(2000, 1000)
    engine = open_engine(shard)
    put(engine, DATA, pairs)
    engine.close()
    (table,) = files(shard, ".sst")
    damage(table)
    engine = open_engine(shard)
    for reverse, expected in ((False, pairs), (True, pairs[::-1])):
        found: list[tuple[Key, bytes]] = []
        with pytest.raises(CorruptionError, match=table.name):
            read_into(found, engine.scan(DATA, reverse=reverse))
        assert 0 < len(found) < len(pairs)
        assert expected[: len(found)] == found
    keys = [key for key, _ in pairs]
    snapshot = engine.snapshot()
    reads: list[Callable[[], Any]] = [
        lambda: engine.get_many(DATA, keys),
        lambda: [engine.get(DATA, key) for key in keys],
        lambda: snapshot.get_many(DATA, keys),
        lambda: count(snapshot.scan(DATA)),
    ]
    for read in reads:
        with pytest.raises(CorruptionError) as caught:
            read()
        assert str(table) == caught.value.place
    engine.close()


def read_into(found: list[tuple[Key, bytes]], scan: Iterable[list[tuple[Key, bytes]]]) -> None:
    for chunk in scan:
        found += chunk


def test_verify_names_every_damaged_file_once(tmp_path: Path) -> None:
    """It goes on behind a damaged file and in the next keyspace."""
    shard = tmp_path / "shard"
    for generation in (1, 2, 3):  # closing writes a table file a keyspace
        engine = open_engine(shard)
        put(engine, DATA, (((generation, 0, number), random.Random(number).randbytes(1000)) for number in range(500)))
        put(engine, INDEX, (((generation, 0, number), random.Random(number).randbytes(1000)) for number in range(500)))
        assert list(engine.verify()) == []
        engine.close()
    tables = files(shard, ".sst")
    assert len(tables) == 6
    broken = [tables[0], tables[1], tables[4]]
    for table in broken:
        damage(table)
    engine = open_engine(shard)
    sentences = list(engine.verify())
    assert sorted(table.name for table in broken) == sorted(
        table.name for table in tables for sentence in sentences if str(table) in sentence.partition(": Corruption")[0]
    )
    assert {"keyspace 'data'", "keyspace 'index'"} == {sentence.partition(":")[0] for sentence in sentences}
    assert len(sentences) == 3
    engine.close()


# --- crashes and damaged logs -----------------------------------------------------------


def write_batches(engine: RocksdbEngine, batches: int, first: int = 0) -> None:
    """Write batches over three keyspaces: any prefix of them can be recognised."""
    for number in range(first, first + batches):
        batch = WriteBatch()
        batch.put(DATA, (1, 0, number), random.Random(number).randbytes(20_000))
        batch.put(STATE, b"last", b"%d" % number)
        if number % 7 == 0:  # a family that is written more rarely than the others
            batch.put(META, b"%06d" % number, b"")
        engine.write(batch)


def whole_batches(engine: Reader) -> set[int]:
    """Return which batches are there, after checking that none is there in part."""
    found = {key[2]: value for chunk in engine.scan(DATA) for key, value in chunk}
    assert all(random.Random(number).randbytes(20_000) == value for number, value in found.items())
    assert {number for number in found if number % 7 == 0} == {
        int(key) for chunk in engine.scan(META) for key, _ in chunk
    }
    assert max(found) == int(engine.get(STATE, b"last") or b"-1")
    return set(found)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shard of 300 batches, flushed several times, as a killed process leaves it."""
    directory = tmp_path_factory.mktemp("crashed") / "shard"
    program = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_rocksdb import files, open_engine, wait_until, write_batches\n"
        "shard = Path(sys.argv[1])\n"
        "engine = open_engine(shard, write_buffer_bytes=1 << 20)\n"
        "for first in range(0, 300, 60):\n"
        "    before = set(files(shard, '.sst'))\n"
        "    write_batches(engine, 60, first)\n"
        "    wait_until(lambda: set(files(shard, '.sst')) - before, 'another table file')\n"
        "os._exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", program, directory, Path(__file__).parent])
    assert done.returncode == 7
    return directory


def newest_log(shard: Path) -> Path:
    return max(log for log in files(shard, ".log") if log.stat().st_size)


def lose_the_tail(shard: Path, left: int) -> None:
    """Keep the first ``left`` bytes of all logs together, as power loss does that cuts what was not synced."""
    for log in files(shard, ".log"):
        size = log.stat().st_size
        os.truncate(log, min(left, size))
        left = max(0, left - size)


@pytest.mark.parametrize("seed", range(16))
def test_logs_cut_short_leave_whole_batches(crashed: Path, tmp_path: Path, seed: int) -> None:
    """Wherever power loss cuts the logs, a prefix of the batches is left."""
    shard = shutil.copytree(crashed, tmp_path / "shard")
    whole = sum(log.stat().st_size for log in files(shard, ".log"))
    lose_the_tail(shard, random.Random(seed).randrange(whole) if seed else 0)
    engine = open_repaired(shard)
    left = whole_batches(engine)
    assert set(range(len(left))) == left
    assert len(left) < 300
    put(engine, STATE, [(b"last", b"%d" % (len(left) - 1))])
    engine.close()
    engine = open_engine(shard)
    assert left == whole_batches(engine)
    engine.close()


def test_a_damaged_log_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    """Repairing keeps what is before the damage; what is behind it can be looked at before."""
    engine = open_engine(tmp_path / "shard")
    write_batches(engine, 20)
    killed = shutil.copytree(tmp_path / "shard", tmp_path / "killed")
    engine.close()
    damage(newest_log(killed))
    with pytest.raises(LogDamagedError, match=r"\.log"):
        open_engine(killed)
    before = contents(killed)
    views = [open_damaged(killed, salvage=salvage) for salvage in (False, True)]
    assert set(range(10)) == whole_batches(views[0])
    assert {10} <= set(range(20)) - whole_batches(views[1]) <= {10, 11}  # 20 KB each, and it is read 32 KB at a time
    for view in views:
        view.close()
    assert before == contents(killed)
    engine = open_repaired(killed)
    assert set(range(10)) == whole_batches(engine)
    engine.close()


def test_what_a_reader_finds_of_logs_that_come_and_go_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the writer writes a log out after the manifest was read, the next one seems to have lost what is before."""
    engine = open_engine(tmp_path / "shard")
    write_batches(engine, 5)
    looks: list[int] = []
    numbers = write_ahead_logs._numbers

    def while_writing(edits: list[bytes]) -> tuple[int, int]:
        looks.append(len(looks))
        if looks == [0]:
            engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
            write_batches(engine, 5, 5)
        return numbers(edits)

    monkeypatch.setattr(write_ahead_logs, "_numbers", while_writing)
    reader = RocksdbBackend(RocksdbOptions()).open_reader(tmp_path / "shard", KEYSPACES, alone=False)
    assert ([0, 1], set(range(10))) == (looks, whole_batches(reader))
    reader.close()
    engine.close()


def test_a_reader_leaves_out_what_is_just_being_written(tmp_path: Path) -> None:
    """It is not committed; the writer's log keeps it."""
    engine = open_engine(tmp_path / "shard")
    write_batches(engine, 5)
    shard = shutil.copytree(tmp_path / "shard", tmp_path / "copy")
    engine.close()
    size = newest_log(shard).stat().st_size - 30_000
    os.truncate(newest_log(shard), size)
    reader = RocksdbBackend(RocksdbOptions()).open_reader(shard, KEYSPACES, alone=False)
    assert (set(range(3)), size) == (whole_batches(reader), newest_log(shard).stat().st_size)
    reader.close()


def test_a_full_disk_is_told_apart(tmp_path: Path) -> None:
    """What was acknowledged before stays readable, then and after opening again."""
    program = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_rocksdb import *; from topicstore.contract.errors import StorageFullError\n"
        "engine = open_engine(Path(sys.argv[1]))\n"
        "write_batches(engine, 20)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    put(engine, DATA, [((1, 0, 20), bytes(300_000))])\n"
        "except StorageFullError:\n"
        "    assert whole_batches(engine) == set(range(20))\n"
        "    print('full')\n"
        "for again in (engine.flush_log, engine.flush_log):\n"
        "    try:\n"
        "        again()\n"
        "    except StorageFullError as error:\n"
        "        print(('File too large' in str(error)) * 'still')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    engine.close()\n"
        "except StorageFullError:\n"
        "    print('still')\n"
        "engine = open_engine(Path(sys.argv[1]))\n"
        "assert whole_batches(engine) == set(range(20))\n"
        "put(engine, STATE, [(b'k', b'v')])\n"
        "engine.close()\n"
        "print('well')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "shard"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["full", "still", "still", "still", "well"], done.stderr


NO_ROOM = """
import os, shutil
from pathlib import Path
from topicstore.contract.engine import DATA, KEYSPACES, META, WriteBatch
from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

directory = Path(arguments[0])
shard = directory / "shard"

def opened():
    return RocksdbBackend(RocksdbOptions()).open_shard(shard, KEYSPACES, create=True)

def write(engine, keyspace, keys, size):
    batch = WriteBatch()
    for key in keys:
        batch.put(keyspace, key, os.urandom(size))
    engine.write(batch)

for life in range(4):  # each leaves a table; with the fourth RocksDB would compact them as soon as it is opened
    engine = opened()
    write(engine, META, [b"%04d" % number for number in range(1_000 if life < 3 else 1)], 2_000)
    if life == 3:
        shutil.copytree(shard, directory / "killed")
    engine.close()
shutil.rmtree(shard)
(directory / "killed").rename(shard)
others = os.open(directory / "others", os.O_CREAT | os.O_WRONLY)
os.posix_fallocate(others, 0, shutil.disk_usage(directory).free - (300 << 10))
engine = opened()
for number in range(100):
    write(engine, DATA, [(1, 1, number)], 100)
    engine.flush_log()
say("compaction_started" in (shard / "LOG").read_text())
os.ftruncate(others, 0)  # somebody makes room
write(engine, DATA, [(1, 1, 1)], 1_000)
batch = WriteBatch()
batch.delete_range(META, b"0000", b"0900")
engine.write(batch)
before = engine.info().disk_bytes
engine.reclaim(META, b"0000", b"0900")
say(engine.info().disk_bytes < before // 4, "[meta] SetOptions() succeeded" in (shard / "LOG").read_text())
engine.close()
engine = opened()
say(len(engine.get(DATA, (1, 1, 1))))
engine.close()
"""


def test_room_is_given_back_after_opening_without_any(tmp_path: Path) -> None:
    """RocksDB begins no compaction then, which would fail, and with it what is asked of it next; later it does."""
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    assert [[False], [True, True], [1_000]] == namespaces.run_mounted(
        namespaces.SMALL, tmp_path, 32 << 20, NO_ROOM, tmp_path
    )


# --- checkpoints and sizes --------------------------------------------------------------


def test_an_empty_shard_is_lean(tmp_path: Path) -> None:
    """Under 200 KB, however often it was opened, with a message or without."""
    for number in range(5):
        engine = open_engine(tmp_path / "shard")
        assert disk_bytes(tmp_path / "shard") < 200_000
        put(engine, STATE, [(b"k", b"%d" % number)])
        engine.close()
        assert disk_bytes(tmp_path / "shard") < 200_000


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Buffers and cache stay near their options however much is stored; deleted bytes go back to the disk."""
    engine = open_engine(tmp_path / "shard", write_buffer_bytes=2 << 20, cache_bytes=1 << 20)
    value = random.Random(0).randbytes(40_000)
    most = 0
    for number in range(1500):
        put(engine, DATA, [((1, 0, number), value)])
        if number % 50 == 0:
            most = max(most, engine.info().memory_bytes)
    assert count(engine.scan(DATA)) == 1500
    assert max(most, engine.info().memory_bytes) < 12 << 20
    assert engine.info().disk_bytes > 50_000_000
    engine.close()
