"""What engines ask of the file system: to have something on disk, sizes, links, and whether it is full."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["disk_bytes", "is_full", "link_files", "make_directory", "sync"]

_FULL = re.compile(r"No space left on device|File too large|quota exceeded|Space limit reached|ENOSPC", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))


def sync(path: Path) -> None:
    """See that what was written to a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory unless it is there, and see that its parent's entry for it outlives a power failure."""
    path.mkdir(parents=True, exist_ok=True)
    sync(path.parent)


def disk_bytes(path: Path) -> int:
    """Return the bytes of all files in a directory; an engine may delete some of them meanwhile."""
    total = 0
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def link_files(path: Path, links: str, *, without: Collection[str]) -> None:
    """Link all files of a directory into another, but those with the names ``without``.

    What opens the latter writes its own files there, and leaves the directory that it reads as it is.
    """
    for entry in path.iterdir():
        if entry.name not in without:
            Path(links, entry.name).symlink_to(entry.resolve())


def is_full(error: BaseException, text: str) -> bool:
    """Tell whether an engine's error, or the words it is told in, mean a full disk or a spent quota."""
    return bool(_FULL.search(text)) or (isinstance(error, OSError) and error.errno in _FULL_ERRNO)
