"""`Archives`: generations exported as Parquet, and read from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from topicstore.contract.arguments import check_path
from topicstore.storage.archive_locations import archive_directory, location_of
from topicstore.storage.manifest import Manifest
from topicstore.storage.storage import Storage

if TYPE_CHECKING:
    from topicstore.contract.layout import Slab
    from topicstore.shard.generations import OpenArchive
    from topicstore.shard.records import GenerationRecord

    from .exporting import ExportReport

__all__ = ["Archives", "open_archive"]


class Archives:
    """The exports of one database, as `Database.archives` gives it. All methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def export(self, target: str | Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Write sealed generations, by default all, to the directory ``target`` as partitioned Parquet.

        One or more files for each generation of a shard (`topicstore.lifecycle.export_format`), rows in order of
        positions, as they are stored beneath plugins; each is read back and compared row by row. What is
        there already is passed over, so an export that was interrupted, or has to grow, is simply called again. What
        it wrote is on disk when it returns.

        Raises `GenerationError` for the current generation and for one that isn't there,
        `ManifestMismatchError` if the directory holds something else or lies inside the database, `CorruptionError`,
        `OSError`.
        """
        from .exporting import export  # with pyarrow, which takes longer to import than all else

        self._storage.check_open()
        return export(self._storage, check_path(target), generations)

    def archive(self, target: str | Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Export sealed generations, by default all that are local, and have their messages there only.

        Everything reads them from the export as if they were local, with streams and iterators of their own;
        nothing can be deleted from them. What is there already is compared row by row, too. Where the export is
        and that the local messages are gone is one write for each shard: a crash leaves
        either. An absolute ``target`` is noted as it is, another as it lies from the database's directory, so
        that both can be moved together. One that was archived elsewhere is copied, and read from the new place.
        Deletes wait while a generation is archived.

        Iterators and replays under way in a generation raise `GenerationArchivedError`; subscriptions and
        sessions go on. Raises what `export` raises; then nothing local is gone.
        """
        from .exporting import archive

        self._storage.check_may_write()
        return archive(self._storage, location_of(self._storage.path, check_path(target)), generations)

    def list(self) -> dict[int, Path]:
        """Return the generations that were archived, oldest first, and in which exports they are."""
        self._storage.check_open()
        return {
            record.number: archive_directory(self._storage.path, record.archive)
            for record in self._storage.shards[0].generations()
            if record.archive is not None
        }


def open_archive(database: Path, manifest: Manifest) -> OpenArchive:
    """Return what opens the archived generations of the database in a directory. It reads no file yet."""

    def opened(shard: int, record: GenerationRecord) -> Slab:
        from .archive_slab import ArchiveSlab  # with pyarrow, which takes longer to import than all else
        from .export_format import slab_directory

        directory = slab_directory(archive_directory(database, record.archive or ""), shard, record.number)
        return ArchiveSlab(directory, manifest.id, shard, record.number, record.messages)

    return opened
