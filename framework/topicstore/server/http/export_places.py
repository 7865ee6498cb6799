"""Where requests may have files written: below the directory that the settings allow.

The user who runs the server may write wherever that user may, and needs no server for it (`is_owner`).
"""

from __future__ import annotations

import os
from pathlib import Path

from litestar.exceptions import ClientException, PermissionDeniedException

__all__ = ["place_below", "place_of_owner"]


def place_below(allowed: Path | None, name: str) -> Path:
    """Return the path of a target that a request names, relative to the directory that is allowed.

    It may also be absolute, if it lies there. Raises `PermissionDeniedException` if no directory is allowed,
    `ClientException` for a name that leads elsewhere, by ``..`` or by a link.
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
    """Return the path of a target that who runs the server names: absolute, or relative to the database's directory.

    A relative one stays relative, so that an archive is noted as it lies from the database.
    """
    return Path(name) if Path(name).is_absolute() else Path(os.path.relpath(database / name))
