"""The lock of a directory, where the file system locks no directories."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from topicstore.contract.errors import DatabaseLockedError
from topicstore.storage.directory_lock import DirectoryLock


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc/self to count files in")
@pytest.mark.parametrize(
    "number", ["EACCES", "EBADF", "EINVAL", "ENOLCK", "ENOTSUP", "EOPNOTSUPP"], ids=lambda name: name.lower()
)
def test_directories_that_cant_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """The file is what is locked then, against a second one; and nothing stays open."""
    fail_for_directories(monkeypatch, getattr(errno, number))
    for _ in range(2):
        lock = DirectoryLock(tmp_path)
        with pytest.raises(DatabaseLockedError, match=f"process {os.getpid()}"):
            DirectoryLock(tmp_path)
        lock.release()
        assert [] == opened(tmp_path)


def test_other_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for_directories(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="it fails here"):
        DirectoryLock(tmp_path)
    monkeypatch.undo()
    DirectoryLock(tmp_path).release()


def opened(directory: Path) -> list[str]:
    """Return what this process has open of a directory, itself included."""
    return [link for link in map(link_of, Path("/proc/self/fd").iterdir()) if link.startswith(str(directory))]


def link_of(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # that of the listing
        return ""


def fail_for_directories(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, "it fails here")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
