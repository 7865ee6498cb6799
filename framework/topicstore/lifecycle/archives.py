"""Archived generations, opened where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from topicstore.storage.archive_locations import archive_directory

if TYPE_CHECKING:
    from topicstore.contract.layout import Slab
    from topicstore.shard.records import GenerationRecord

__all__ = ["Archives"]


class Archives:
    """Opens what a database at ``directory`` has archived."""

    def __init__(self, directory: Path, database: str) -> None:
        self._directory = directory
        self._database = database

    def open(self, shard: int, record: GenerationRecord) -> Slab:
        """Return the slab of an archived generation. Reads no file yet."""
        from topicstore.lifecycle.archive_slab import (
            ArchiveSlab,  # with pyarrow, which takes longer to import than all else
        )
        from topicstore.lifecycle.export_format import slab_directory

        target = archive_directory(self._directory, record.archive or "")
        directory = slab_directory(target, shard, record.number)
        return ArchiveSlab(directory, self._database, shard, record.number, record.messages)
