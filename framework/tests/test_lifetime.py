"""A database stays open while an iterator, writer or subscription uses it, even without a reference to the database."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts

pytestmark = pytest.mark.slow

MESSAGES = [ts.Message("a/b", str(number).encode(), "me") for number in range(10)]
PAYLOADS = [message.payload for message in MESSAGES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a closed database with ten messages."""
    with ts.open(tmp_path / "db", backend="leveldb") as db:  # LevelDB refuses a second opening
        db.store(MESSAGES)
    return tmp_path / "db"


def replay(path: Path) -> Iterator[bytes]:
    return (message.payload for message in ts.open(path).replay("#", batch_size=3))


def replay_in_order(path: Path) -> Iterator[bytes]:
    return (message.payload for message in ts.open(path).replay("#", order="time", batch_size=3))


def replay_arrow(path: Path) -> Iterator[bytes]:
    return (value.as_py() for batch in ts.open(path).replay_arrow("#", batch_size=3) for value in batch["payload"])


def subscription(path: Path) -> Iterator[bytes]:
    with ts.open(path).subscribe("#", 0, batch_size=3) as followed:
        for _ in range(len(MESSAGES)):
            yield next(iter(followed)).payload


READERS = [replay, replay_in_order, replay_arrow, subscription]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")
def test_a_reader_keeps_it_open(path: Path, reader: Callable[[Path], Iterator[bytes]]) -> None:
    """A database stays open while only a reader refers to it, and closes when the reader is dropped."""
    found = []
    reading = reader(path)
    for payload in reading:
        gc.collect()
        found.append(payload)
        if len(found) == len(PAYLOADS):
            break
    assert found == PAYLOADS
    with pytest.raises(ts.DatabaseLockedError):
        ts.open(path)
    del reading
    gc.collect()
    with ts.open(path) as db:
        assert db.info().messages == len(MESSAGES)


def use_and_drop(path: Path, held: str) -> None:
    """Open a database, use a part of it, and drop the reference."""
    db = ts.open(path)
    if held == "sessions":
        db.sessions.open("me", expiry_interval=None)
    if held == "retention":
        db.retention.set(max_age=1_000.0)
        db.retention.start(1_000.0)
    if held == "persistence":
        db.persistence.add("a/#")
    if held == "queues":
        db.queues.open("waiting").append(MESSAGES)
    db.store(MESSAGES)
    del db
    gc.collect()


@pytest.mark.parametrize("held", ["", "sessions", "retention", "persistence", "queues"])
def test_dropped_it_says_so_and_is_free(path: Path, held: str) -> None:
    """Dropping an open database warns, and leaves no thread, file or lock, whichever parts were used."""
    before = set(threading.enumerate())
    with pytest.warns(ResourceWarning, match=r"leveldb.* was not closed"):
        use_and_drop(path, held)
    assert set(threading.enumerate()) <= before
    ts.open(path).close()


@pytest.mark.parametrize("reader", READERS)
def test_closed_under_a_reader(path: Path, reader: Callable[[Path], Iterator[bytes]], monkeypatch: Any) -> None:
    """Closing a database doesn't wait for readers; their next read raises `DatabaseClosedError`."""
    opened = []
    whole = ts.open
    monkeypatch.setattr(ts, "open", lambda path: opened.append(whole(path)) or opened[0])
    reading = reader(path)
    assert next(reading) == PAYLOADS[0]
    opened[0].close()
    with pytest.raises(ts.DatabaseClosedError):
        list(reading)
    whole(path).close()


@pytest.mark.parametrize("holder", ["writer", "subscription"])
@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")
def test_sessions_work_while_a_reference_keeps_it_open(path: Path, holder: str) -> None:
    """Sessions work while a writer or a subscription keeps the database open, but don't keep it open themselves."""
    db = ts.open(path)
    session = db.sessions.open("me", expiry_interval=None)
    held: Any = db.writer() if holder == "writer" else db.subscribe("#")
    del db
    gc.collect()
    session.subscribe("a/#", 1)
    session.publish([ts.Message("a/b", b"new", "me", 1)])
    assert [b"new"] == [packet.message.payload for packet in session.deliver()]
    held.close()
    del held
    gc.collect()
    with pytest.raises(ts.DatabaseClosedError):
        session.subscribe("b/#")
    ts.open(path).close()


def test_an_opening_that_fails_after_opening_files_closes_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If opening fails after the files were opened, they are closed, even while the caller keeps the error."""

    def fail(*_: object) -> None:
        raise ts.CorruptionError("a segment can't be read", "shard 0")

    monkeypatch.setattr("topicstore.database.CompactionScheduler", fail)
    with pytest.raises(ts.CorruptionError):
        ts.open(path)
    monkeypatch.undo()
    ts.open(path).close()


def test_a_closed_database_refuses_listeners(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that registers while the database closes is refused, since nothing would wake it later."""
    db = ts.open(path)
    # The database is closed after the check whether it is open, and before the registration.
    monkeypatch.setattr(db.storage, "check_may_write", db.close)
    with pytest.raises(ts.DatabaseClosedError):
        db.subscribe("#")
    with pytest.raises(ts.DatabaseClosedError):
        db.storage.on_close(db.close)


def test_closing_stops_listeners_then_plugins_then_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing stops listeners, notifies plugins, closes shards, joins threads, and releases the lock last.

    A plugin may therefore wait for a listener's thread, and read the database.
    """
    db, done = ts.open(path), []
    shard, hub, storage = db.storage.shards[0], db._publisher.hub, db.storage
    close = shard.close
    monkeypatch.setattr(hub, "stop", partial(done.append, "listeners"))
    monkeypatch.setattr(storage.hooks, "topicstore_closed", lambda **_: done.append("plugins"))
    monkeypatch.setattr(storage, "_close_shards", lambda: (done.append("shards"), close()))
    monkeypatch.setattr(hub, "join", partial(done.append, "threads"))
    unlock = storage._unlock
    monkeypatch.setattr(storage, "_unlock", lambda: (done.append("lock"), unlock()))
    db.close()
    assert ["listeners", "plugins", "listeners", "shards", "threads", "lock"] == done
