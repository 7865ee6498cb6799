"""Temporary directories for tests: in memory, if enough is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["quick_directory"]

MEMORY, ROOM = Path("/dev/shm"), 1 << 30
"""A file system in memory, and the bytes that must be free there: several times as many as parallel tests need."""


def quick_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary directory for tests that fsync often: in memory, if `MEMORY` has `ROOM` bytes free.

    Otherwise, or if the default directory for temporary files is itself in `MEMORY`, the new directory lies in the
    default.
    """
    elsewhere = _has_room(MEMORY) and not Path(tempfile.gettempdir()).is_relative_to(MEMORY)
    return tempfile.TemporaryDirectory(
        prefix="topicstore-", dir=MEMORY if elsewhere else None, ignore_cleanup_errors=True
    )


def _has_room(directory: Path) -> bool:
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= ROOM
