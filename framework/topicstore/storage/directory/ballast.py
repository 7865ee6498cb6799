"""Ballast: a file that reserves disk space, and is removed when the disk is full.

Opening an LSM engine replays the write-ahead log into an SST file, which needs free space. Without a reserve, a
database on a full disk could not be opened to drop messages. Therefore the file ``ballast`` in the database's directory
reserves the space that one shard needs at a time (`Backend.room`). If the disk has enough space, it also reserves what
the other shards need at the same time (`Backend.room_at_once`).

Opening, dropping and archiving remove the ballast if they need its space. It is created again when enough space is
free, at the latest with the next generation or opening, and grows with the stored bytes. A database with only one
generation has nothing to drop, and no ballast. The ballast is never larger than the database.

If the ballast can't be created, the operation doesn't fail: it emits a warning, and `Database.info` shows the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from topicstore.contract.descriptors import naming
from topicstore.contract.errors import DatabaseClosedError, TopicstoreError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import guarded
from topicstore.runtime.warning import warn_caller
from topicstore.shard.shard import Shard
from topicstore.storage.background_jobs import NEVER, BackgroundJobs

from .files import open_own

__all__ = ["Ballast", "give_up_ballast"]

T = TypeVar("T")

_NAME = "ballast"
_STEPS = 16
"""The number of steps in which the ballast grows with the stored bytes."""
_PLENTY = 2
"""The ballast is created only if at least this many times its size is free."""


def give_up_ballast(directory: Path) -> bool:
    """Remove a database's ballast. Returns False if there is none."""
    try:
        (directory / _NAME).unlink()
    except FileNotFoundError:
        return False
    return True


class Ballast:
    """The ballast of a database that is open for writing, of at most ``room`` bytes.

    If the disk has too little free space for ``room`` bytes, the ballast has fewer, but at least ``least``.
    """

    def __init__(self, directory: Path, room: int, least: int) -> None:
        self.failure: str | None = None
        """The error of the last attempt to create or remove the ballast, or None. Reading it needs no lock."""
        self._directory = directory
        self._room, self._least = room, least
        self._lock = ProcessLock()
        """Guards the file and ``_needed``. Its holder acquires locks of shards, so a thread that holds one must not
        acquire it."""
        self._needed: set[object] = set()
        """A marker for each running operation that may use the reserved space."""

    def keep(self, shards: Sequence[Shard]) -> None:
        """Create or extend the ballast to its full size, if enough space is free and no operation needs it."""
        if self._room:
            with self._lock, self._failure_reported():
                if not self._needed and len(shards[0].generations.listed()) > 1:
                    self._make_locked(
                        min(self._room, sum(shard.writer.open_engine().info().disk_bytes for shard in shards))
                    )

    def grow_with(self, jobs: BackgroundJobs, shards: Sequence[Shard]) -> None:
        """Register a background job that extends the ballast as messages are stored."""
        step = self._room // _STEPS

        def grow() -> None:
            job.bytes += step
            self.keep(shards)

        job = jobs.add(grow, size=step or NEVER)

    def given_up(self, shards: Sequence[Shard], work: Callable[[], T]) -> T:
        """Call ``work``, such as a drop, and return its result; create the ballast again afterwards.

        Before the call, the ballast is removed if less space is free than the work may need.
        """
        mark = object()

        def needing() -> T:
            with self._lock, self._failure_reported():
                self._needed.add(mark)
                if self._room and shutil.disk_usage(self._directory).free < self._room:
                    give_up_ballast(self._directory)
            return work()

        def leave() -> None:
            with self._lock:
                self._needed.discard(mark)

        try:
            return guarded(needing, leave)
        finally:
            self.keep(shards)

    def _make_locked(self, most: int) -> None:
        path = self._directory / _NAME
        free = shutil.disk_usage(self._directory).free
        size = min(most, max(self._least, free // _PLENTY))
        missing = size - (path.stat().st_size if path.exists() else 0)
        if missing > 0 and free >= _PLENTY * size:
            file = open_own(path, os.O_WRONLY | os.O_CREAT)
            try:
                with naming(path):
                    os.posix_fallocate(file, 0, size)
            except BaseException:  # for example a disk quota: a partial ballast would waste space
                give_up_ballast(self._directory)
                raise
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _failure_reported(self) -> Iterator[None]:
        """Emit an error of the block as a warning and record it, because the operation itself has succeeded."""
        try:
            yield
        except DatabaseClosedError:
            pass  # another thread has closed the database: the next opening creates the ballast
        except (OSError, TopicstoreError) as failed:
            self.failure = str(failed)
            with contextlib.suppress(RuntimeWarning):  # if warnings are errors, `failure` still reports it
                warn_caller(f"no room is held ready for a full disk: {failed}")
        else:
            self.failure = None
