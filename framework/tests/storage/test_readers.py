"""`topicstore.open(mode="r")`: beside a writer in another process, after a killed writer, and without a writer."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need

ALONE = ("duckdb", "leveldb")
"""Backends whose databases only one process can open at a time."""
SMALL = {"rocksdb": {"write_buffer_bytes": 64 << 10}}
"""Makes RocksDB flush and compact all the time."""

WRITER = """
import sys
import topicstore as ts

def messages(first, count):
    return [ts.Message(f"a/{n % 7}", b"%09d" % n + bytes(n % 200), f"c{n % 3}") for n in range(first, first + count)]

path, *pairs = sys.argv[1:]
backend, layout = pairs
options = {"rocksdb": {"write_buffer_bytes": 65536}} if backend == "rocksdb" else {}
stored = 0
with ts.open(path, backend=backend, layout=layout, shards=2, options=options) as db:
    print("open", flush=True)
    for line in sys.stdin:
        command, _, number = line.partition(" ")
        if command == "store":
            db.store(messages(stored, int(number)))
            stored += int(number)
        elif command == "forever":
            while True:
                db.store(messages(stored, int(number)))
                stored += int(number)
                print(stored, flush=True)
        elif command == "drop":
            db.drop_generation(int(number))
        else:
            getattr(db, command.strip())()
        print(stored, flush=True)
"""


class Writer:
    """A process that has a database open and executes commands."""

    def __init__(self, path: Path, backend: str = "rocksdb", layout: str = "block") -> None:
        arguments = [sys.executable, "-c", WRITER, str(path), backend, layout]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stored = 0
        assert self.line() == "open"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def do(self, command: str) -> int:
        """Execute a command; return the number of stored messages."""
        self.begin(command)
        self.stored = int(self.line())
        return self.stored

    def pause(self) -> None:
        """Stop all threads of the process until SIGCONT; return when they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        """Kill the process with SIGKILL. May be called twice."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    writers: list[Writer] = []

    def begin(*pair: str) -> Writer:
        writers.append(Writer(tmp_path / "db", *pair))
        return writers[-1]

    yield begin
    for writer in writers:
        writer.kill()


def numbers(db: ts.Database, topic_filter: str = "#") -> list[int]:
    return sorted(int(message.payload[:9]) for message in db.replay(topic_filter))


def files(path: Path) -> dict[str, tuple[int, str]]:
    """Return the modification time and hash of each file, without lock files and the readers' hard links."""
    return {
        str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in path.rglob("*")
        if file.is_file() and file.name != "LOCK" and not file.parent.name.startswith("topicstore-reader-")
    }


def some(count: int = 100) -> list[ts.Message]:
    return [ts.Message(f"a/{n % 7}", b"%09d" % n, f"c{n % 3}") for n in range(count)]


# --- beside a writer --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["reference", "block", "skipstream", "wildcard_optimized"])
def test_sees_what_another_process_has_committed(tmp_path: Path, start: Callable[..., Writer], layout: str) -> None:
    """A reader sees everything committed when it was opened or last refreshed, and nothing newer."""
    writer = start("rocksdb", layout)
    writer.do("store 1000")
    writer.pause()  # RocksDB's own threads flush and compact in the meantime
    before = files(tmp_path / "db")
    with ts.open(tmp_path / "db", mode="r") as db:
        assert db.read_only
        assert numbers(db) == list(range(1000))
        assert files(tmp_path / "db") == before
        writer.process.send_signal(signal.SIGCONT)
        writer.do("store 500")
        assert numbers(db) == list(range(1000))
        db.refresh()
        assert numbers(db) == list(range(1500))
    writer.do("store 500")  # the closed reader hasn't affected the writer
    with ts.open(tmp_path / "db", mode="r") as db:
        assert numbers(db) == list(range(2000))


def test_generations_come_and_go_meanwhile(tmp_path: Path, start: Callable[..., Writer]) -> None:
    """A reader keeps a dropped generation until it refreshes; cursors into it then raise."""
    writer = start()
    writer.do("store 1000")
    writer.do("add_generation")
    writer.do("store 1000")
    with ts.open(tmp_path / "db", mode="r") as db:
        old, new = (next(s for s in db.streams("#") if s.generation == generation) for generation in (1, 2))
        cursors = [db.cursor(stream, "#") for stream in (old, new)]
        replay = db.replay("#", batch_size=10)
        taken = [next(replay)]
        writer.do("add_generation")
        writer.do("drop 1")
        writer.do("compact")
        assert numbers(db) == list(range(2000))
        db.refresh()
        assert numbers(db) == list(range(1000, 2000))
        assert [info.number for info in db.generations()] == [2, 3]
        with pytest.raises(ts.GenerationDroppedError):
            db.read(cursors[0])
        assert len(db.read(cursors[1]).batch) > 0
        with pytest.raises(ts.GenerationDroppedError):
            taken += replay


def test_cursors_go_on_after_a_refresh(tmp_path: Path, start: Callable[..., Writer]) -> None:
    """A cursor continues after a refresh without losing or repeating messages, whatever was merged or added."""
    writer = start()
    writer.do("store 3000")
    with ts.open(tmp_path / "db", mode="r") as db:
        cursors = {(s.shard, s.number): db.cursor(s, "#") for s in db.streams("#")}
        seen: list[int] = []

        def take(limit: int) -> int:
            taken = 0
            for place, cursor in cursors.items():
                result = db.read(cursor, limit)
                cursors[place] = result.cursor
                seen.extend(int(payload[:9]) for payload in result.batch.payloads)
                taken += len(result.batch)
            return taken

        take(100)
        writer.do("compact")
        db.refresh()
        take(100)
        writer.do("store 3000")
        writer.do("compact")
        db.refresh()
        while take(1000):
            pass
        assert sorted(seen) == list(range(6000))


@pytest.mark.slow
def test_every_view_is_whole(tmp_path: Path, start: Callable[..., Writer]) -> None:
    """Beside a busy writer, each refresh shows all messages up to some batch, each exactly once."""
    writer = start()
    writer.do("store 300")
    with ts.open(tmp_path / "db", mode="r") as db:
        for _ in range(40):
            writer.begin("store 300")
            db.refresh()
            for shard in range(2):
                found = [n for n in numbers(db) if db.shard_of(f"c{n % 3}") == shard]
                expected = [n for n in range(found[-1] + 1) if db.shard_of(f"c{n % 3}") == shard]
                assert expected == found
                assert found[-1] >= writer.stored - 3  # each shard has at least one of the last three messages
            writer.stored = int(writer.line())


@pytest.mark.slow
def test_threads_read_while_one_refreshes(tmp_path: Path) -> None:
    """A view that a refresh replaces serves the reads that began in it, and is freed after the last of them."""
    with ts.open(tmp_path / "db", shards=2) as writer, ts.open(tmp_path / "db", mode="r") as db:
        writer.store(some(5000))
        db.refresh()

        def read() -> list[int]:
            return [len(numbers(db)) for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            reads = [pool.submit(read) for _ in range(3)]
            while not all(future.done() for future in reads):
                db.refresh()
        assert [future.result() for future in reads] == [[5000] * 20] * 3
        views = weakref.WeakSet(db.storage.shards)
        db.refresh()
        gc.collect()
        assert len(views) == 0


def test_what_is_not_on_disk_is_not_shown_under_sync(tmp_path: Path) -> None:
    """With `durability="sync"`, a reader fsyncs the files whose messages it is about to show."""
    with ts.open(tmp_path / "db", durability="sync") as writer:
        writer.store(some())
        with ts.open(tmp_path / "db", mode="r") as db:
            assert numbers(db) == list(range(100))


@pytest.mark.parametrize("backend", ALONE)
def test_others_say_why_they_are_locked(tmp_path: Path, start: Callable[..., Writer], backend: str) -> None:
    """If the backend can't read beside a writer, `DatabaseLockedError` names the writer's process and the reason."""
    need(backend)
    writer = start(backend)
    says = f"process {writer.process.pid} .*one process has a database at a time"
    with pytest.raises(ts.DatabaseLockedError, match=says):
        ts.open(tmp_path / "db", mode="r")
    writer.do("store 10")


# --- without a writer -----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["rocksdb", *ALONE])
def test_reads_what_was_closed(tmp_path: Path, backend: str) -> None:
    """A closed database of any backend can be read repeatedly; only LevelDB changes its files."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, shards=2) as db:
        db.store(some())
        db.add_generation()
        db.store(some())
    before = files(tmp_path / "db")
    for _ in range(2):
        with ts.open(tmp_path / "db", mode="r") as db:
            assert db.read_only
            assert db.storage.mode == ("owner" if backend in ALONE else "read-only")
            assert numbers(db, "a/3") == sorted(n for n in range(100) if n % 7 == 3 for _ in range(2))
            assert db.verify().damages == []
            assert db.info().messages == 200
            db.refresh()
            assert len(numbers(db)) == 200
        # LevelDB rewrites its own files at each opening.
        assert backend == "leveldb" or files(tmp_path / "db") == before
    with ts.open(tmp_path / "db") as db:
        assert not db.read_only
        db.refresh()
        assert len(numbers(db)) == 200


@pytest.mark.parametrize("backend", ["rocksdb", *ALONE])
def test_reads_what_a_killed_process_left(tmp_path: Path, start: Callable[..., Writer], backend: str) -> None:
    """A reader sees all acknowledged messages of a killed writer, and the next writer sees the same."""
    need(backend)
    writer = start(backend)
    writer.begin("forever 200")
    for _ in range(10):
        stored = int(writer.line())
    writer.kill()
    before = files(tmp_path / "db")
    with ts.open(tmp_path / "db", mode="r") as db:
        found = numbers(db)
        assert found[:stored] == list(range(stored))
    if backend != "leveldb":  # LevelDB rewrites its own files at each opening
        assert files(tmp_path / "db") == before
    with ts.open(tmp_path / "db") as db:
        assert numbers(db) == found


def test_a_drop_that_was_interrupted_stays_interrupted(tmp_path: Path) -> None:
    """A reader hides a generation that has a tombstone, and leaves the removal to a writer."""
    with ts.open(tmp_path / "db") as db:
        db.store(some())
        db.add_generation()
        db.storage.shards[0].generations.drop(1)
    before = files(tmp_path / "db")
    with ts.open(tmp_path / "db", mode="r") as db:
        assert numbers(db) == []
        assert [info.number for info in db.generations()] == [2]
    assert files(tmp_path / "db") == before


def test_the_open_epoch_is_replayed_but_no_cursor_reads_it(tmp_path: Path) -> None:
    """A replay includes the current epoch; a cursor stops before it, because messages may still be added in between."""
    options = {"wildcard_optimized": {"epoch_bits": 24}}
    with ts.open(tmp_path / "db", layout="wildcard_optimized", options=options) as db:
        db.store([ts.Message(f"a/{n % 50}/b", b"%09d" % n) for n in range(200)])
        with ts.open(tmp_path / "db", mode="r") as reader:
            assert numbers(reader) == list(range(200))
            assert len(list(reader.replay("a/7/+", order="time"))) == 4
            stream = next(s for s in reader.streams("#") if "+" in s.pattern)
            cursor = reader.cursor(stream, "#")
            assert len(reader.read(cursor, until=9_000_000_000_000_000).batch) == 0


# --- errors -----------------------------------------------------------------------------


def test_writing_is_refused(tmp_path: Path) -> None:
    """Every method that would change the database raises `ReadOnlyDatabaseError`, and changes nothing."""
    with ts.open(tmp_path / "db") as db:
        db.store(some())
    before = files(tmp_path / "db")
    with ts.open(tmp_path / "db", mode="r") as db:
        for write in (
            lambda: db.store([]),
            lambda: db.store(some(1)),
            lambda: db.publish(some(1)),
            lambda: db.writer(),
            lambda: db.queues.open("q"),
            lambda: db.delete("nothing"),
            lambda: db.add_generation(),
            lambda: db.drop_generation(1),
            lambda: db.compact(),
            lambda: db.subscribe("#"),
            lambda: db.checkpoint(tmp_path / "copy"),
            lambda: db.state(0).write([ts.StateWrite(b"k", b"v")]),
        ):
            with pytest.raises(ts.ReadOnlyDatabaseError):
                write()
        db.flush()
        assert len(numbers(db)) == 100
    assert files(tmp_path / "db") == before


@pytest.mark.parametrize("backend", ["rocksdb", *ALONE])
def test_a_shard_that_is_missing_is_an_error(tmp_path: Path, backend: str) -> None:
    """A missing directory of a shard raises an `EngineError` that names it, and any lock is released."""
    need(backend)
    path = tmp_path / "db"
    with ts.open(path, backend=backend, shards=2) as db:
        db.store(some())
    (path / "shard-0001").rename(path / "moved")
    with pytest.raises(ts.EngineError, match="shard-0001"):
        ts.open(path, mode="r")
    (path / "moved").rename(path / "shard-0001")
    with ts.open(path) as db:
        assert len(numbers(db)) == 100


def test_arguments_that_contradict_the_manifest(tmp_path: Path) -> None:
    """Arguments of a reader that contradict the manifest are refused, as when a database is opened for writing."""
    ts.open(tmp_path / "db", options=SMALL).close()
    with pytest.raises(ts.ManifestMismatchError):
        ts.open(tmp_path / "db", mode="r", layout="skipstream")


def test_closed_is_closed(tmp_path: Path) -> None:
    """Refreshing a closed reader raises; closing it twice doesn't."""
    ts.open(tmp_path / "db").close()
    db = ts.open(tmp_path / "db", mode="r")
    db.close()
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        db.refresh()
    with pytest.raises(ts.DatabaseClosedError):
        list(db.replay("#"))
