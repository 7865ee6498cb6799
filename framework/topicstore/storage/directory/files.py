"""Topicstore's own files: replaced as a whole, synced to disk, and never written through a symbolic link.

A context manager that turns the operating system's errors into errors that say what to do.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from topicstore.contract.descriptors import naming
from topicstore.contract.errors import (
    CorruptionError,
    FileAccessError,
    FileSystemError,
    NotADatabaseError,
    PathExistsError,
    PathNotDirectoryError,
    StorageFullError,
    TooManyOpenFilesError,
    TopicstoreError,
)
from topicstore.runtime.closing import Taken

__all__ = [
    "OWNER_ONLY",
    "check_no_links",
    "failure_told",
    "is_foreign",
    "make_directory",
    "open_own",
    "permissions_of",
    "read_own",
    "replace_file",
    "sync_directory",
]

_KINDS: dict[type[OSError], type[FileSystemError]] = {
    PermissionError: FileAccessError,
    FileExistsError: PathExistsError,
    NotADirectoryError: PathNotDirectoryError,
}
"""The errors that are of a built-in class too, so that callers find them by it."""


@contextlib.contextmanager
def failure_told() -> Iterator[None]:
    """Raise `StorageFullError` or `TooManyOpenFilesError` for an exhausted resource, else `FileSystemError`.

    Errors of the library pass unchanged.
    """
    try:
        yield
    except OSError as bad:
        if isinstance(bad, TopicstoreError):
            raise
        if bad.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(str(bad)) from bad
        if bad.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFilesError(f"{bad}; close some, or raise the limit (ulimit -n)") from bad
        kind = next((ours for theirs, ours in _KINDS.items() if isinstance(bad, theirs)), FileSystemError)
        whole = bad.args if bad.errno is None else (bad.errno, bad.strerror, bad.filename, None, bad.filename2)
        raise kind(*whole) from bad


OWNER_ONLY = 0o700
"""The permissions of directories made for messages. With these, the permissions of the files in them don't matter."""
_NO_FILE = "this is not a file"


def open_own(path: Path, flags: int, *, links: bool = False) -> int:
    """Open one of topicstore's own files, but nothing else that is in its place; with ``links``, follow a link.

    Raises `NotADatabaseError` for a symbolic link, `CorruptionError` for anything else that isn't a regular file, and
    `OSError`.
    """
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW), 0o644)
    except OSError as bad:
        if bad.errno == errno.ELOOP:
            raise _link(path) from bad
        if bad.errno in (errno.EISDIR, errno.ENXIO):  # a directory, a socket
            raise CorruptionError(_NO_FILE, str(path)) from bad
        raise
    with Taken() as taken:
        taken.add(partial(os.close, file))
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CorruptionError(_NO_FILE, str(path))
        return file


def read_own(path: Path, *, links: bool = False) -> bytes:
    """Return the content of one of topicstore's own files. Raises the errors of `open_own`."""
    file = open_own(path, os.O_RDONLY, links=links)
    try:
        with naming(path), io.FileIO(file, closefd=False) as opened:  # `os.fdopen` fails while Python ends
            return opened.readall()
    finally:
        os.close(file)


def replace_file(path: Path, data: bytes, *, draft: Path) -> None:
    """Replace the content of a file atomically. It is on disk when the call returns.

    The draft beside the file is always created: one that a killed process left is removed, and a link of that name is
    not followed. Raises `CorruptionError` if it is a directory.
    """
    if draft.is_dir() and not draft.is_symlink():
        raise CorruptionError(_NO_FILE, str(draft))
    draft.unlink(missing_ok=True)
    try:
        with naming(draft), draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directory(directory: Path, permissions: int) -> None:
    """Make a directory and its missing parents, unless it exists. Its name then survives a power failure."""
    for missing in reversed([directory, *directory.parents]):
        if not missing.is_dir():
            missing.mkdir(permissions if missing == directory else 0o777, exist_ok=True)
            sync_directory(missing.parent)


def permissions_of(directory: Path) -> int:
    """Return the permissions of a directory, for other directories with messages of the same database."""
    try:
        return stat.S_IMODE(directory.stat().st_mode)
    except FileNotFoundError:  # the backend keeps no files
        return OWNER_ONLY


def sync_directory(directory: Path) -> None:
    """Make renames and new entries of a directory survive a power failure.

    Syncing a file doesn't sync its directory entry: see Pillai et al., "All File Systems Are Not Created Equal", OSDI
    2014.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        with naming(directory):
            os.fsync(handle)
    finally:
        os.close(handle)


def check_no_links(directory: Path) -> None:
    """Raise `NotADatabaseError` if one of a database's directories, or a file in one, is a symbolic link.

    Engines would follow the link and write elsewhere, at a place that an attacker may have chosen. A directory that
    can't be read is none of the database's, or its engine will fail. Names that are never a database's are passed over,
    such as the links by which editors lock files (`is_foreign`).
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if is_foreign(entry.name):
                continue
            _check_no_link(entry)
            if entry.is_dir():
                with suppress(PermissionError), os.scandir(entry) as below:
                    for file in below:
                        _check_no_link(file)


def is_foreign(name: str) -> bool:
    """Return whether a name in a directory is never a database's, nor its engine's.

    Such are those of file systems (``lost+found``, ``.snapshot``), of editors (``.#file``) and of desktops.
    """
    return name.startswith(".") or name == "lost+found"


def _check_no_link(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink() and not is_foreign(entry.name):
        raise _link(entry.path)


def _link(path: str | Path) -> NotADatabaseError:
    return NotADatabaseError(f"{path} is a symbolic link; a database is written in its own directory only")
