"""The generations of an export as sources: their rows are stored again, and then verified to be in the database."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import xxhash

from topicstore import Database, ImportSourceError
from topicstore.contract.positions import MAX_TIME, first_position
from topicstore.lifecycle.restoring import ExportedGeneration, check_stored, exported_generations
from topicstore.storage.replays import slices

from .rows import Rows
from .source import Origin, Source

__all__ = ["open_export"]


def open_export(path: Path, db: Database) -> list[Source]:
    """Return the generations of an export as sources, oldest first, to be restored into a database.

    If the database is the exported one, generations that it still has are left out. Raises `ImportSourceError` if none
    remains, or if plugins have transformed the rows, so that they can't be restored as they were published.
    """
    found = exported_generations(path)
    plugins = ", ".join(found[0].head.plugins) if found else ""
    if plugins:
        raise ImportSourceError(f"{path}: its rows are as plugins stored them ({plugins}), not as they were published")
    own = bool(found) and found[0].head.database == db.manifest.id
    there = {info.number for info in db.generations()} if own else set()
    missing = [one for one in found if one.number not in there]
    if found and not missing:
        numbers = ", ".join(str(one.number) for one in found)
        raise ImportSourceError(
            f"{path}: the database is the one it was exported from, and has generation {numbers} itself"
        )
    return [_ExportSource(path, one, db) for one in missing]


class _ExportSource(Source):
    """A generation of an export. Its rows come in order of positions; at the end, all are looked up in the database."""

    format = "export"

    def __init__(self, path: Path, exported: ExportedGeneration, db: Database) -> None:
        content = xxhash.xxh3_128_hexdigest("".join(exported.digests).encode())
        source_id = f"export:{exported.head.database}:{exported.number}:{content}"
        name = f"{path}, generation {exported.number}"
        super().__init__(Origin(name=name, path=path, identify=lambda: source_id))
        self._exported = exported
        self._db = db
        self._by_message = db.manifest.timestamps == "message"
        self._read = 0

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on. After the last row was stored, check that the database has all rows.

        Raises `CorruptionError` if a file is damaged or the database lacks a row. The import then stays unfinished,
        and running it again repeats the check.
        """
        self._read, oldest = 0, MAX_TIME
        for batch in slices(self._exported.rows(), size):
            first, self._read = self._read, self._read + len(batch)
            oldest = min(oldest, int(np.min(np.asarray(batch.timestamps))))
            if self._read > skip:
                start = max(first, skip)
                yield Rows(batch[start - first :].to_arrow(), start, self._read)
        # If positions follow the messages' own times, no position is earlier than its message's time.
        check_stored(self._db.storage, self._exported, first_position(oldest) if self._by_message else 0)

    def progress(self) -> tuple[float, float | None]:
        return float(self._read), float(self._exported.messages)

    def close(self) -> None:
        """Do nothing: no file is open."""
