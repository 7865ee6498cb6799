"""File system operations of the engines: syncing, sizes, links, temporary directories, and errors of shortage."""

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
    "set_aside",
    "shortage",
    "sync",
]

READER = "topicstore-reader-"
"""The beginning of the names of directories in which a database is read."""
OPENING = "topicstore-opening"
"""The beginning of the names of directories that keep a database as it was before it is opened."""
OWN_FILES = (f"{READER}*", f"{OPENING}*", "*.cut-at-*")
"""Patterns of the names of what is topicstore's own in an engine's directory."""

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
    """Create a directory if it doesn't exist, and sync its parent so that its entry survives a power failure."""
    path.mkdir(parents=True, exist_ok=True)
    sync(path.parent)


def disk_bytes(path: Path) -> int:
    """Return the bytes of all files in a directory; an engine may delete some of them meanwhile."""
    total = 0
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            total += 0 if entry.name.startswith((READER, OPENING)) else entry.stat().st_size
    return total


def link_files(path: Path, links: str, *, without: Collection[str], lasting: str | None = None) -> None:
    """Link all files of a directory into another, except those with the names ``without``.

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

    Its lock is held as long as it is used. One that isn't locked was left by a process that was killed.
    """

    def __init__(self, beside: Path | None) -> None:
        """Make it in the directory ``beside`` if that can be written, else where temporary files are made."""
        place = beside if beside is not None and os.access(beside, os.W_OK) else Path(tempfile.gettempdir())
        remove_abandoned(place)
        self._owner = os.getpid()
        self.path, self._lock = _make_locked(place)

    def remove(self) -> None:
        """Remove it with everything in it, but not in a fork, whose parent reads it. May be called twice."""
        try:
            if os.getpid() == self._owner:
                with suppress(FileNotFoundError):
                    shutil.rmtree(self.path)
        finally:  # what is left is abandoned then
            if self._lock >= 0:
                lock, self._lock = self._lock, -1
                os.close(lock)

    def removal(self, engine: object) -> Callable[[], object]:
        """Return what removes it at the engine's closing. It is removed too if the engine is collected unclosed."""
        return weakref.finalize(engine, self.remove)


@contextmanager
def reader_directory(beside: Path | None) -> Iterator[ReaderDirectory]:
    """Make a `ReaderDirectory` for an engine, and remove it if the block, which opens the engine, fails.

    Its removal succeeds even if the block uses up the files that the process may open.
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
        with suppress(OSError):  # another user's, one in use, or one that somebody else removes
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
        except (BlockingIOError, FileNotFoundError):  # somebody takes it for abandoned
            continue
        except OSError:
            return made, -1
        if os.fstat(lock).st_nlink:
            return made, lock
        os.close(lock)  # somebody has removed it as abandoned before it was locked


def _locked(directory: Path) -> int:
    """Return the descriptor that holds a directory's lock. Raises `OSError` if it is held elsewhere."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_file(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, directory)
    except BaseException:
        os.close(lock)
        raise
    return lock


def set_aside(file: Path, keep: int) -> None:
    """Cut a file to its first ``keep`` bytes, after what is behind them was copied beside it, unless it is all zeros.

    The copy is named ``NAME.cut-at-KEEP``, which no engine regards as its own. Both are on disk when it returns. A file
    that is missing is created.
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
    """Return the name of a file that doesn't exist, for what was in a file behind a byte."""
    names = (f"{file.name}.cut-at-{keep}{again}" for again in chain([""], (f"-{number}" for number in count(1))))
    return next(place for place in map(file.with_name, names) if not place.exists())


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
