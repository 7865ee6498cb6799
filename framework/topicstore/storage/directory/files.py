"""Access to topicstore's own files: replaced atomically, fsynced, and never written through a symbolic link.

Also `convert_os_errors`, which converts the operating system's errors into topicstore's.
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
from topicstore.runtime.closing import Closer

__all__ = [
    "OWNER_ONLY",
    "check_no_links",
    "convert_os_errors",
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
"""The errors that are also instances of a built-in class, so that callers can catch them by that class."""


@contextlib.contextmanager
def convert_os_errors() -> Iterator[None]:
    """Convert an `OSError` of the block to `StorageFullError`, `TooManyOpenFilesError` or `FileSystemError`.

    Errors of topicstore pass unchanged.
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
"""The mode bits of directories created for messages. They make the mode bits of the files in them irrelevant."""
_NO_FILE = "this is not a file"


def open_own(path: Path, flags: int, *, links: bool = False) -> int:
    """Open one of topicstore's own files, which must be a regular file; return its descriptor.

    With ``links`` a symbolic link is followed. Otherwise a link raises `NotADatabaseError`. Raises `CorruptionError`
    for anything else that isn't a regular file, and `OSError`.
    """
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW), 0o644)
    except OSError as bad:
        if bad.errno == errno.ELOOP:
            raise _link(path) from bad
        if bad.errno in (errno.EISDIR, errno.ENXIO):  # the path is a directory or a socket
            raise CorruptionError(_NO_FILE, str(path)) from bad
        raise
    with Closer() as closer:
        closer.add(partial(os.close, file))
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CorruptionError(_NO_FILE, str(path))
        return file


def read_own(path: Path, *, links: bool = False) -> bytes:
    """Return the content of one of topicstore's own files. Raises the errors of `open_own`."""
    file = open_own(path, os.O_RDONLY, links=links)
    try:
        with naming(path), io.FileIO(file, closefd=False) as opened:  # `os.fdopen` fails during finalization
            return opened.readall()
    finally:
        os.close(file)


def replace_file(path: Path, data: bytes, *, temporary: Path) -> None:
    """Replace a file atomically, and fsync it: write the new content to ``temporary``, and rename that to ``path``.

    A file or link that exists at ``temporary``, for example after a process was killed, is removed first. Raises
    `CorruptionError` if a directory is there.
    """
    if temporary.is_dir() and not temporary.is_symlink():
        raise CorruptionError(_NO_FILE, str(temporary))
    temporary.unlink(missing_ok=True)
    try:
        with naming(temporary), temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directory(directory: Path, permissions: int) -> None:
    """Create a directory and its missing parents unless it exists, and fsync the directory entries."""
    for missing in reversed([directory, *directory.parents]):
        if not missing.is_dir():
            missing.mkdir(permissions if missing == directory else 0o777, exist_ok=True)
            sync_directory(missing.parent)


def permissions_of(directory: Path) -> int:
    """Return the mode bits of a directory, for new directories with messages of the same database."""
    try:
        return stat.S_IMODE(directory.stat().st_mode)
    except FileNotFoundError:  # the backend isn't persistent
        return OWNER_ONLY


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that renames and new entries survive a power failure.

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

    Engines would follow the link and write elsewhere, to a place that an attacker may have chosen. Unreadable
    directories are skipped, because they don't belong to the database, or its engine will fail. Names that never belong
    to a database are skipped, too, such as the links with which editors lock files (`is_foreign`).
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
    """Return whether a file name never belongs to a database or its engine.

    This includes names used by file systems (``lost+found``, ``.snapshot``), editors (``.#file``) and desktops.
    """
    return name.startswith(".") or name == "lost+found"


def _check_no_link(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink() and not is_foreign(entry.name):
        raise _link(entry.path)


def _link(path: str | Path) -> NotADatabaseError:
    return NotADatabaseError(f"{path} is a symbolic link; a database is written in its own directory only")
