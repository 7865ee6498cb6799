"""Links to a database's files that are kept during an opening, until LevelDB has provably read all of its logs.

When LevelDB is opened it lists its directory, reads the logs that it finds, writes a new manifest, and deletes them.
It doesn't notice an I/O error of the listing (`PosixEnv::GetChildren` in
https://github.com/google/leveldb/blob/main/util/env_posix.cc ignores those of ``readdir``): a log that was not listed
isn't read, and is deleted all the same. So all files are first linked into a directory. After the opening, the new
manifest holds the last sequence number that LevelDB has read. If a kept log begins with a later number, the files are
restored.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from topicstore_backends.files import OPENING, READER, sync
from topicstore_backends.write_ahead_logs import least_sequence

__all__ = ["drop_kept", "keep_files", "restore_unread"]

_NOT_LINKED = frozenset((errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV))
"""The errors of a hard link that can't be made, as on file systems without links."""
_NOT_KEPT = ("LOCK", "LOG", "LOG.old")
_TABLES = (".ldb", ".sst")


def keep_files(path: Path) -> None:
    """Link all files of a database into a directory beside them, from which `restore_unread` restores them.

    Files that can't be linked are copied, except tables, which LevelDB finds by its manifest and not by listing.
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


def restore_unread(path: Path) -> bool:
    """Compare a database with its kept files, if there are any; return whether LevelDB has read all logs.

    If not, the files are restored; so the database must not be open. Then the kept files are removed. If the call is
    interrupted, the next call, in any process, completes its work.
    """
    kept = path / OPENING
    if not kept.is_dir():
        return True
    whole = least_sequence(path) >= least_sequence(kept)
    if not whole:
        _restore(path, kept)
    drop_kept(path)
    return whole


def drop_kept(path: Path) -> None:
    """Remove the kept files, if there are any. The caller knows that LevelDB has read all logs."""
    kept, unfinished = path / OPENING, path / f"{OPENING}-unfinished"
    if kept.is_dir():
        kept.rename(unfinished)  # atomic, so that no later call restores a part of the files
        shutil.rmtree(unfinished)


def _restore(path: Path, kept: Path) -> None:
    """Restore the kept files, ``CURRENT`` last: until then an interrupted call isn't mistaken for a complete one."""
    names = set(os.listdir(kept))  # noqa: PTH208 - texts
    for name in os.listdir(path):  # noqa: PTH208 - texts
        if name.endswith(".log") and name not in names:
            (path / name).unlink()  # begun by the interrupted opening, the log holds only the marks of a new database
    for name in names - {"CURRENT"}:
        if not (path / name).exists():
            _link_or_copy(kept / name, path / name)
    staged = path / f"{OPENING}-CURRENT"
    shutil.copyfile(kept / "CURRENT", staged)
    sync(staged)
    staged.replace(path / "CURRENT")
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
