"""Databases on read-only file systems: several readers can open them, unless a writer elsewhere excludes readers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

pytestmark = pytest.mark.slow

BACKENDS = ("rocksdb", "leveldb", "duckdb")

READ = """
import topicstore as ts

def read():
    with ts.open(arguments[0], mode="r") as db, ts.open(arguments[0], mode="r") as second:
        return [[message.payload.decode() for message in each.replay("#")] for each in (db, second)]

for attempt in (read, lambda: ts.open(arguments[0])):
    try:
        say(attempt())
    except Exception as error:
        say(type(error).__name__, str(error))
"""
CRASH = """
import os
import topicstore as ts
db = ts.open(arguments[0], backend=arguments[1])
db.store([ts.Message("t", b"1"), ts.Message("t", b"2")])
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(params=BACKENDS)
def database(request: pytest.FixtureRequest, tmp_path: Path, run_until: Callable[..., Any]) -> Path:
    """A database whose writer was killed, so that opening must replay its log."""
    need(request.param)
    run_until(None, CRASH, str(tmp_path / "db"), request.param)
    return tmp_path / "db"


def files(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*")}


@pytest.mark.parametrize("with_lock", [True, False])
def test_a_read_only_file_system_is_read(database: Path, *, with_lock: bool) -> None:
    """A database on a read-only file system can be read, with or without a lock file; opening to write is refused."""
    if not with_lock:
        (database / "LOCK").unlink()
    before = files(database)
    read, written = namespaces.run_mounted(namespaces.READ_ONLY, database, 0, READ, database)
    assert [[["1", "2"]] * 2] == read
    assert "FileSystemError" == written[0]
    assert "Read-only file system" in written[1]
    assert before == files(database)


def test_its_writer_elsewhere_is_noticed(database: Path) -> None:
    """A reader on a read-only mount sees the lock of a writer that has the directory mounted writable."""
    with ts.open(database) as db:
        db.store([ts.Message("t", b"3")])
        beside = "concurrent_readers" in db.storage.capabilities
        read, _ = namespaces.run_mounted(namespaces.READ_ONLY, database, 0, READ, database)
    assert ([[["1", "2", "3"]] * 2] if beside else "DatabaseLockedError") == (read if beside else read[0])
    if not beside:
        assert f"process {os.getpid()}" in read[1]


def test_a_user_without_write_permission_reads(database: Path) -> None:
    """A user without permission to write can read a database with an existing lock file."""
    for path in (database, *database.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        read, written = namespaces.run_unprivileged(READ, database)
    finally:
        for path in (database, *database.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert [[["1", "2"]] * 2] == read
    assert "FileAccessError" == written[0]
    with ts.open(database) as db:
        assert 2 == len(list(db.replay("#")))
