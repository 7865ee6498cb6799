"""Calls on file descriptors. The operating system's errors name no file there, so these functions add its path."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["lock_file", "naming", "take_closed_streams"]

_CANNOT_LOCK = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""The errors of file systems that have no locks."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` of the block the path of a file, if it names none."""
    try:
        yield
    except OSError as bad:
        if bad.errno is not None and bad.filename is None:
            bad.filename = str(path)
        raise


def lock_file(file: int, how: int, path: Path) -> None:
    """Lock an open file or directory with ``flock``, in the way that ``how`` says.

    Raises `BlockingIOError` if it is locked elsewhere, and `OSError` with the path, and with advice where files
    can't be locked.
    """
    try:
        with naming(path):
            fcntl.flock(file, how)
    except OSError as bad:
        if bad.errno in _CANNOT_LOCK:
            bad.strerror = (
                f"{os.strerror(bad.errno)}: this file system can't lock files (flock), "
                "and nothing would keep a second process out; use a local disk, or mount it with locks"
            )
        raise


def take_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file that is opened gets its descriptor, and what is printed is written into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
