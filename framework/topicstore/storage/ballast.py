"""Ballast: a file that takes room on the disk, to be given up when there is no more.

On a full disk engines can't be opened, because they bring their logs into tables then, so nothing could be dropped
to make room. What one shard needs at a time (`Backend.room`), the file ``ballast`` in the database's directory holds
ready: opening and dropping give it up, and it is made again where there is plenty of room. A database that has only
one generation has nothing to drop, and no ballast; a small one has at most as much as it stores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from topicstore.shard.shard import Shard

__all__ = ["Ballast", "give_up_ballast"]

_NAME = "ballast"
_PLENTY = 2
"""It is made where so many times its size is free."""


def give_up_ballast(directory: Path) -> bool:
    """Give the room back that a database holds ready; False if there is none."""
    try:
        (directory / _NAME).unlink()
    except FileNotFoundError:
        return False
    return True


class Ballast:
    """The ballast of a database that is open to be written: at most ``room`` bytes. One thread at a time uses it."""

    def __init__(self, directory: Path, room: int) -> None:
        self._directory = directory
        self._room = room

    def keep(self, shards: Sequence[Shard]) -> None:
        """Make it as large as it should be now, if there is plenty of room for that."""
        if not self._room or len(shards[0].generations()) < 2:
            return
        size = min(self._room, sum(shard.engine().stats().disk_bytes for shard in shards))
        path = self._directory / _NAME
        missing = size - (path.stat().st_size if path.exists() else 0)
        if missing > 0 and shutil.disk_usage(self._directory).free >= _PLENTY * size:
            try:
                with path.open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError:  # a quota, or a limit of files: then there is none, which only matters on a full disk
                give_up_ballast(self._directory)

    def give_up_if_scarce(self) -> None:
        """Give it up where less is free than dropping a generation may need."""
        if self._room and shutil.disk_usage(self._directory).free < self._room:
            give_up_ballast(self._directory)
