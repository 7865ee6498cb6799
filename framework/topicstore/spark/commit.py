"""The driver's commit: stores the rows that tasks have staged, each exactly once, or removes them.

A later write finishes an interrupted commit. If the interrupted write has a writer's name, its own batch or the
writer's next batch does; otherwise any write of the database does. If both writes are unnamed and have identical rows,
the later write counts as a repetition, and its rows are not stored again. This also holds if another write has finished
the interrupted commit in between. `topicstore.spark.promotion` has the details.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from topicstore.contract.descriptors import lock_file
from topicstore.contract.errors import InvalidMessageError
from topicstore.database import Database
from topicstore.opening import open  # noqa: A004 - the name people know
from topicstore.runtime.warning import warn_caller
from topicstore.storage.directory.directory_lock import DirectoryLock
from topicstore.storage.directory.files import open_own, permissions_of
from topicstore.storage.directory.manifest import read_manifest

from .options import WriteSettings
from .promotion import (
    Batch,
    CommitJob,
    UnreadableRowsError,
    discard,
    finished_before,
    has_commit,
    interrupted_before,
    write_commit,
)

__all__ = ["abort", "check_unlocked", "promote"]

_TURN = "spark-turn"
"""The name of an empty lock file in the database's directory; Spark's writes lock it before they open the database."""


def check_unlocked(settings: WriteSettings) -> int:
    """Check that no other process has the database open; return the number of shards that it has or will be given.

    Waits for commits of other Spark writes. Raises `DatabaseLockedError`.
    """
    directory = Path(settings.path)
    manifest = read_manifest(directory)
    if manifest is None:
        return int(settings.making.get("shards", 1))
    with _in_turn(directory):
        DirectoryLock(directory).release()
    return manifest.shards


def promote(settings: WriteSettings, batch: Batch) -> None:
    """Store a batch unless the database has it already, and remove the staged rows.

    If storing fails after some rows may have been stored, the staged rows stay. The remaining rows are stored by the
    writer's repeated or next batch or, without a writer's name, by the next write.
    """
    staging = Path(settings.staging)
    write_commit(staging, batch, permissions_of(Path(settings.path)))
    job: CommitJob | None = None
    try:
        with _in_turn(Path(settings.path)), _opened(settings) as db:
            if not _finish_interrupted(db, staging, batch):
                job = CommitJob(db, staging, batch)
                job.run()
                job.end()
    except BaseException as error:
        if job is None or not job.stored:
            discard(staging, {batch.write})
        else:
            error.add_note(f"Some of the rows may be stored; the others stay in {job.directory}.")
        raise
    discard(staging, {batch.write})


def abort(settings: WriteSettings, writes: Iterable[str]) -> None:
    """Remove the staged rows of writes, except those whose commit has begun; `promote` handles those."""
    staging = Path(settings.staging)
    discard(staging, {write for write in writes if not has_commit(staging / write)})


@contextmanager
def _in_turn(directory: Path) -> Iterator[None]:
    """Serialize Spark's writes of a database, so that `check_unlocked` of one write never fails the commit of another.

    Does nothing if the directory doesn't exist yet.
    """
    path = directory / _TURN
    try:
        handle = open_own(path, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        yield
        return
    try:
        lock_file(handle, fcntl.LOCK_EX, path)
        yield
    finally:
        os.close(handle)


def _opened(settings: WriteSettings) -> Database:
    manifest = read_manifest(Path(settings.path))
    making: dict[str, Any] = {"timestamps": "message"} if manifest is None or not manifest.complete else {}
    return open(settings.path, auto_compact=False, **making, **settings.making)


def _finish_interrupted(db: Database, staging: Path, batch: Batch) -> bool:
    """Finish interrupted commits of earlier writes; return whether the batch repeats one of them.

    Warns about rows that the database refuses now. Raises `InvalidMessageError` if they belong to the batch itself.
    """
    again = False
    for interrupted in interrupted_before(db, staging, batch):
        try:
            interrupted.finish()
        except UnreadableRowsError as unreadable:
            warn_caller(str(unreadable))
            interrupted.end(readable=False)
            continue
        except Exception as error:
            error.add_note(
                "The rows are those of an earlier write, whose commit was interrupted; nothing of this one was stored. "
                f"To give up the rest of them, remove {interrupted.directory}."
            )
            raise
        same = batch.writer is None and interrupted.nameless and interrupted.same_as(staging / batch.write)
        told = interrupted.put_aside()
        interrupted.end(by_another=not same)
        if told is not None and same:
            raise InvalidMessageError(told)
        if told is not None:
            warn_caller(told)
        again = again or same
    return again or (batch.writer is None and finished_before(db, staging, batch))
