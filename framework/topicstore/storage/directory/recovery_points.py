"""Notes of the last write of each shard that is known to be on disk, by which lost writes are detected.

Engines can't distinguish a log that was cut short from one that was never longer. So the last write is noted beside
them after each flush, and compared when a shard is opened.

Stored form, the file ``synced`` of the database's directory: two slots for each shard, written in turn, so that one is
whole if the other is not. A slot is::

    u64 xxh64 of the slot's number and the rest, with 8 bytes of the database's id as seed   u64 writes   u64 position

``writes`` is `topicstore.shard.records.Tail.writes`. The first note after an opening makes a new file, and so does one
after the file got a second name: hard links to it, as in a snapshot of the directory, keep their contents. The file
is synced when it is made and when the database is closed: after a power failure it may have an earlier write than the
last one on disk, but never a later one.
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

__all__ = ["Synced", "SyncedWrites", "check_reached"]

_FILE = "synced"
_SLOT = struct.Struct("<QQQ")


@attrs.frozen
class Synced:
    """The last write of a shard that is known to be on disk, along with all writes before it."""

    writes: int
    position: int


class SyncedWrites:
    """The notes of all shards of one database, which are advisory: no failure of theirs fails anything else."""

    def __init__(self, directory: Path, database: bytes, shards: int) -> None:
        """Read the notes. Without notes, or if they can't be read, no write is known."""
        self.failure: str | None = None
        """The reason why the notes could not be read, or the last one not be written, or None. Guarded by ``_lock``,
        and can be read without it."""
        self._path = directory / _FILE
        self._seed = int.from_bytes(database[:8], "little")
        self._lock = ProcessLock()
        """Guards the attributes below, and is held while a note is written."""
        self._content = bytearray(2 * shards * _SLOT.size)
        self._next = [0] * shards
        """The slot of each shard to write next."""
        self._file = -1
        """The file that this object made, or -1 before it has written a note."""
        with self._failure_told("could not be read"), suppress(FileNotFoundError):
            found = read_own(self._path)[: len(self._content)]
            self._content[: len(found)] = found

    def read(self, shard: int) -> Synced | None:
        """Return the last write of a shard that is known to be on disk, or None if none is known."""
        found: list[tuple[Synced, int]] = []
        for slot in (0, 1):
            checksum, writes, position = _SLOT.unpack_from(self._content, self._offset(shard, slot))
            if checksum == self._checksum(shard, slot, writes, position):
                found.append((Synced(writes, position), slot))
        if not found:
            return None
        newest, slot = max(found, key=lambda each: (each[0].position, each[0].writes))
        self._next[shard] = 1 - slot
        return newest

    def note(self, shard: int, writes: int, position: int) -> bool:
        """Note that everything up to a write is on disk. Returns False, with a warning, if that fails."""
        with self._lock:
            slot = self._next[shard]
            data = _SLOT.pack(self._checksum(shard, slot, writes, position), writes, position)
            offset = self._offset(shard, slot)
            self._content[offset : offset + len(data)] = data
            with self._failure_told("could not be written"):
                if self._file >= 0 and os.fstat(self._file).st_nlink == 1:
                    os.pwrite(self._file, data, offset)
                else:  # the file is older than this opening, or is part of a copy made of hard links
                    self._replace_locked()
                self._next[shard] = 1 - slot
                return True
        return False

    def forget(self, shard: int) -> None:
        """Remove the notes of a shard that is opened although writes of it are missing."""
        offset = self._offset(shard, 0)
        with self._lock, self._failure_told("could not be removed"):
            self._content[offset : offset + 2 * _SLOT.size] = bytes(2 * _SLOT.size)
            self._replace_locked()

    def close(self) -> None:
        """Sync the notes to disk, and close them. May be called twice."""
        with self._lock, self._failure_told("could not be synced"):
            if self._file >= 0:
                file, self._file = self._file, -1
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the notes of a database, if there are any."""
        (directory / _FILE).unlink(missing_ok=True)

    def _replace_locked(self) -> None:
        """Write all notes to a new file, synced to disk, and go on in it."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
        replace_file(self._path, bytes(self._content), draft=self._path.with_name(f"{_FILE}.new"))
        self._file = open_own(self._path, os.O_WRONLY)

    @contextmanager
    def _failure_told(self, failed: str) -> Iterator[None]:
        """Warn of a failure and record it instead of raising, because everything but the notes is as it should be."""
        try:
            yield
        except (OSError, CorruptionError) as error:
            new, self.failure = self.failure is None, f"{self._path} {failed}: {error}"
            if new:
                with suppress(RuntimeWarning):  # where warnings are errors, `failure` has it
                    warn_caller(f"a loss of writes might go unnoticed, because {self.failure}")
        else:
            self.failure = None

    @staticmethod
    def _offset(shard: int, slot: int) -> int:
        return (2 * shard + slot) * _SLOT.size

    def _checksum(self, shard: int, slot: int, writes: int, position: int) -> int:
        return xxhash.xxh64_intdigest(struct.pack("<QQQ", 2 * shard + slot, writes, position), self._seed)


def check_reached(directory: Path, shard: int, reached: Synced | None, tail: Tail) -> None:
    """Raise `DataLossError` if a shard ends before the last write that was known to be on disk.

    Logs lose their ends only, so nothing is missing where a later position is there. The numbers of the writes then
    tell nothing, nor does a 0: a release that doesn't number them may have written in between.
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
