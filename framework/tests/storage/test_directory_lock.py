"""The lock of a directory, and the errors of its system calls."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.errors import DatabaseLockedError
from topicstore.storage.directory.directory_lock import DirectoryLock
from topicstore_conformance.conditions.skipping import need


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc/self to count files in")
@pytest.mark.parametrize(
    "number", ["EACCES", "EBADF", "EINVAL", "ENOLCK", "ENOTSUP", "EOPNOTSUPP"], ids=lambda name: name.lower()
)
def test_directories_that_cant_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """On a file system that can't lock directories, the lock file is locked, so that a second lock is refused.

    No file stays open.
    """
    fail_for_directories(monkeypatch, getattr(errno, number))
    for _ in range(2):
        lock = DirectoryLock(tmp_path)
        with pytest.raises(DatabaseLockedError, match=rf"in this process \(pid {os.getpid()}\)"):
            DirectoryLock(tmp_path)
        lock.release()
        assert [] == opened(tmp_path)


def test_other_failures_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for_directories(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="it fails here"):
        DirectoryLock(tmp_path)
    monkeypatch.undo()
    DirectoryLock(tmp_path).release()


def test_a_volume_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ``flock`` names the lock file, and advises to use a local disk."""

    def flock(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ts.FileSystemError, match=r"can't lock files \(flock\).*; use a local disk.*LOCK'") as failed:
        ts.open(tmp_path / "db")
    assert (errno.ENOLCK, str(tmp_path / "db" / "LOCK")) == (failed.value.errno, failed.value.filename)


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync"])
def test_a_failing_call_on_a_descriptor_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An error of a call on a file descriptor names the file."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ts.FileSystemError, match=f"Input/output error: '{tmp_path}"):
        ts.open(tmp_path / "db")


def test_errors_of_the_system_are_the_librarys_and_the_systems(tmp_path: Path) -> None:
    """Errors of system calls are subclasses of the library's error and of the matching built-in error."""
    file = tmp_path / "file"
    file.touch()
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"")])
        db.add_generation()
        with pytest.raises(ts.PathNotDirectoryError, match=r"export'") as failed:
            db.archives.export(file / "export")
        assert (errno.ENOTDIR, True) == (failed.value.errno, isinstance(failed.value, NotADirectoryError))
        with pytest.raises(ts.PathExistsError, match=r"file'") as there:
            db.checkpoint(file / "copy")
        assert isinstance(there.value, FileExistsError)


CLOSED = """
import os, sys
import topicstore as ts
directory, backend, report = sys.argv[1:]
for number in range(3):
    os.close(number)
with ts.open(directory, backend=backend) as db:
    db.store([ts.Message("a/b", b"1", "c")])
    found = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
with ts.open(directory, mode="r") as db:
    found += [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
with open(report, "w") as file:
    print(*found, file=file)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc/self to look at files in")
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_no_file_becomes_a_standard_stream(tmp_path: Path, backend: str) -> None:
    """A database's files never get the descriptors of closed standard streams, to which the program could print."""
    need(backend)
    subprocess.run([sys.executable, "-c", CLOSED, tmp_path / "db", backend, tmp_path / "report"], check=True)
    assert [os.devnull] * 6 == (tmp_path / "report").read_text().split()


def opened(directory: Path) -> list[str]:
    """Return the open files of this process within a directory, and the directory itself if open."""
    return [link for link in map(link_of, Path("/proc/self/fd").iterdir()) if link.startswith(str(directory))]


def link_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # the descriptor with which the directory itself is listed
        return ""


def fail_for_directories(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, "it fails here")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
