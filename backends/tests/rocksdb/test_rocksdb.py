"""Tests of behaviour that only the RocksDB engine has: merges, readers, logs, and faults of rocksdict."""

from __future__ import annotations

import errno
import gc
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Key, Reader, WriteBatch
from topicstore.contract.errors import CorruptionError, StorageFullError
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.backend.faults import full_disk
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.backend.leaks import linux, open_files
from topicstore_conformance.faults import namespaces

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')

from topicstore_backends import write_ahead_logs
from topicstore_backends.rocksdb import RocksdbBackend, RocksdbEngine, RocksdbOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

WHOLE = (1, 0, 0), (1, 1, 0)


def open_engine(path: Path, *, create: bool = True, **options: Any) -> RocksdbEngine:
    return RocksdbBackend(RocksdbOptions(**options)).open_shard(path, KEYSPACES, create=create)


def numbered(count: int, size: int) -> dict[tuple[int, int, int], bytes]:
    return {(1, 0, number): random.Random(number).randbytes(size) for number in range(count)}


def count(chunks: Iterable[list[tuple[Key, bytes]]]) -> int:
    return sum(map(len, chunks))


def files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}"))


# --- opening and closing ------------------------------------------------------------


def sessions(path: Path, numbers: Iterable[int], size: int = 1) -> None:
    """For each number, open the shard and store a value; RocksDB moves each table to the last level unmerged."""
    for number in numbers:
        engine = open_engine(path)
        put(engine, DATA, {(1, 0, number): random.Random(number).randbytes(size)})
        engine.close()


def test_short_sessions_leave_few_tables(tmp_path: Path) -> None:
    """Opening a shard merges 16 or more small tables, so that many short openings leave few files.

    Up to four further tables may be in the first level.
    """
    sessions(tmp_path / "shard", range(50))
    assert len(files(tmp_path / "shard", ".sst")) < 16 + 4 + 1
    engine = open_engine(tmp_path / "shard")
    assert 50 == count(engine.scan(DATA))
    engine.close()


def test_small_tables_are_not_merged_with_a_damaged_one(tmp_path: Path) -> None:
    """Opening a shard doesn't merge a damaged table, so that the shard stays writable.

    RocksDB refuses all writes after a compaction that found damage.
    """
    sessions(tmp_path / "shard", range(12))
    broken = files(tmp_path / "shard", ".sst")[0]
    flip(broken, broken.stat().st_size // 50)
    sessions(tmp_path / "shard", range(12, 30))
    engine = open_engine(tmp_path / "shard")
    (sentence,) = engine.verify()
    assert str(broken) in sentence
    engine.close()


@linux
@pytest.mark.parametrize("linking", [True, False], ids=["hard links", "no hard links"])
def test_a_reader_has_what_the_writer_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linking: bool) -> None:
    """Through hard links, a reader with few open tables can read tables that the writer has removed.

    On a file system without hard links, the reader opens all tables at once.
    """
    sessions(tmp_path / "shard", range(24), 1 << 20)
    if not linking:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    reader = RocksdbBackend(RocksdbOptions()).open_reader(tmp_path / "shard", KEYSPACES, alone=False)
    opened = sum(name.endswith(".sst") for name in open_files(tmp_path))
    assert (opened < 24) == linking
    engine = open_engine(tmp_path / "shard")
    put(engine, DATA, {(1, 0, number): b"" for number in range(24)})
    engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
    assert 2 > len(files(tmp_path / "shard", ".sst"))
    engine.close()
    assert [1 << 20] * 24 == [len(value) for chunk in reader.scan(DATA) for _, value in chunk]
    reader.close()


def test_a_dropped_scan_releases_its_iterator(tmp_path: Path) -> None:
    """A dropped scan releases its iterator at once, without the garbage collector, so that RocksDB may delete files."""
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


# --- other faults of rocksdict --------------------------------------------------------


def test_the_upper_bound_does_not_dangle(tmp_path: Path) -> None:
    """Scans return all rows up to their end, even if the memory of their options could have been reused."""
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
    """Every accepted compression makes tables smaller, and ``none`` leaves them uncompressed.

    rocksdict's zlib, which is not accepted, doesn't compress.
    """
    sizes = {}
    for chosen in ("none", compression):
        engine = open_engine(tmp_path / chosen, compression=chosen)
        put(engine, DATA, {(1, 0, number): b"temperature 21.5 " * 60 for number in range(4000)})
        engine.close()
        sizes[chosen] = sum(file.stat().st_size for file in files(tmp_path / chosen, ".sst"))
    assert sizes["none"] > 4_000_000
    assert sizes[compression] < 1_000_000


def test_verify_names_every_damaged_file_once(tmp_path: Path) -> None:
    """Verification continues after a damaged file and with the next keyspace, and names each damaged file once."""
    shard = tmp_path / "shard"
    for generation in (1, 2, 3):  # closing writes one table file per keyspace
        engine = open_engine(shard)
        put(engine, DATA, {(generation, 0, number): random.Random(number).randbytes(1000) for number in range(500)})
        put(engine, INDEX, {(generation, 0, number): random.Random(number).randbytes(1000) for number in range(500)})
        assert list(engine.verify()) == []
        engine.close()
    tables = files(shard, ".sst")
    assert len(tables) == 6
    broken = [tables[0], tables[1], tables[4]]
    for table in broken:
        flip(table, table.stat().st_size // 2)
    engine = open_engine(shard)
    sentences = list(engine.verify())
    assert sorted(table.name for table in broken) == sorted(
        table.name for table in tables for sentence in sentences if str(table) in sentence.partition(": Corruption")[0]
    )
    assert {"keyspace 'data'", "keyspace 'index'"} == {sentence.partition(":")[0] for sentence in sentences}
    assert len(sentences) == 3
    with pytest.raises(CorruptionError) as caught:
        count(engine.scan(DATA))
    assert caught.value.place in map(str, broken)
    engine.close()


# --- logs and full disks ----------------------------------------------------------------


def write_batches(engine: RocksdbEngine, batches: int, first: int = 0) -> None:
    """Write batches over three keyspaces, from which `whole_batches` determines which of them were applied."""
    for number in range(first, first + batches):
        batch = WriteBatch()
        batch.put(DATA, (1, 0, number), random.Random(number).randbytes(20_000))
        batch.put(STATE, b"last", b"%d" % number)
        if number % 7 == 0:  # a column family that is written less often than the others
            batch.put(META, b"%06d" % number, b"")
        engine.write(batch)


def whole_batches(engine: Reader) -> set[int]:
    """Return the numbers of the batches present, after checking that each of them is complete."""
    found = {key[2]: value for chunk in engine.scan(DATA) for key, value in chunk}
    assert all(random.Random(number).randbytes(20_000) == value for number, value in found.items())
    assert {number for number in found if number % 7 == 0} == {
        int(key) for chunk in engine.scan(META) for key, _ in chunk
    }
    assert max(found) == int(engine.get(STATE, b"last") or b"-1")
    return set(found)


def test_a_reader_opens_again_if_logs_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds a gap in the logs opens the database again if the writer has changed the files.

    If the writer flushes a log after the reader has read the manifest, the next log seems to follow lost writes.
    """
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


def test_a_full_disk_is_reported_again(tmp_path: Path) -> None:
    """After a write on a full disk, every further call raises `StorageFullError`.

    RocksDB's own later errors mention only that there was an earlier one.
    """
    engine = open_engine(tmp_path / "shard")
    with full_disk():
        for call in (lambda: put(engine, STATE, {b"k": b"v"}), engine.flush_log, engine.flush_log, engine.close):
            with pytest.raises(StorageFullError, match="File too large"):
                call()


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


def test_space_is_reclaimed_after_opening_without_free_space(tmp_path: Path) -> None:
    """A shard that is opened with little free space accepts writes, starts no compaction, and later reclaims space.

    A compaction that RocksDB began without space would fail, and with it all later calls.
    """
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    assert [[False], [True, True], [1_000]] == namespaces.run_mounted(
        namespaces.SMALL, tmp_path, 32 << 20, NO_ROOM, tmp_path
    )
