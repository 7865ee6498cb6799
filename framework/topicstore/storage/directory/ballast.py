"""Ballast: a file that reserves disk space, and is removed when the disk is full.

On a full disk engines can't be opened, because they write the contents of their logs into tables first, so nothing
could be dropped to make room. Therefore the file ``ballast`` in the database's directory reserves the space that one
shard needs at a time (`Backend.room`), and what the others need meanwhile (`Backend.room_at_once`), the latter as far
as there is room for it. Opening, dropping and archiving remove it, and it is made again when there is plenty of space,
at the latest with the next generation or opening, and grows with what is stored. A database that has only one
generation has nothing to drop, and no ballast; a small one has at most as much as it stores.

If the ballast can't be made, the operation that should make it doesn't fail: there is a warning, and `Database.info`
shows the reason.
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
"""The number of steps in which the ballast grows with what is stored."""
_PLENTY = 2
"""The ballast is made if this many times its size is free."""


def give_up_ballast(directory: Path) -> bool:
    """Remove a database's ballast. Returns False if there is none."""
    try:
        (directory / _NAME).unlink()
    except FileNotFoundError:
        return False
    return True


class Ballast:
    """The ballast of a database that is open for writing, of at most ``room`` bytes.

    Where the disk has no plenty of space for all of them, it has ``least`` bytes or more.
    """

    def __init__(self, directory: Path, room: int, least: int) -> None:
        self.failure: str | None = None
        """The reason why the last attempt to make or remove it failed, or None. It can be read without the lock."""
        self._directory = directory
        self._room, self._least = room, least
        self._lock = ProcessLock()
        """Guards the file and ``_needed``. It is held while shards are looked at, so it must not be taken under their
        locks."""
        self._needed: set[object] = set()
        """A mark of each operation that is using the reserved space at the moment."""

    def keep(self, shards: Sequence[Shard]) -> None:
        """Make the ballast as large as it should be, if there is plenty of space and no operation needs it now."""
        if self._room:
            with self._lock, self._failure_told():
                if not self._needed and len(shards[0].generations.listed()) > 1:
                    self._make_locked(
                        min(self._room, sum(shard.writer.open_engine().info().disk_bytes for shard in shards))
                    )

    def grow_with(self, jobs: BackgroundJobs, shards: Sequence[Shard]) -> None:
        """Make the ballast grow while messages are stored."""
        step = self._room // _STEPS

        def grow() -> None:
            job.bytes += step
            self.keep(shards)

        job = jobs.add(grow, size=step or NEVER)

    def given_up(self, shards: Sequence[Shard], work: Callable[[], T]) -> T:
        """Return what ``work``, such as a drop, returns without the ballast, and make that again.

        The ballast is removed if less space is free than the work may need.
        """
        mark = object()

        def needing() -> T:
            with self._lock, self._failure_told():
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
            except BaseException:  # for example a quota: a part of it would take space without being enough
                give_up_ballast(self._directory)
                raise
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _failure_told(self) -> Iterator[None]:
        """Warn of a failure and record it, instead of raising, because the database itself was changed as intended."""
        try:
            yield
        except DatabaseClosedError:
            pass  # another thread closed it meanwhile: the next opening makes the ballast
        except (OSError, TopicstoreError) as failed:
            self.failure = str(failed)
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors, `failure` has it
                warn_caller(f"no room is held ready for a full disk: {failed}")
        else:
            self.failure = None
