"""Drafts: directories that are written under a name that doesn't count, and get their own when they are whole.

::

    <parent>/.unfinished-<32 hexadecimal digits>/       of somebody who writes there, or was killed

A draft is locked as long as it is used, so that whoever makes the next one beside it can tell what a killed process
left, and removes that.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .durable_files import OWNER_ONLY

__all__ = ["draft", "draft_name", "sweep_drafts"]

_NAME = re.compile(r"\.unfinished-[0-9a-f]{32}")


def draft_name() -> str:
    """Return a name for a draft that there is nowhere yet."""
    return f".unfinished-{uuid.uuid4().hex}"


@contextmanager
def draft(parent: Path, mode: int = OWNER_ONLY) -> Iterator[Path]:
    """Make a directory to write in; whatever has that name at the end is removed."""
    while True:
        path = parent / draft_name()
        path.mkdir(mode)
        with suppress(FileNotFoundError):  # swept away before it was locked
            handle = _open(path)
            _lock(handle, fcntl.LOCK_EX)  # who has it is about to remove the directory
            if path.exists():
                break
            os.close(handle)
    try:
        yield path
    finally:
        os.close(handle)
        shutil.rmtree(path, ignore_errors=True)


def sweep_drafts(parent: Path) -> None:
    """Remove the drafts that killed processes have left in a directory."""
    for path in list(parent.iterdir()):
        if _NAME.fullmatch(path.name):
            with suppress(OSError):  # it is gone meanwhile, somebody else's, or no directory
                handle = _open(path)
                try:
                    if _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):  # else somebody writes there
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(handle)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(handle: int, how: int) -> bool:
    """Lock a directory, if that is possible: it isn't on every file system."""
    try:
        fcntl.flock(handle, how)
    except OSError:
        return False
    return True
