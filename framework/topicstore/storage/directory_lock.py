"""One process, and one `Database` object in it, writes a database.

The lock is an advisory lock (flock) on the file ``LOCK``, which also says who holds it. The
kernel gives it back however the process ends, so nothing is ever to be removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from topicstore.contract.errors import DatabaseLockedError, NotADatabaseError

__all__ = ["DirectoryLock", "open_lock"]


def open_lock(directory: Path, flags: int) -> int:
    """Open the lock file of a directory. Raises `NotADatabaseError` if it is a symbolic link."""
    path = directory / "LOCK"
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as bad:
        if bad.errno == errno.ELOOP:
            raise NotADatabaseError(f"{path} is a symbolic link; a database is locked in its own directory") from bad
        raise


class DirectoryLock:
    """Holds the lock of a database directory from its making until `release`."""

    def __init__(self, directory: Path) -> None:
        self._file = open_lock(directory, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as busy:
            holder = os.read(self._file, 1000).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise DatabaseLockedError(f"{directory} is open elsewhere: {holder}") from busy
        self._owner = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back, also from processes forked since. May be called twice; not by those."""
        if self._file >= 0 and os.getpid() == self._owner:
            os.ftruncate(self._file, 0)
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1
