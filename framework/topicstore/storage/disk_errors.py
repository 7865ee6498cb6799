"""A context manager that turns the operating system's errors into errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from topicstore.contract.errors import (
    FileAccessError,
    FileSystemError,
    PathExistsError,
    PathNotDirectoryError,
    StorageFullError,
    TooManyOpenFilesError,
    TopicstoreError,
)

__all__ = ["failure_told"]

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
