"""Calls on file descriptors that add the file's path to an `OSError`, which otherwise names no file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["lock_file", "naming", "take_closed_streams"]

_CANNOT_LOCK = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""Error numbers with which file systems without support for locks fail."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path of a file to an `OSError` that the block raises without a file name."""
    try:
        yield
    except OSError as bad:
        if bad.errno is not None and bad.filename is None:
            bad.filename = str(path)
        raise


def lock_file(file: int, how: int, path: Path) -> None:
    """Lock an open file or directory with ``flock``; ``how`` is its operation, such as ``LOCK_EX | LOCK_NB``.

    Raises `BlockingIOError` if another open file holds the lock, and `OSError` with the path; if the file system
    doesn't support locks, the error includes advice.
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
    """Open the null device on the descriptor of each closed standard stream.

    Otherwise the next file that is opened would get this descriptor, and printed text would be written into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
