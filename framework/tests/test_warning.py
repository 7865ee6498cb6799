"""Every warning names the line of the calling program, and no line of topicstore or another library."""

from __future__ import annotations

import errno
import linecache
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import START, Clock

SECOND = 1_000_000
DAY = 86_400 * SECOND
Told = list[warnings.WarningMessage]


@pytest.fixture(autouse=True)
def told() -> Iterator[Told]:
    """Record warnings, and check that each names a line with the comment that the call warns."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told
    assert told
    for each in told:
        assert "# it warns" in linecache.getline(each.filename, each.lineno), each


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A database after a kill, with damage in the middle of its log."""
    need("rocksdb")
    with ts.open(tmp_path / "db", durability="sync", auto_compact=False) as db:
        for number in range(30):
            db.store([ts.Message("t", b"%d" % number + bytes(3_000))])
        killed = shutil.copytree(tmp_path / "db", tmp_path / "killed")
    (log,) = (file for file in killed.glob("shard-0000/*.log") if file.stat().st_size)
    flip(log, log.stat().st_size // 2)
    return killed


def test_a_cut_log_and_what_is_missing(damaged: Path, told: Told) -> None:
    ts.open(damaged, recovery="point_in_time").close()  # it warns that the log was truncated and writes are missing
    assert ["was cut", "lacks the last"] == [
        words for words, each in zip(("was cut", "lacks the last"), told, strict=True) if words in str(each.message)
    ]


def test_what_was_salvaged(damaged: Path, told: Told) -> None:
    ts.open(damaged, mode="r+", recovery="salvage").close()  # it warns that messages were salvaged
    assert "salvaged" in str(told[-1].message)


def test_files_that_are_gone(tmp_path: Path) -> None:
    need("rocksdb")
    file = tmp_path / "db" / "shard-0000" / "something"
    with ts.open(tmp_path / "db"):
        file.write_bytes(b"that is listed, though the engine doesn't need it")
    file.unlink()
    with ts.open(tmp_path / "db", recovery="point_in_time"):  # it warns that a file is missing
        pass


def test_a_queue(tmp_path: Path) -> None:
    """Opening a queue warns of the same conditions as opening its database."""
    need("rocksdb")
    clock = Clock()
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.queues.open("q").append([ts.Message("t", b"1")])
    clock.now -= 60 * SECOND
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.queues.open("q")  # it warns that the clock is behind the last position


def test_a_position_in_the_future(tmp_path: Path) -> None:
    need("leveldb")
    with ts.open(tmp_path / "db", backend="leveldb", clock=lambda: START + 10 * SECOND) as db:
        db.store([ts.Message("t", b"1")])
    ts.open(tmp_path / "db", clock=lambda: START).close()  # it warns that the clock is behind the last position


def test_a_checkpoint_that_looks_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("rocksdb")
    monkeypatch.chdir(tmp_path)
    with ts.open("db") as db:
        db.store([ts.Message("t", b"1")])
        db.add_generation()
        db.archives.archive("cold")
        db.checkpoint("elsewhere/db")  # it warns that the archive's path is relative


def test_ballast_that_cant_be_made(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    need("rocksdb")

    def fails(*_: object) -> None:
        raise OSError(errno.EDQUOT, "it fails here")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("t", b"1")])
        db.add_generation()  # it warns that the ballast can't be created
        db.drop_generation(1)
        db.add_generation()  # it warns that the ballast can't be created
        db.drop_generation(2)
    assert 2 <= len(told)


def test_a_clock_that_jumped(tmp_path: Path) -> None:
    need("rocksdb")
    clock = Clock()
    with ts.open(tmp_path / "db", clock=clock, monotonic=clock.monotonic) as db:
        db.retention.stop()
        db.retention.set(max_age=7 * DAY // SECOND)
        clock.jump(40 * DAY)
        db.retention.run()  # it warns that the clock jumped forward
