"""Sealed generations as partitioned Parquet: exported, replayed from there, and put back.

`topicstore.tiering.format` says what an export is on disk, `exporting` makes one and checks it row by row,
`archive` reads a generation from it as if it were local, `restoring` gives its rows back in their order.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from topicstore.contract.errors import ManifestMismatchError

if TYPE_CHECKING:
    from topicstore.contract.layout import Slab
    from topicstore.shard.records import GenerationRecord

__all__ = ["Archives", "archive_directory", "check_apart", "location_of"]


def location_of(database: Path, target: Path) -> str:
    """Return how a database notes where an export is: an absolute path as it is, else relative to its own directory."""
    return str(target) if target.is_absolute() else os.path.relpath(target.resolve(), database.resolve())


def archive_directory(database: Path, location: str) -> Path:
    """Return the directory that `location_of` noted."""
    return (database / location).resolve()


def check_apart(database: Path, target: Path) -> None:
    """Raise `ManifestMismatchError` if an export would lie inside a database, with which it would be removed."""
    if target.resolve().is_relative_to(database.resolve()):
        raise ManifestMismatchError(f"{target} lies inside the database; an export needs a place of its own")


class Archives:
    """Opens what a database at ``directory`` has archived."""

    def __init__(self, directory: Path, database: str) -> None:
        self._directory = directory
        self._database = database

    def open(self, shard: int, record: GenerationRecord) -> Slab:
        """Return the slab of an archived generation. Reads no file yet."""
        from .archive import ArchiveSlab  # with pyarrow, which takes longer to import than all else
        from .format import slab_directory

        target = archive_directory(self._directory, record.archive or "")
        directory = slab_directory(target, shard, record.number)
        return ArchiveSlab(directory, self._database, shard, record.number, record.messages)
