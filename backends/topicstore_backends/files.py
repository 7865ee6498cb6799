"""File system operations of the engines: fsync, sizes, links, temporary directories, and exhausted resources."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from topicstore.contract.descriptors import lock_file, naming
from topicstore.contract.errors import DataLossError, StorageFullError, TooManyOpenFilesError

__all__ = [
    "OPENING",
    "OWN_FILES",
    "READER",
    "ReaderDirectory",
    "check_there",
    "disk_bytes",
    "link_files",
    "make_directory",
    "place_aside",
    "reader_directory",
    "remove_abandoned",
    "resource_error",
    "set_aside",
    "sync",
]

READER = "topicstore-reader-"
"""The prefix of the names of temporary directories in which a database is read."""
OPENING = "topicstore-opening"
"""The prefix of the names of directories that hold links to a database's files while the database is opened."""
OWN_FILES = (f"{READER}*", f"{OPENING}*", "*.cut-at-*")
"""The patterns of the names of topicstore's own files in an engine's directory."""

_REMOVING = 2
"""The number of files that `shutil.rmtree` has open at a time in a directory without subdirectories."""
_FULL = re.compile(r"No space left on device|File too large|quota exceeded|Space limit reached|ENOSPC", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_FILES_ERRNO = frozenset((errno.EMFILE, errno.ENFILE))


def sync(path: Path) -> None:
    """Fsync a file's contents, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
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
    """Create a directory if it doesn't exist, and fsync its parent so that its entry survives a power failure."""
    path.mkdir(parents=True, exist_ok=True)
    sync(path.parent)


def disk_bytes(path: Path) -> int:
    """Return the total bytes of all files in a directory, even if an engine deletes some of them meanwhile."""
    total = 0
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            total += 0 if entry.name.startswith((READER, OPENING)) else entry.stat().st_size
    return total


def link_files(path: Path, links: str, *, without: Collection[str], lasting: str | None = None) -> None:
    """Link all files of a directory into another, except those named in ``without``.

    Files with the suffix ``lasting`` get hard links, through which they can be opened after an engine has removed
    them. An engine that opens the second directory writes its own files there and leaves the first one unchanged.
    """
    for entry in path.iterdir():
        if entry.name not in without and not entry.name.startswith((READER, OPENING)):
            link = Path(links, entry.name)
            if entry.suffix == lasting:
                link.hardlink_to(entry.resolve())
            else:
                link.symlink_to(entry.resolve())


class ReaderDirectory:
    """A directory in which an engine reads a database through links to its files, and through copies.

    The directory is locked while it is used. An unlocked one was left by a process that was killed.
    """

    def __init__(self, beside: Path | None) -> None:
        """Create the directory in ``beside`` if that is writable, else in the system's temporary directory."""
        place = beside if beside is not None and os.access(beside, os.W_OK) else Path(tempfile.gettempdir())
        remove_abandoned(place)
        self._owner = os.getpid()
        self.path, self._lock = _make_locked(place)

    def remove(self) -> None:
        """Remove the directory with its contents, except in a forked child, whose parent reads it. Idempotent."""
        try:
            if os.getpid() == self._owner:
                with suppress(FileNotFoundError):
                    shutil.rmtree(self.path)
        finally:  # without the lock, a directory that could not be removed counts as abandoned
            if self._lock >= 0:
                lock, self._lock = self._lock, -1
                os.close(lock)

    def removal(self, engine: object) -> Callable[[], object]:
        """Return a function, for the engine's `close`, that removes the directory; garbage collection also calls it."""
        return weakref.finalize(engine, self.remove)


@contextmanager
def reader_directory(beside: Path | None) -> Iterator[ReaderDirectory]:
    """Make a `ReaderDirectory` for an engine, and remove it if the block, which opens the engine, fails.

    The removal succeeds even if the block has used up the process's file descriptors.
    """
    with ExitStack() as spare:
        for _ in range(_REMOVING):
            spare.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        made = ReaderDirectory(beside)
        try:
            yield made
        except BaseException:
            spare.close()
            made.remove()
            raise


def remove_abandoned(place: Path) -> None:
    """Remove the `ReaderDirectory`s in a directory whose processes were killed."""
    for left in place.glob(f"{READER}*"):
        with suppress(OSError):  # another user's directory, one in use, or one that another process is removing
            lock = _locked(left)
            try:
                shutil.rmtree(left)
            finally:
                os.close(lock)


def _make_locked(place: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that holds its lock; -1 on file systems that can't lock directories."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=READER, dir=place))
        try:
            lock = _locked(made)
        except (BlockingIOError, FileNotFoundError):  # another process is removing the directory as abandoned
            continue
        except OSError:
            return made, -1
        if os.fstat(lock).st_nlink:
            return made, lock
        os.close(lock)  # another process removed the directory before it was locked


def _locked(directory: Path) -> int:
    """Return the descriptor that holds a directory's lock. Raises `OSError` if another descriptor holds it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def set_aside(file: Path, keep: int) -> None:
    """Truncate a file to its first ``keep`` bytes, after copying the rest beside it unless the rest is all zeros.

    The copy is named ``NAME.cut-at-KEEP``, which no engine regards as its own. Both files are fsynced before this
    returns. A missing file is created.
    """
    with naming(file), file.open("a+b") as opened:
        opened.seek(keep)
        behind = opened.read()
        if any(behind):
            aside = place_aside(file, keep)
            aside.write_bytes(behind)
            sync(aside)
            sync(aside.parent)
        opened.truncate(keep)
        os.fsync(opened.fileno())
    sync(file.parent)


def place_aside(file: Path, keep: int) -> Path:
    """Return an unused path for a copy of the bytes of a file from offset ``keep`` on."""
    names = (f"{file.name}.cut-at-{keep}{again}" for again in chain([""], (f"-{number}" for number in count(1))))
    return next(place for place in map(file.with_name, names) if not place.exists())


def resource_error(path: Path, error: BaseException, text: str) -> StorageFullError | TooManyOpenFilesError | None:
    """Return the error to raise if an engine's error or its message means that a resource is exhausted, else None.

    The resources are disk space, a disk quota, and the number of files that a process may have open.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO or _FULL.search(text):
        return StorageFullError(f"{path}: {text}")
    if number in _FILES_ERRNO or _FILES.search(text):
        return TooManyOpenFilesError(f"{path}: {text}; close some, or raise the limit (ulimit -n)")
    return None
