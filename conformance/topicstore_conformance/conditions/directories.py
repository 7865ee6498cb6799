"""The directories for the files of tests: in memory, if there is room."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["quick_directory"]

MEMORY, ROOM = Path("/dev/shm"), 1 << 30
"""A file system in memory, and the bytes that must be free there: several times what parallel tests need."""


def quick_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a new directory, in memory where there is such a file system with room: for tests that sync often.

    It is in the directory for temporary files if that is in memory, too.
    """
    elsewhere = _has_room(MEMORY) and not Path(tempfile.gettempdir()).is_relative_to(MEMORY)
    return tempfile.TemporaryDirectory(
        prefix="topicstore-", dir=MEMORY if elsewhere else None, ignore_cleanup_errors=True
    )


def _has_room(directory: Path) -> bool:
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= ROOM
