"""What the operating system says of files, told as errors that name the way out."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from topicstore.contract.errors import StorageFullError, TooManyOpenFilesError

__all__ = ["shortage_told"]


@contextlib.contextmanager
def shortage_told() -> Iterator[None]:
    """Raise `StorageFullError` or `TooManyOpenFilesError` where something is used up; what else is wrong goes on."""
    try:
        yield
    except OSError as bad:
        if bad.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(str(bad)) from bad
        if bad.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFilesError(f"{bad}; close some, or raise the limit (ulimit -n)") from bad
        raise
