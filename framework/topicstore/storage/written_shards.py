"""The shards of a database that is open for writing, the notes beside them, and the lock of its directory.

They are closed in this order, even if a step fails or is interrupted: the notes when no shard writes any more, the lock
when nothing of the database is written any more.
"""

from __future__ import annotations

from pathlib import Path

from topicstore.releasing import Taken, release_all
from topicstore.shard.shard import Shard

from .closed_files import ClosedFiles
from .directory_lock import DirectoryLock
from .disk_errors import failure_told
from .synced_writes import SyncedWrites

__all__ = ["WrittenShards"]


class WrittenShards:
    """The open parts of a database that is open for writing. They are added while the database is opened."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self.synced: SyncedWrites | None = None
        """The notes of the last writes on disk; None if the backend isn't persistent."""
        self.files: ClosedFiles | None = None
        """The list of files, to be written when the shards are closed; None before all are open, and after it was
        written."""
        self._locked = Taken()

    def lock(self, directory: Path) -> None:
        """Take the lock of the directory. Raises `DatabaseLockedError`."""
        self._locked.add(DirectoryLock(directory).release)

    def close(self) -> None:
        """Close the shards, and then the notes. An interrupted close is finished by the next call."""
        release_all((*(shard.close for shard in reversed(self.shards)), self._close_notes))

    def unlock(self) -> None:
        """Release the lock, unless a shard is still open because closing it was interrupted."""
        if self._closed:
            self.files = None  # from now on other processes may write
            self._locked.release()

    @property
    def _closed(self) -> bool:
        return all(shard.log.closed for shard in self.shards)

    def _close_notes(self) -> None:
        if self._closed:
            files, self.files = self.files, None
            with failure_told():
                if self.synced is not None:
                    self.synced.close()
                if files is not None and all(shard.log.closed_in_order for shard in self.shards):
                    files.write()
