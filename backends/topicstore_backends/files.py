"""File system operations of the engines: syncing, sizes, links, temporary directories, and errors of shortage."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from topicstore.contract.errors import DataLossError, StorageFullError, TooManyOpenFilesError

__all__ = [
    "TEMPORARY",
    "check_there",
    "disk_bytes",
    "link_files",
    "make_directory",
    "remove_with",
    "shortage",
    "sync",
    "temporary_directory",
]

TEMPORARY = "topicstore-reader-"
"""The beginning of the names of temporary directories in which a database is read."""

_REMOVING = 2
"""The number of files that `shutil.rmtree` has open at a time in a directory without subdirectories."""
_FULL = re.compile(r"No space left on device|File too large|quota exceeded|Space limit reached|ENOSPC", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_FILES_ERRNO = frozenset((errno.EMFILE, errno.ENFILE))


def sync(path: Path) -> None:
    """Sync a file's contents, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_there(file: Path, library: str) -> None:
    """Raise `DataLossError` if the file that marks a database is gone, `OSError` if that can't be determined."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError) as gone:
        lost = file if file.parent.is_dir() else file.parent
        raise DataLossError(f"it is gone, so there is no {library} database any more", str(lost)) from gone


def make_directory(path: Path) -> None:
    """Create a directory if it doesn't exist, and sync its parent so that its entry survives a power failure."""
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
    """Link all files of a directory into another, except those with the names ``without``.

    An engine that opens the second directory writes its own files there and leaves the first one unchanged.
    """
    for entry in path.iterdir():
        if entry.name not in without:
            Path(links, entry.name).symlink_to(entry.resolve())


@contextmanager
def temporary_directory(*, stays: bool) -> Iterator[Path]:
    """Make a directory to read a database in, and remove it at the end; with ``stays``, only if the block fails.

    Its removal succeeds even if the block uses up the files that the process may open.
    """
    with ExitStack() as spare:
        for _ in range(_REMOVING):
            spare.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        made = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        try:
            yield made
        except BaseException:
            stays = False
            raise
        finally:
            spare.close()
            if not stays:
                shutil.rmtree(made)


def remove_with(owner: object, directory: Path) -> None:
    """Remove a directory when an object is collected or the process ends, but not in a fork, whose parent reads it."""
    weakref.finalize(owner, _remove, directory, os.getpid())


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(FileNotFoundError):  # a later opening of the database may have removed it
            shutil.rmtree(directory)


def shortage(path: Path, error: BaseException, text: str) -> StorageFullError | TooManyOpenFilesError | None:
    """Return the error to raise if an engine's error or its message means that a resource is used up, else None.

    The resources are disk space, a disk quota, and the number of files that a process may have open.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO or _FULL.search(text):
        return StorageFullError(f"{path}: {text}")
    if number in _FILES_ERRNO or _FILES.search(text):
        return TooManyOpenFilesError(f"{path}: {text}; close some, or raise the limit (ulimit -n)")
    return None
