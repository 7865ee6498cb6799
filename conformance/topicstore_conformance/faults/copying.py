"""Copies of directories that an open database writes to, as a kill would leave them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .threads import wait_until

__all__ = ["copy_open"]


def copy_open(directory: Path, copy: Path, *, unneeded: Iterable[str] = ()) -> None:
    """Copy the directory of an open database as a kill would leave it; repeat until no file changes meanwhile.

    Files whose names match the patterns ``unneeded`` are left out.
    """
    ignore = shutil.ignore_patterns(*unneeded)

    def copied() -> bool:
        with suppress(FileNotFoundError, shutil.Error):  # an engine may remove files at any time
            before = _listed(directory)
            shutil.copytree(directory, copy, symlinks=True, ignore=ignore)
            if before == _listed(directory):
                return True
        shutil.rmtree(copy, ignore_errors=True)
        return False

    wait_until(copied, f"the files of {directory} to stay as they are")


def _listed(directory: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in directory.rglob("*")}  # symbolic links may be broken
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
