"""Notes of the last write of each shard that is known to be on disk, by which lost writes are detected.

Engines can't distinguish a log that was cut short from one that was never longer. So the last write is noted beside
them after each flush, and compared when a shard is opened.

Stored form, the file ``synced`` of the database's directory: two slots for each shard, written in turn, so that one is
whole if the other is not. A slot is::

    u64 xxh64 of the slot's number and the rest, with 8 bytes of the database's id as seed   u64 writes   u64 position

``writes`` is `topicstore.shard.records.Tail.writes`. The file itself is synced only when the database is closed: after
a power failure it may have an earlier write than the last one on disk, but never a later one.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import attrs
import xxhash

from topicstore.contract.errors import DataLossError
from topicstore.contract.positions import time_of
from topicstore.contract.times import format_time
from topicstore.shard.records import Tail

from .disk_errors import failure_told
from .durable_files import open_own

__all__ = ["Synced", "SyncedWrites", "check_reached"]

_FILE = "synced"
_SLOT = struct.Struct("<QQQ")


@attrs.frozen
class Synced:
    """The last write of a shard that is known to be on disk, along with all writes before it."""

    writes: int
    position: int


class SyncedWrites:
    """The notes of all shards of one database. Each shard's are written under a lock of its own."""

    def __init__(self, directory: Path, database: bytes, shards: int, *, read_only: bool = False) -> None:
        """Open the notes and, unless ``read_only``, reserve space for them. Without notes, no write is known."""
        self._file = -1
        self._seed = int.from_bytes(database[:8], "little")
        self._next = [0] * shards
        """The slot of each shard to write next. Guarded by `CommitLog._note_lock`, once the shard is open."""
        try:
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            self._file = open_own(directory / _FILE, flags)
        except FileNotFoundError:
            return
        missing = 2 * shards * _SLOT.size - os.fstat(self._file).st_size
        if not read_only and missing > 0:
            try:
                os.pwrite(self._file, bytes(missing), 2 * shards * _SLOT.size - missing)
                os.fsync(self._file)  # so that there is space for every note
            except BaseException:
                self.close()
                raise

    def read(self, shard: int) -> Synced | None:
        """Return the last write of a shard that is known to be on disk, or None if none is known."""
        found: list[tuple[Synced, int]] = []
        for slot in (0, 1) if self._file >= 0 else ():
            with failure_told():
                data = os.pread(self._file, _SLOT.size, self._offset(shard, slot))
            if len(data) == _SLOT.size:
                checksum, writes, position = _SLOT.unpack(data)
                if checksum == self._checksum(shard, slot, writes, position):
                    found.append((Synced(writes, position), slot))
        if not found:
            return None
        newest, slot = max(found, key=lambda each: each[0].writes)
        self._next[shard] = 1 - slot
        return newest

    def note(self, shard: int, writes: int, position: int) -> None:
        """Note that everything up to a write is on disk.

        Raises `StorageFullError` or `EngineError`; the previous note is kept then.
        """
        slot = self._next[shard]
        data = _SLOT.pack(self._checksum(shard, slot, writes, position), writes, position)
        with failure_told():
            os.pwrite(self._file, data, self._offset(shard, slot))
        self._next[shard] = 1 - slot

    def forget(self, shard: int) -> None:
        """Remove the notes of a shard that is opened although writes of it are missing."""
        with failure_told():
            os.pwrite(self._file, bytes(2 * _SLOT.size), self._offset(shard, 0))
            os.fsync(self._file)

    def close(self) -> None:
        """Sync the notes to disk, and close them. May be called twice."""
        if self._file >= 0:
            try:
                os.fsync(self._file)
            finally:
                file, self._file = self._file, -1
                os.close(file)

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the notes of a database, if there are any."""
        (directory / _FILE).unlink(missing_ok=True)

    @staticmethod
    def _offset(shard: int, slot: int) -> int:
        return (2 * shard + slot) * _SLOT.size

    def _checksum(self, shard: int, slot: int, writes: int, position: int) -> int:
        return xxhash.xxh64_intdigest(struct.pack("<QQQ", 2 * shard + slot, writes, position), self._seed)


def check_reached(directory: Path, shard: int, reached: Synced | None, tail: Tail) -> None:
    """Raise `DataLossError` if a shard ends before the last write that was known to be on disk."""
    if reached is not None and tail.writes < reached.writes:
        missing = reached.writes - tail.writes
        raise DataLossError(
            f"shard {shard} of {directory} lacks the last {missing:,} of {reached.writes:,} writes that were on disk: "
            f"it ends at {_place(tail.last_position)} and had reached {_place(reached.position)}. "
            'Restore it from a copy, or open the database with recovery="point_in_time" to go on without them'
        )


def _place(position: int) -> str:
    return f"position {position} ({format_time(time_of(position))})" if position else "its beginning"
