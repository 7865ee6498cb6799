"""Keeping a database's files while LevelDB opens it, until it is certain that LevelDB has read all of its logs.

When LevelDB is opened it lists its directory, reads the logs that it finds, writes a new manifest, and deletes them.
It doesn't notice an I/O error of the listing (`PosixEnv::GetChildren` in
https://github.com/google/leveldb/blob/main/util/env_posix.cc ignores those of ``readdir``): a log that was not listed
isn't read, and is deleted all the same. So all files are linked into a directory before. Afterwards the new manifest
tells the last sequence number that was read; if a log begins with a later one, the files are put back as they were.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from topicstore_backends.files import OPENING, READER, sync
from topicstore_backends.write_ahead_logs import least_sequence

__all__ = ["drop_kept", "keep_files", "settle"]

_NOT_LINKED = frozenset((errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV))
"""The errors where no hard link can be made, as on file systems without links."""
_NOT_KEPT = ("LOCK", "LOG", "LOG.old")
_TABLES = (".ldb", ".sst")


def keep_files(path: Path) -> None:
    """Link all files of a database into a directory beside them, from which `settle` puts them back.

    Where files can't be linked they are copied, but for tables, which LevelDB finds by its manifest.
    """
    kept, unfinished = path / OPENING, path / f"{OPENING}-unfinished"
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    for name in sorted(os.listdir(path)):  # noqa: PTH208 - texts
        file = path / name
        if name not in _NOT_KEPT and not name.startswith((READER, OPENING)) and file.is_file():
            _link_or_copy(file, unfinished / name)
    unfinished.rename(kept)


def settle(path: Path) -> bool:
    """Compare a database with the files that were kept, if there are any; return whether nothing of them is missing.

    If something is missing, the files are put back: the database must not be open. Otherwise what was kept is removed.
    An interrupted call is finished by the next one, also in another process.
    """
    kept = path / OPENING
    if not kept.is_dir():
        return True
    whole = least_sequence(path) >= least_sequence(kept)
    if not whole:
        _put_back(path, kept)
    drop_kept(path)
    return whole


def drop_kept(path: Path) -> None:
    """Remove what was kept, if anything was, because LevelDB has read all of it."""
    kept, unfinished = path / OPENING, path / f"{OPENING}-unfinished"
    if kept.is_dir():
        kept.rename(unfinished)  # in one step: a part of it must not be put back
        shutil.rmtree(unfinished)


def _put_back(path: Path, kept: Path) -> None:
    """Make a database what it was: first its logs, so that what is missing isn't taken for whole meanwhile."""
    names = set(os.listdir(kept))  # noqa: PTH208 - texts
    for name in os.listdir(path):  # noqa: PTH208 - texts
        if name.endswith(".log") and name not in names:
            (path / name).unlink()  # begun by the opening; it has nothing but what marks a new database
    for name in names - {"CURRENT"}:
        if not (path / name).exists():
            _link_or_copy(kept / name, path / name)
    draft = path / f"{OPENING}-CURRENT"
    shutil.copyfile(kept / "CURRENT", draft)
    sync(draft)
    draft.replace(path / "CURRENT")
    sync(path)


def _link_or_copy(file: Path, other: Path) -> None:
    try:
        os.link(file, other)
    except OSError as bad:
        if bad.errno not in _NOT_LINKED:
            raise
        if file.suffix not in _TABLES:
            shutil.copyfile(file, other)
            sync(other)
