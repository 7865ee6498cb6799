"""Who keeps a database open: whoever still reads in it, though nobody holds the database itself any more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts

MESSAGES = [ts.Message("a/b", str(number).encode(), "me") for number in range(10)]
PAYLOADS = [message.payload for message in MESSAGES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database that is closed, with ten messages."""
    with ts.open(tmp_path / "db", backend="leveldb") as db:  # its engine refuses whoever comes second
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
def test_who_reads_keeps_it_open(path: Path, reader: Callable[[Path], Iterator[bytes]]) -> None:
    """Everything comes though only the reader is held; when it is gone, the database is free for the next."""
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
    """Open a database, use something of it, and let go of it."""
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
    """Who lets go of an open database, whatever of it was used, is told; no thread, file or lock of it is left."""
    before = set(threading.enumerate())
    with pytest.warns(ResourceWarning, match=r"leveldb.* was not closed"):
        use_and_drop(path, held)
    assert set(threading.enumerate()) <= before
    ts.open(path).close()


@pytest.mark.parametrize("reader", READERS)
def test_closed_under_a_reader(path: Path, reader: Callable[[Path], Iterator[bytes]], monkeypatch: Any) -> None:
    """Closing doesn't wait for readers: the next fetch is told."""
    opened = []
    whole = ts.open
    monkeypatch.setattr(ts, "open", lambda path: opened.append(whole(path)) or opened[0])
    reading = reader(path)
    assert next(reading) == PAYLOADS[0]
    opened[0].close()
    with pytest.raises(ts.DatabaseClosedError):
        list(reading)
    whole(path).close()
