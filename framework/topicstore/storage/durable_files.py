"""Files of our own: replaced as a whole, brought to disk, and never written through somebody's symbolic link."""

from __future__ import annotations

import os
from pathlib import Path

from topicstore.contract.errors import NotADatabaseError

__all__ = ["OWNER_ONLY", "check_no_links", "make_directory", "replace_file", "sync_directory"]

OWNER_ONLY = 0o700
"""Permissions of directories made for messages: within, permissions of files needn't be looked at."""


def replace_file(path: Path, data: bytes, *, draft: Path) -> None:
    """Give a file a new content at once; on disk when it returns.

    The draft beside it is made anew: one that a killed process left is removed, a link of that name not followed.
    """
    draft.unlink(missing_ok=True)
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directory(directory: Path, mode: int) -> None:
    """Make a directory, with those it lies in, unless it is there; its name survives power loss then."""
    for missing in reversed([directory, *directory.parents]):
        if not missing.is_dir():
            missing.mkdir(mode if missing == directory else 0o777, exist_ok=True)
            sync_directory(missing.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and new entries of a directory survive power loss."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_no_links(directory: Path) -> None:
    """Raise `NotADatabaseError` if one of a database's directories, or a file in one, is a symbolic link.

    Engines would follow it and write elsewhere, where whoever prepared the directory wants them to.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            _check_no_link(entry)
            if entry.is_dir():
                with os.scandir(entry) as below:
                    for file in below:
                        _check_no_link(file)


def _check_no_link(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink():
        raise NotADatabaseError(f"{entry.path} is a symbolic link; a database is written in its own directory only")
