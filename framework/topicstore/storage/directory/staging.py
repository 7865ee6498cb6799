"""Staging directories: directories that are written under a temporary name, and renamed when they are complete.

::

    <parent>/.unfinished-<32 hexadecimal digits>/       in use by a process, or left by a killed one

A staging directory is locked while it is in use. So a process that creates one recognizes the directories that killed
processes have left in the same parent directory, and removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import OWNER_ONLY
from .manifest import MANIFEST

__all__ = ["staging_directory", "staging_name", "sweep_staging", "sweep_staging_below"]

_DEPTH = 3
"""The depth to which staging directories are searched for, because exports may have many subdirectories."""
_NAME = re.compile(r"\.unfinished-[0-9a-f]{32}")


def staging_name() -> str:
    """Return a new, unique name for a staging directory."""
    return f".unfinished-{uuid.uuid4().hex}"


@contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """Create a staging directory in ``parent``. The end of the block removes it, unless the block has renamed it."""
    while True:
        path = parent / staging_name()
        path.mkdir(OWNER_ONLY)
        with suppress(FileNotFoundError):  # another process may remove it before it is locked
            handle = _open(path)
            _lock(handle, fcntl.LOCK_EX)  # if another process holds the lock, it is about to remove the directory
            if path.exists():
                break
            os.close(handle)
    try:
        yield path
    finally:
        os.close(handle)
        shutil.rmtree(path, ignore_errors=True)


def sweep_staging(parent: Path) -> None:
    """Remove the staging directories that killed processes have left in a directory."""
    for path in list(parent.iterdir()):
        if _NAME.fullmatch(path.name):
            with suppress(OSError):  # it was removed meanwhile, belongs to another user, or isn't a directory
                handle = _open(path)
                try:
                    if _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):  # a process that still writes there has the lock
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(handle)


def sweep_staging_below(root: Path) -> None:
    """Remove the files of killed processes from staging directories anywhere below a directory, except in databases."""
    for parent, directories, names in os.walk(root):
        sweep_staging(Path(parent))
        below = [] if MANIFEST in names or len(Path(parent).relative_to(root).parts) >= _DEPTH else directories
        directories[:] = [name for name in below if not _NAME.fullmatch(name)]


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(handle: int, how: int) -> bool:
    """Try to lock a directory; return whether that succeeded. Some file systems don't support it."""
    try:
        fcntl.flock(handle, how)
    except OSError:
        return False
    return True
