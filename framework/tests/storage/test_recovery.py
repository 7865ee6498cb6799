"""A shard whose write failed accepts writes again after `recover`, while the database stays open."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.engine import STATE, WriteBatch
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

BACKENDS = ["rocksdb", "leveldb", "duckdb"]

SHORT = """
import os, resource, signal, warnings
import topicstore as ts

path, backend, durability, short = arguments
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
small = {
    "rocksdb": {"write_buffer_bytes": 1 << 16}, "leveldb": {"write_buffer_bytes": 1 << 16},
    "duckdb": {"log_bytes": 1 << 16},
}[backend]
db = ts.open(path, backend=backend, durability=durability, options={backend: small}, auto_compact=False)
texts = lambda messages: [message.payload.rstrip(b"\\0").decode() for message in messages]
stored = []
def store(name):
    db.store([ts.Message("t", name.encode() + bytes(20_000))])
    stored.append(name)
for number in range(30):
    store(f"before {number}")
subscription = db.subscribe("t", start=0)
following = iter(subscription)
followed = [next(following) for _ in range(30)]
replay = iter(db.replay("#"))
replayed = [next(replay)]
sessions = db.sessions
session = sessions.open("me", expiry_interval=None)
session.subscribe("t", 1)

held = []
if short == "files":
    kind, limits = resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(kind, (256, limits[1]))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
else:
    kind, limits = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(kind, (0, limits[1]))
failed = []
for number in range(2_000):
    try:
        store(f"during {number}")
    except ts.TopicstoreError as error:
        failed.append(type(error).__name__)
        if len(failed) == 3:
            break
say("failed", failed)
try:
    db.recover()
    say("recovered too soon")
except (ts.TopicstoreError, ExceptionGroup) as error:
    say("refused", type(error).__name__)
for one in held:
    os.close(one)
resource.setrlimit(kind, limits)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    say("numbers", db.recover(), db.recover())
there = texts(db.replay("#"))
nevertheless = [name for name in there if name not in stored]
say("nevertheless", len(nevertheless), sum("stored nevertheless" in str(one.message) for one in warned))
stored = there if nevertheless else stored
for number in range(10):
    store(f"after {number}")
while len(followed) < len(stored):
    followed.append(next(following))
replayed.extend(replay)
given = []
while True:
    batch = session.deliver()
    if not batch:
        break
    for one in batch:
        given.append(one)
        session.puback(one.packet_id)
say("whole", texts(db.replay("#")) == stored, texts(followed) == stored)
say("replayed", texts(replayed) == stored[: len(replayed)], len(replayed) >= 30)
say("given", texts(one.message for one in given) == stored[30:])
say("damages", list(db.verify().damages))
subscription.close()
db.close()
with ts.open(path) as db:
    say("reopened", texts(db.replay("#")) == stored)
"""


@pytest.mark.parametrize("short", ["files", "room"])
@pytest.mark.parametrize(("backend", "durability"), [*itertools.product(BACKENDS, ["commit"]), ("rocksdb", "sync")])
def test_what_was_short_comes_back(tmp_path: Path, backend: str, durability: str, short: str) -> None:
    """After space or file descriptors ran short, `recover` loses no acknowledged write, and all readers continue.

    A warning names a failed write that was stored nevertheless.
    """
    need(backend)
    said = {name: rest for name, *rest in namespaces.run(SHORT, tmp_path / "db", backend, durability, short)}
    assert said["failed"][0], "the disk was not full"
    assert said["numbers"] == [[0], []]
    # on DuckDB, one write is stored nevertheless if the log's directory can't be synced
    assert said["nevertheless"] in ([0, 0], [1, 1])
    assert [said["whole"], said["replayed"], said["given"]] == [[True, True], [True, True], [True]]
    assert [said["damages"], said["reopened"]] == [[[]], [True]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_continue_across_a_recovery(tmp_path: Path, backend: str) -> None:
    """A scan that began before a recovery continues after its last key, forwards or backwards.

    A snapshot that was taken before the recovery raises an error.
    """
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        shard = db.storage.shards[0]
        keys = [b"\x02key %04d" % number for number in range(1_000)]
        write = WriteBatch()
        write.put_many(STATE, keys, [bytes(2_000)] * len(keys))
        shard.writer.open_engine().write(write)
        reader = shard.writer.open_engine()
        scans = [
            reader.scan(STATE, b"\x02"),
            reader.scan(STATE, b"\x02", reverse=True),
            reader.scan(STATE, b"\x02", limit=700),
            reader.scan(STATE, b"\x02", reverse=True, limit=700),
        ]
        begun = [next(scan) for scan in scans]
        assert all(len(chunk) < 700 for chunk in begun)
        with reader.snapshot() as snapshot:
            _fail(db)
            assert db.recover() == [0]
            found = [
                [key for chunk in (first, *rest) for key, _ in chunk] for first, rest in zip(begun, scans, strict=True)
            ]
            assert found == [keys, keys[::-1], keys[:700], keys[:-701:-1]]
            if backend != "duckdb":  # on DuckDB the snapshot stays valid
                with pytest.raises(ts.EngineError, match="read again"):
                    snapshot.get(STATE, keys[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recovery_that_finds_no_room_leaves_the_shard_readable(tmp_path: Path, backend: str) -> None:
    """Without space, `recover` doesn't close the engine, and the shard stays readable."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        db.store([ts.Message("t", b"1")])
        _fail(db)
        full = OSError(28, "No space left on device")
        with patch("topicstore.storage.opening.os.fsync", side_effect=full), pytest.raises(ts.StorageFullError):
            db.recover()
        assert [message.payload for message in db.replay("#")] == [b"1"]
        with pytest.raises(ts.ShardReadOnlyError, match="recover"):
            db.store([ts.Message("t", b"2")])
        assert db.recover() == [0]
        db.store([ts.Message("t", b"2")])
        assert [message.payload for message in db.replay("#")] == [b"1", b"2"]


def test_an_engine_that_can_not_be_opened_is_opened_later(tmp_path: Path) -> None:
    """If `recover` can't open the engine, reads raise an error that says so, until a later `recover` succeeds."""
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        db.store([ts.Message("t", b"1")])
        _fail(db)
        current = tmp_path / "db" / "shard-0000" / "CURRENT"
        current.rename(current.with_name("hidden"))
        with pytest.raises(ts.DataLossError):
            db.recover()
        with pytest.raises(ts.EngineError, match="until it is opened again"):
            list(db.replay("#"))
        current.with_name("hidden").rename(current)
        assert db.recover() == [0]
        assert [message.payload for message in db.replay("#")] == [b"1"]


def test_memory_can_not_be_opened_again(tmp_path: Path) -> None:
    """A shard that isn't persistent can't be recovered after a failed write, but its messages stay readable."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.store([ts.Message("t", b"1")])
        _fail(db)
        with pytest.raises(ts.ShardReadOnlyError):
            db.recover()
        assert [message.payload for message in db.replay("#")] == [b"1"]


def _fail(db: ts.Database) -> None:
    """Make a write of the only shard fail."""
    engine = db.storage.shards[0].writer.engine
    with patch.object(engine, "write", side_effect=ts.StorageFullError("no room")), pytest.raises(ts.StorageFullError):
        db.store([ts.Message("t", b"failed")])
