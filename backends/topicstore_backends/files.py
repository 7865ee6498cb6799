"""What engines ask of the file system: to have something on disk, sizes, links, and what is used up of it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from topicstore.contract.errors import StorageFullError, TooManyOpenFilesError

__all__ = ["disk_bytes", "link_files", "make_directory", "shortage", "sync"]

_FULL = re.compile(r"No space left on device|File too large|quota exceeded|Space limit reached|ENOSPC", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_FILES_ERRNO = frozenset((errno.EMFILE, errno.ENFILE))


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


def shortage(path: Path, error: BaseException, text: str) -> StorageFullError | TooManyOpenFilesError | None:
    """Return the error to raise if an engine's error, or the words it is told in, mean that something is used up.

    That is the disk, a quota of it, or the files that a process may have open.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO or _FULL.search(text):
        return StorageFullError(f"{path}: {text}")
    if number in _FILES_ERRNO or _FILES.search(text):
        return TooManyOpenFilesError(f"{path}: {text}; close some, or raise the limit (ulimit -n)")
    return None
