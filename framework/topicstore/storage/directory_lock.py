"""One process, and one `Database` object in it, writes a database.

The lock is an advisory lock (flock) on the file ``LOCK``, which also says who holds it. The
kernel gives it back however the process ends, so nothing is ever to be removed by hand.
"""

from __future__ import annotations

import fcntl
import os
import socket
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from topicstore.contract.errors import DatabaseLockedError
from topicstore.contract.forking import remember
from topicstore.releasing import Taken, release_all

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Holds the lock of a database directory from its making until `release`."""

    def __init__(self, directory: Path) -> None:
        path = directory / "LOCK"
        self._owner = os.getpid()
        self._file = -1
        remember(self)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with Taken() as taken:
            taken.add(self._close)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as busy:
                holder = os.read(self._file, 1000).decode(errors="replace").strip() or "another process"
                raise DatabaseLockedError(f"{directory} is open elsewhere: {holder}") from busy
            since = datetime.now(UTC).isoformat(timespec="seconds")
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back, also from processes forked since. May be called twice; not by those."""
        if self._file >= 0 and os.getpid() == self._owner:
            release_all((partial(os.ftruncate, self._file, 0), self._unlock, self._close))

    def leave_to_parent(self) -> None:
        """Let go of the lock in a forked child, so that it is free when the parent ends; the parent keeps it."""
        if self._file >= 0:
            self._close()

    def _unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)
