"""`RecoveryPoints`: persists each shard's last fsynced write number, so that opening a shard detects lost writes.

Engines can't distinguish a truncated log from one that was never longer. Therefore the last write is recorded in a
separate file after each fsync, and compared when a shard is opened.

Stored form, the file ``synced`` of the database's directory: two slots for each shard, written in turn, so that a torn
write leaves the other slot intact. A slot is::

    u64 xxh64 of the slot's number and the rest, with 8 bytes of the database's id as seed   u64 writes   u64 position

``writes`` is `topicstore.shard.records.Tail.writes`. The first record after an opening creates a new file. So does a
record after the file got a hard link, for example in a snapshot of the directory, so that the link keeps its content.
The file is fsynced when it is created and when the database is closed. After a power failure it may therefore have an
earlier write than the last one on disk, but never a later one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import xxhash

from topicstore.contract.errors import CorruptionError, DataLossError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.positions import time_of
from topicstore.contract.times import format_time
from topicstore.runtime.warning import warn_caller
from topicstore.shard.records import Tail

from .files import open_own, read_own, replace_file

__all__ = ["RecoveryPoint", "RecoveryPoints", "check_recovered"]

_FILE = "synced"
_SLOT = struct.Struct("<QQQ")


@attrs.frozen
class RecoveryPoint:
    """The last write of a shard that is known to be on disk, along with all writes before it."""

    writes: int
    position: int


class RecoveryPoints:
    """The last fsynced write of each shard of a database. It is advisory: its errors are only warnings."""

    def __init__(self, directory: Path, database: bytes, shards: int) -> None:
        """Read the file. If it is missing or can't be read, no write is known."""
        self.failure: str | None = None
        """The error of reading the file or of the last write to it, or None. Guarded by ``_lock``; reading it needs no
        lock."""
        self._path = directory / _FILE
        self._seed = int.from_bytes(database[:8], "little")
        self._lock = ProcessLock()
        """Guards the attributes below, and is held while the file is written."""
        self._content = bytearray(2 * shards * _SLOT.size)
        self._next = [0] * shards
        """The slot to write next, by shard."""
        self._file = -1
        """The descriptor of the file that this object created; -1 before the first write."""
        with self._failure_reported("could not be read"), suppress(FileNotFoundError):
            found = read_own(self._path)[: len(self._content)]
            self._content[: len(found)] = found

    def read(self, shard: int) -> RecoveryPoint | None:
        """Return the last write of a shard that is known to be on disk, or None."""
        found: list[tuple[RecoveryPoint, int]] = []
        for slot in (0, 1):
            checksum, writes, position = _SLOT.unpack_from(self._content, self._offset(shard, slot))
            if checksum == self._checksum(shard, slot, writes, position):
                found.append((RecoveryPoint(writes, position), slot))
        if not found:
            return None
        newest, slot = max(found, key=lambda each: (each[0].position, each[0].writes))
        self._next[shard] = 1 - slot
        return newest

    def record(self, shard: int, writes: int, position: int) -> bool:
        """Record that all writes up to number ``writes`` are on disk. Returns False, with a warning, if that fails."""
        with self._lock:
            slot = self._next[shard]
            data = _SLOT.pack(self._checksum(shard, slot, writes, position), writes, position)
            offset = self._offset(shard, slot)
            self._content[offset : offset + len(data)] = data
            with self._failure_reported("could not be written"):
                if self._file >= 0 and os.fstat(self._file).st_nlink == 1:
                    os.pwrite(self._file, data, offset)
                else:  # the file is older than this opening, or has a hard link, which must keep its content
                    self._replace_locked()
                self._next[shard] = 1 - slot
                return True
        return False

    def forget(self, shard: int) -> None:
        """Remove the record of a shard, which is opened although writes of it are missing."""
        offset = self._offset(shard, 0)
        with self._lock, self._failure_reported("could not be removed"):
            self._content[offset : offset + 2 * _SLOT.size] = bytes(2 * _SLOT.size)
            self._replace_locked()

    def close(self) -> None:
        """Fsync and close the file. This is idempotent."""
        with self._lock, self._failure_reported("could not be synced"):
            if self._file >= 0:
                file, self._file = self._file, -1
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the file of a database if it exists."""
        (directory / _FILE).unlink(missing_ok=True)

    def _replace_locked(self) -> None:
        """Write all slots to a new file, fsync it, and keep it open for later records."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
        replace_file(self._path, bytes(self._content), temporary=self._path.with_name(f"{_FILE}.new"))
        self._file = open_own(self._path, os.O_WRONLY)

    @contextmanager
    def _failure_reported(self, failed: str) -> Iterator[None]:
        """Emit an error of the block as a warning and keep it in `failure`, because the messages are not affected."""
        try:
            yield
        except (OSError, CorruptionError) as error:
            new, self.failure = self.failure is None, f"{self._path} {failed}: {error}"
            if new:
                with suppress(RuntimeWarning):  # if warnings are errors, `failure` still reports it
                    warn_caller(f"a loss of writes might go unnoticed, because {self.failure}")
        else:
            self.failure = None

    @staticmethod
    def _offset(shard: int, slot: int) -> int:
        return (2 * shard + slot) * _SLOT.size

    def _checksum(self, shard: int, slot: int, writes: int, position: int) -> int:
        return xxhash.xxh64_intdigest(struct.pack("<QQQ", 2 * shard + slot, writes, position), self._seed)


def check_recovered(directory: Path, shard: int, reached: RecoveryPoint | None, tail: Tail) -> None:
    """Raise `DataLossError` if a shard ends before the last write that was known to be on disk.

    A log loses only its end, so nothing is missing if the shard has a later position. Write numbers are then not
    compared, and neither is a number of 0, because a version of topicstore without them may have written in between.
    """
    if reached is None or tail.last_position > reached.position:
        return
    unnumbered = tail.writes == 0 and tail.last_position > 0
    if tail.last_position < reached.position or (tail.writes < reached.writes and not unnumbered):
        missing = max(reached.writes - tail.writes, 1)
        raise DataLossError(
            f"shard {shard} of {directory} lacks the last {missing:,} of {reached.writes:,} writes that were on disk: "
            f"it ends at {_place(tail.last_position)} and had reached {_place(reached.position)}. "
            'Restore it from a copy, or open the database with recovery="point_in_time" to go on without them'
        )


def _place(position: int) -> str:
    return f"position {position} ({format_time(time_of(position))})" if position else "its beginning"
