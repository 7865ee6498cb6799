"""`Archives`: exports generations to Parquet, and lists those that are read from exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from topicstore.contract.arguments import check_path
from topicstore.contract.errors import GenerationError
from topicstore.storage.directory.manifest import Manifest
from topicstore.storage.generations import archive_directory, location_of
from topicstore.storage.storage import Storage

if TYPE_CHECKING:
    from topicstore.contract.layout import Slab
    from topicstore.shard.generations import OpenArchive
    from topicstore.shard.records import GenerationRecord

    from .exporting import ExportReport

__all__ = ["Archive", "Archives", "open_archive"]

PartsDone = Callable[[int, int], object]
"""Called with the number of completed parts of an export, and the number of all parts."""


@attrs.frozen(kw_only=True)
class Archive:
    """A generation that is read from an export."""

    generation: int
    path: Path
    """The export's directory."""


class Archives:
    """The exports of one database, as returned by `Database.archives`. All methods are thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __repr__(self) -> str:
        return f"<Archives of {self._storage!r}>"

    def export(
        self, target: str | Path, *, generations: Sequence[int] | None = None, progress: PartsDone | None = None
    ) -> ExportReport:
        """Write sealed generations, by default all, to the directory ``target`` as partitioned Parquet.

        Each shard's part of a generation is one or more files (`topicstore.lifecycle.export_format`), with rows in
        order of positions, in stored form, without plugins. Each row group has the lowest and highest timestamp, for
        readers that select by time. Each file is read back and compared row by row. Generations that the target already
        holds are skipped, so another call completes an interrupted export or adds newer generations. All files are
        fsynced on return. ``progress`` is called before each part and at the end, with the numbers of completed and of
        all parts; if it raises, the export stops, and can be completed later.

        Raises `GenerationError` for the current generation and for one that doesn't exist; `ManifestMismatchError` if
        the directory holds other files, lies inside the database, or lacks a generation that was archived there, as
        when a volume isn't mounted; `CorruptionError`, `StorageFullError`, `TooManyOpenFilesError`, `FileSystemError`.
        """
        from .exporting import export  # a late import, because loading pyarrow is slow

        self._storage.check_open()
        return export(self._storage, check_path(target), generations, progress)

    def archive(
        self, target: str | Path, *, generations: Sequence[int] | None = None, progress: PartsDone | None = None
    ) -> ExportReport:
        """Export sealed generations, by default all that are local, and remove the local messages.

        All reads then use the export as if it were local, with its own streams and cursors; messages can't be deleted
        from it. Existing parts are compared row by row, too. The location of the export and the removal of the local
        messages are recorded in one write for each shard, so after a crash a shard has either the messages or the
        archive. An absolute ``target`` is recorded unchanged. A relative ``target`` is relative to the database's
        directory, so that both can be moved together. A generation that was archived elsewhere is copied, and read from
        the new location. Deletes wait while a generation is archived. ``progress``: as in `export`, by whole
        generations.

        Cursors and replays that are reading a generation raise `GenerationArchivedError`; subscriptions and sessions
        continue. Raises the errors of `export`; then no local messages were removed.
        """
        from .exporting import archive

        self._storage.check_may_write()
        return archive(self._storage, location_of(self._storage.path, check_path(target)), generations, progress)

    def __iter__(self) -> Iterator[Archive]:
        """Iterate over a snapshot of the archived generations, oldest first."""
        self._storage.check_open()
        return iter(
            [
                Archive(generation=record.number, path=archive_directory(self._storage.path, record.archive))
                for record in self._storage.shards[0].generations.listed()
                if record.archive is not None
            ]
        )

    def __len__(self) -> int:
        """Return the number of archived generations."""
        return sum(1 for _ in self)

    def __contains__(self, generation: int) -> bool:
        """Return whether a generation is archived."""
        return any(one.generation == generation for one in self)

    def __getitem__(self, generation: int) -> Archive:
        """Return the location of an archived generation. Raises `GenerationError` for one that isn't archived."""
        for one in self:
            if one.generation == generation:
                return one
        raise GenerationError(f"generation {generation} is not archived")


def open_archive(database: Path, manifest: Manifest) -> OpenArchive:
    """Return the function that opens the archived generations of a database. This reads no file yet."""

    def opened(shard: int, record: GenerationRecord) -> Slab:
        from .archive_slab import ArchiveSlab  # a late import, because loading pyarrow is slow
        from .export_format import slab_directory

        directory = slab_directory(archive_directory(database, record.archive or ""), shard, record.number)
        return ArchiveSlab(directory, manifest.id, shard, record.number, record.messages)

    return opened
