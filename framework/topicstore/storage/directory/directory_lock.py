"""The lock that lets only one process, and one `Database` object in it, write to a database.

The lock is an advisory lock (flock) on the file ``LOCK``, which also names its holder, and on the directory itself. The
kernel releases it however the process ends, so nobody ever needs to remove a stale lock.

Readers that can't write the file, because the file system is read-only or because they lack permission, share the lock
with each other, and aren't named in the file. If the file isn't readable or doesn't exist, as in a checkpoint, they
lock only the directory. On a file system that can't lock directories, only the file is locked: NFS emulates flock
with byte-range locks, and an exclusive lock needs a file that is open for writing (flock(2)).
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
from topicstore.runtime.closing import Closer, close_all

from .files import open_own

__all__ = ["DirectoryLock"]

_DENIED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
_NOT_LOCKED = frozenset((errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP))
"""The error numbers of file systems that can't lock directories, and of a directory that the user can't read."""


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
"""The locks of this process; in a forked child also those inherited from the parent."""


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
        """The file descriptors of the lock file and the directory; -1 if not opened, or closed."""
        self._shared = False
        self.held_by: tuple[int, tuple[int, int] | None] | None = None
        """The id of the process that holds the lock, and the lock file's device and inode; None if it isn't held."""
        remember(self)
        with Closer() as closer:
            closer.add(self._close)
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
        """Release the lock, even if forked processes have inherited it. This is idempotent, and a no-op in a child."""
        if os.getpid() == self._owner:
            close_all((self._clear, self._unlock, self._close))

    def leave_to_parent(self) -> None:
        """Close the lock's files in a forked child, so that the lock is released when the parent ends."""
        self._close()

    def _open(self, path: Path, *, reading: bool) -> None:
        """Open the lock file for writing.

        With ``reading``, a file that can't be written is opened read-only, to share the lock. If it can't be read
        either, it stays closed.
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
        """Return the message of the error for a held lock, which names the holder."""
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
