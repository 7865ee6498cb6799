"""The locations of the exports that hold a database's archived generations."""

from __future__ import annotations

import os
from pathlib import Path

from topicstore.contract.errors import ManifestMismatchError

__all__ = ["archive_directory", "check_apart", "location_of"]


def location_of(database: Path, target: Path) -> str:
    """Return the location of an export in the form in which a database stores it.

    An absolute path is unchanged; a relative path becomes relative to the database's directory.
    """
    return str(target) if target.is_absolute() else os.path.relpath(target.resolve(), database.resolve())


def archive_directory(database: Path, location: str) -> Path:
    """Return the directory of a stored location (see `location_of`)."""
    return (database / location).resolve()


def check_apart(database: Path, target: Path) -> None:
    """Raise `ManifestMismatchError` if an export would lie inside the database's directory, and be removed with it."""
    if target.resolve().is_relative_to(database.resolve()):
        raise ManifestMismatchError(f"{target} lies inside the database; an export needs a place of its own")
