"""One process, and one `Database` object in it, writes a database.

The lock is an advisory lock (flock) on the file ``LOCK``, which also says who holds it. The
kernel gives it back however the process ends, so nothing is ever to be removed by hand.

Readers who can't write the file, because the file system is read-only or for want of permission, share the lock with
each other, and stand nowhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from topicstore.contract.errors import DatabaseLockedError, NotADatabaseError
from topicstore.contract.forking import remember
from topicstore.releasing import Taken, release_all

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Holds the lock of a directory from its making until `release`; with ``reading``, one that readers may share."""

    def __init__(self, directory: Path, *, reading: bool = False) -> None:
        self._owner = os.getpid()
        self._file = -1
        remember(self)
        self._file, self._shared = _open(directory, reading=reading)
        if self._file < 0:
            return
        with Taken() as taken:
            taken.add(self._close)
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as busy:
                holder = os.read(self._file, 1000).decode(errors="replace").strip() or "another process"
                raise DatabaseLockedError(f"{directory} is open elsewhere: {holder}") from busy
            if self._shared:
                return
            since = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back, also from processes forked since. May be called twice; not by those."""
        if self._file >= 0 and os.getpid() == self._owner:
            release_all((self._clear, self._unlock, self._close))

    def leave_to_parent(self) -> None:
        """Let go of the lock in a forked child, so that it is free when the parent ends; the parent keeps it."""
        if self._file >= 0:
            self._close()

    def _clear(self) -> None:
        if not self._shared:
            os.ftruncate(self._file, 0)

    def _unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


def _open(directory: Path, *, reading: bool) -> tuple[int, bool]:
    """Return the lock file and whether it can only be shared; -1 where nobody can write it and there is none."""
    path = directory / "LOCK"
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644), False
    except OSError as bad:
        if bad.errno == errno.ELOOP:
            raise NotADatabaseError(f"{path} is a symbolic link; a database is locked in its own directory") from bad
        if not reading or bad.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        if bad.errno == errno.EROFS and not path.exists():
            return -1, True
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags), True
