"""The lock by which only one process, and one `Database` object in it, writes a database.

The lock is an advisory one (flock) on the file ``LOCK``, which also names its holder, and on the directory itself. The
kernel releases it however the process ends, so a stale lock never has to be removed by hand.

Readers that can't write the file, because the file system is read-only or because they lack permission, share the lock
with each other, and aren't named in the file. If the file can't be read either, or doesn't exist, as in a checkpoint,
they lock only the directory. On a file system that can't lock directories only the file is locked: NFS emulates flock
with byte-range locks, and an exclusive one needs a file that is open for writing (flock(2)).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from topicstore.contract.descriptors import lock_file, naming
from topicstore.contract.errors import DatabaseLockedError
from topicstore.contract.forking import remember
from topicstore.contract.times import format_time
from topicstore.runtime.closing import Taken, release_all

from .files import open_own

__all__ = ["DirectoryLock"]

_DENIED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
_NOT_LOCKED = frozenset((errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP))
"""The errors of file systems that can't lock directories, and of a directory that may be entered but not read."""


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
"""The locks of this process, and in a forked child those that it has left to its parent."""


def _identity(file: int) -> tuple[int, int] | None:
    if file < 0:
        return None
    found = os.fstat(file)
    return found.st_dev, found.st_ino


class DirectoryLock:
    """The lock of a directory, held from its construction until `release`; with ``reading``, readers may share it."""

    def __init__(self, directory: Path, *, reading: bool = False) -> None:
        self._owner = os.getpid()
        self._file = self._directory = -1
        """The file descriptors; -1 if one can't be opened, or was closed."""
        self._shared = False
        self.held_by: tuple[int, tuple[int, int] | None] | None = None
        """The process that holds the lock, and the device and inode of the file; None if none holds it."""
        remember(self)
        with Taken() as taken:
            taken.add(self._close)
            path = directory / "LOCK"
            self._open(path, reading=reading)
            try:
                if self._file >= 0:
                    self._lock(self._file, path)
                self._lock_directory(directory)
            except BlockingIOError as busy:
                raise DatabaseLockedError(self._refusal(directory)) from busy
            self.held_by = self._owner, _identity(self._file)
            _held.add(self)
            if not self._shared:
                since = format_time(int(time.time()) * 1_000_000)
                holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
                with naming(path):
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, holder.encode(), 0)

    def release(self) -> None:
        """Release the lock, even if forked processes have inherited it. May be called twice, but not in those."""
        if os.getpid() == self._owner:
            release_all((self._clear, self._unlock, self._close))

    def leave_to_parent(self) -> None:
        """Close the lock's files in a forked child, so that the lock is free when the parent, which keeps it, ends."""
        self._close()

    def _open(self, path: Path, *, reading: bool) -> None:
        """Open the lock file for writing or, with ``reading``, if it can't be written, for sharing the lock.

        If the file can't be opened in that way either, it stays closed.
        """
        try:
            self._file = open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as bad:
            if not reading or bad.errno not in _DENIED:
                raise
            self._shared = True
            with suppress(FileNotFoundError, PermissionError):
                self._file = open_own(path, os.O_RDONLY)

    def _lock_directory(self, directory: Path) -> None:
        try:
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock(self._directory, directory)
        except OSError as bad:
            if self._file < 0 or bad.errno not in _NOT_LOCKED:
                raise
            unlocked, self._directory = self._directory, -1
            if unlocked >= 0:
                os.close(unlocked)

    def _lock(self, file: int, path: Path) -> None:
        lock_file(file, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, path)

    def _refusal(self, directory: Path) -> str:
        """Return who has the lock that can't be had."""
        wanted = os.getpid(), _identity(self._file)
        if self._file >= 0 and any(one.held_by == wanted for one in list(_held)):
            return f"{directory} is open elsewhere in this process (pid {os.getpid()}); use that one, or close it first"
        return f"{directory} is open elsewhere: {self._holder()}"

    def _holder(self) -> str:
        said = os.pread(self._file, 1000, 0) if self._file >= 0 else b""
        return said.decode(errors="replace").strip() or "another process"

    def _clear(self) -> None:
        if self._file >= 0 and not self._shared:
            os.ftruncate(self._file, 0)

    def _unlock(self) -> None:
        for file in (self._file, self._directory):
            if file >= 0:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _close(self) -> None:
        files = self._file, self._directory
        self._file = self._directory = -1
        self.held_by = None
        for file in files:
            if file >= 0:
                os.close(file)
