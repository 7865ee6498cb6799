"""How far each shard had come when it was last known to be on disk. It tells when something has vanished since.

Engines take a log that ends early for one that was never longer. So what they can't know is noted beside them, after
each flush, and compared when a shard is opened.

Stored form, the file ``synced`` of the database's directory: two slots for each shard, written in turn, so that one is
whole if the other is not. A slot is::

    u64 xxh64 of the slot's number and the rest, with 8 bytes of the database's id as seed   u64 writes   u64 position

``writes`` is `topicstore.shard.records.Tail.writes`. The file itself is synced only when the database is closed: after
a power failure it may know less than was on disk, and never more.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import attrs
import xxhash

from topicstore.contract.errors import DataLossError
from topicstore.contract.positions import time_of
from topicstore.shard.records import Tail
from topicstore.times import format_time

__all__ = ["Synced", "SyncedWrites", "check_reached"]

_FILE = "synced"
_SLOT = struct.Struct("<QQQ")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@attrs.frozen
class Synced:
    """That a shard's writes were on disk up to one of them."""

    writes: int
    position: int


class SyncedWrites:
    """The notes of all shards of one database. Each shard's are written under its own lock."""

    def __init__(self, directory: Path, database: bytes, shards: int, *, read_only: bool = False) -> None:
        """Open the notes, and make room for them unless ``read_only``. Without any, nothing is known."""
        self._file = -1
        self._seed = int.from_bytes(database[:8], "little")
        self._next = [0] * shards
        """Of each shard, the slot that is written next."""
        try:
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            self._file = os.open(directory / _FILE, flags | _FLAGS, 0o644)
        except FileNotFoundError:
            return
        missing = 2 * shards * _SLOT.size - os.fstat(self._file).st_size
        if not read_only and missing > 0:
            try:
                os.pwrite(self._file, bytes(missing), 2 * shards * _SLOT.size - missing)
                os.fsync(self._file)  # so that there is room for every note
            except BaseException:
                self.close()
                raise

    def read(self, shard: int) -> Synced | None:
        """Return how far a shard had come; None if that isn't known."""
        found: list[tuple[Synced, int]] = []
        for slot in (0, 1) if self._file >= 0 else ():
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
        """Note that everything up to a write is on disk."""
        slot = self._next[shard]
        data = _SLOT.pack(self._checksum(shard, slot, writes, position), writes, position)
        os.pwrite(self._file, data, self._offset(shard, slot))
        self._next[shard] = 1 - slot

    def forget(self, shard: int) -> None:
        """Know nothing of a shard any more: it is opened though something of it is missing."""
        os.pwrite(self._file, bytes(2 * _SLOT.size), self._offset(shard, 0))
        os.fsync(self._file)

    def close(self) -> None:
        """Have the notes on disk. May be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            try:
                os.fsync(file)
            finally:
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


def check_reached(shard: int, reached: Synced | None, tail: Tail) -> None:
    """Raise `DataLossError` if a shard ends before what was on disk once."""
    if reached is not None and tail.writes < reached.writes:
        missing = reached.writes - tail.writes
        raise DataLossError(
            f"shard {shard} lacks the last {missing:,} of {reached.writes:,} writes that were on disk: it ends at "
            f"{_place(tail.last_position)} and had reached {_place(reached.position)}. Restore it from a copy, or open "
            'the database with recovery="point_in_time" to go on without them'
        )


def _place(position: int) -> str:
    return f"position {position} ({format_time(time_of(position))})" if position else "its beginning"
