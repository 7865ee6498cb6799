"""Where the exports are that hold a database's archived generations."""

from __future__ import annotations

import os
from pathlib import Path

from topicstore.contract.errors import ManifestMismatchError

__all__ = ["archive_directory", "check_apart", "location_of"]


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
