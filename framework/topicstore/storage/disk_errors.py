"""Context managers that turn the operating system's errors into errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from topicstore.contract.errors import EngineError, StorageFullError, TooManyOpenFilesError

__all__ = ["failure_told", "shortage_told"]


@contextlib.contextmanager
def shortage_told() -> Iterator[None]:
    """Raise `StorageFullError` or `TooManyOpenFilesError` for an exhausted resource; other errors pass unchanged."""
    try:
        yield
    except OSError as bad:
        if bad.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(str(bad)) from bad
        if bad.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFilesError(f"{bad}; close some, or raise the limit (ulimit -n)") from bad
        raise


@contextlib.contextmanager
def failure_told() -> Iterator[None]:
    """Raise the errors of `shortage_told`, and `EngineError` for all other errors of the system."""
    try:
        with shortage_told():
            yield
    except OSError as bad:
        raise EngineError(str(bad)) from bad
