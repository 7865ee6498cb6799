"""`RemoteArchives`: exported generations of a database that a server has open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from topicstore.lifecycle.archives import Archive
from topicstore.storage.generations import location_of

from .connection import Connection
from .jobs import run_job

if TYPE_CHECKING:
    from topicstore.lifecycle.exporting import ExportReport

__all__ = ["RemoteArchives"]


class _Generation(msgspec.Struct):
    number: int
    archived: str | None


class RemoteArchives:
    """The remote form of `topicstore.Database.archives`. The server runs on this machine, and writes the files."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self._path = path
        self._connection = connection

    def __iter__(self) -> Iterator[Archive]:
        """Iterate over the archived generations, oldest first."""
        for one in self._connection.items("/generations", _Generation):
            if one.archived is not None:
                yield Archive(generation=one.number, path=Path(one.archived))

    def export(self, target: Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Make the server write sealed generations to a directory as Parquet."""
        return self._run(target, generations, drop=False)

    def archive(self, target: Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Make the server export sealed generations and remove them from the database."""
        return self._run(target, generations, drop=True)

    def _run(self, target: Path, generations: Sequence[int] | None, *, drop: bool) -> ExportReport:
        from topicstore.lifecycle.exporting import ExportReport

        place = location_of(self._path, target)
        return run_job(self._connection, "export", ExportReport, target=place, generations=generations, drop=drop)
