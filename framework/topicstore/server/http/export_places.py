"""The directories to which requests may write files: those below the directory that the settings allow.

The user who runs the server may write to any directory, because this user can do so without the server (`is_owner`).
"""

from __future__ import annotations

import os
from pathlib import Path

from litestar.exceptions import ClientException, PermissionDeniedException

__all__ = ["place_below", "place_of_owner"]


def place_below(allowed: Path | None, name: str) -> Path:
    """Return the path of a target that a request names, relative to the allowed directory.

    An absolute name must lie below the allowed directory. Raises `PermissionDeniedException` if no directory is
    allowed, and `ClientException` for a name that leads outside, by ``..`` or by a link.
    """
    if allowed is None:
        raise PermissionDeniedException(
            "this server writes no exports for requests: name a directory for them in its settings, [http] export_dir"
        )
    root = allowed.resolve()
    try:
        place = (root / name).resolve()
    except (OSError, ValueError) as bad:
        raise ClientException(f"{name!r} is not a path: {bad}") from bad
    if place == root or not place.is_relative_to(root) or ".." in Path(name).parts:
        raise ClientException(f"{name!r} is not the name of a directory below export_dir")
    return place


def place_of_owner(database: Path, name: str) -> Path:
    """Return the path of a target that the server's owner names: absolute, or relative to the database's directory.

    A relative name stays relative, so that the database records an archive relative to itself.
    """
    return Path(name) if Path(name).is_absolute() else Path(os.path.relpath(database / name))
