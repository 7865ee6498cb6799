"""Databases that other users may read: closed, open or copied, with and without a readable lock file."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

pytestmark = pytest.mark.slow

BACKENDS = ("rocksdb", "leveldb", "duckdb")
LOCK_FILES = ("there", "unreadable", "missing")

READ = """
import topicstore as ts

def read():
    with ts.open(arguments[0], mode="r") as db:
        list(db.replay("#"))  # by root too, who can't have a second reader: so all is imported that reading takes
    with ts.open(arguments[0], mode="r") as db, ts.open(arguments[0], mode="r") as second:
        return [[message.payload.decode() for message in each.replay("#")] for each in (db, second)]

for attempt in (read, lambda: ts.open(arguments[0]).close()):
    try:
        say(attempt())
    except Exception as error:
        say(type(error).__name__, str(error))
"""
VERIFY = """
import topicstore as ts

with ts.open(arguments[0], mode="r") as db:
    say([str(damage) for damage in db.verify().damages])
"""
LOCKED = """
import fcntl, os
import topicstore as ts

with ts.open(arguments[0], mode="r"):
    try:
        fcntl.flock(os.open(arguments[0], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        say("free")
    except BlockingIOError:
        say("locked")
"""


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that everybody may read, with a directory for the temporary files of child processes."""
    with tempfile.TemporaryDirectory() as directory:
        public = Path(directory)
        public.chmod(0o755)
        if (reason := namespaces.why_no_other_user(public.parent)) is not None:
            pytest.skip(reason)
        monkeypatch.setenv("TMPDIR", f"{public / 'temporary'}")
        (public / "temporary").mkdir()
        (public / "temporary").chmod(0o1777)
        yield public


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return str(request.param)


def make(path: Path, backend: str) -> Path:
    with ts.open(path, backend=backend, durability="sync", permissions=0o755, auto_compact=False) as db:
        db.store([ts.Message("t", b"1")])
    with ts.open(path, auto_compact=False) as db:
        db.store([ts.Message("t", b"2")])
    return path


def leave(path: Path, lock_file: str) -> None:
    """Leave the lock file as it is, make it readable for its owner only, or remove it."""
    if lock_file == "unreadable":
        (path / "LOCK").chmod(0o600)
    elif lock_file == "missing":
        (path / "LOCK").unlink()


def state(path: Path) -> dict[str, tuple[int, int, int]]:
    files = {str(file.relative_to(path)): file.stat() for file in (path, *path.rglob("*"))}
    return {name: (found.st_mtime_ns, found.st_size, found.st_nlink) for name, found in files.items()}


def read(path: Path, backend: str) -> list[list[Any]]:
    """Return the results of another user, who opens two readers and then tries to write."""
    return namespaces.run_as_another_user(READ, path, make(path.with_name("rehearsal"), backend))


@pytest.mark.parametrize("lock_file", LOCK_FILES)
def test_a_closed_database_is_read(public: Path, backend: str, lock_file: str) -> None:
    """Another user opens several readers, which change nothing; opening to write raises `FileAccessError`."""
    path = make(public / "db", backend)
    leave(path, lock_file)
    before = state(path)
    found, written = read(path, backend)
    assert [[["1", "2"]] * 2] == found
    assert "FileAccessError" == written[0]
    assert before == state(path)


@pytest.mark.parametrize("backend", ["rocksdb", "duckdb"], indirect=True)
def test_a_checkpoint_is_read(public: Path, backend: str) -> None:
    """A checkpoint has the permissions of its database, and no lock file until it is opened to write."""
    make(public / "db", backend)
    with ts.open(public / "db") as db:
        db.checkpoint(public / "copy")
    assert not (public / "copy" / "LOCK").exists()
    assert [[["1", "2"]] * 2] == read(public / "copy", backend)[0]


def test_queues_are_as_open_as_their_database(public: Path, backend: str) -> None:
    """Queues have the permissions of their database, so that another user can verify them."""
    for name in ("db", "rehearsal"):
        with ts.open(make(public / name, backend)) as db:
            db.queues.open("q").append([ts.Message("t", b"q")])
    assert [[[]]] == namespaces.run_as_another_user(VERIFY, public / "db", public / "rehearsal")


@pytest.mark.parametrize("lock_file", LOCK_FILES)
def test_a_living_writer_is_noticed(public: Path, backend: str, lock_file: str) -> None:
    """Another user can read beside a writer if the engine allows it.

    Otherwise the error names the writer's process, if the lock file can be read.
    """
    path = make(public / "db", backend)
    with ts.open(path, auto_compact=False) as db:
        leave(path, lock_file)
        db.store([ts.Message("t", b"3")])
        found, _ = read(path, backend)
    if backend == "rocksdb":
        assert [[["1", "2", "3"]] * 2] == found
    else:
        assert "DatabaseLockedError" == found[0]
        assert (f"process {os.getpid()}" in found[1]) == (lock_file == "there")


@pytest.mark.parametrize("lock_file", LOCK_FILES)
def test_a_reader_keeps_writers_out(public: Path, lock_file: str) -> None:
    """A reader that can't open the lock file locks the directory instead, and writers lock both."""
    need("leveldb")
    path = make(public / "db", "leveldb")
    leave(path, lock_file)
    assert [["locked"]] == namespaces.run_as_another_user(LOCKED, path, make(public / "rehearsal", "leveldb"))
    reader = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(ts.DatabaseLockedError):
            ts.open(path)
    finally:
        os.close(reader)
    with ts.open(path) as db:
        assert [b"1", b"2"] == [message.payload for message in db.replay("#")]


def test_what_others_may_not_enter_is_reported(public: Path, backend: str) -> None:
    """Databases with the default permissions can't be opened by other users."""
    path = make(public / "db", backend)
    path.chmod(0o700)
    assert ["FileAccessError", "FileAccessError"] == [told[0] for told in read(path, backend)]
