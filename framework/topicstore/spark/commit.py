"""The driver's commit: rows that tasks have staged are stored in the database, each once, or removed.

A commit that was interrupted is finished by the next write: one without a name by any, one with a name by the same
or the next batch of its writer. If both writes are without a name and have the very same rows, the next one is the
interrupted one, run again, and its rows are not stored a second time; nor are they if another write has finished the
interrupted one in between. `topicstore.spark.promotion` has the details.
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
"""The name of an empty file in the database's directory, which Spark's writes lock before they open the database."""


def check_unlocked(settings: WriteSettings) -> int:
    """Return how many shards the database has, or will have. Raises `DatabaseLockedError` if it is open elsewhere.

    Waits for a commit of another Spark write.
    """
    directory = Path(settings.path)
    manifest = read_manifest(directory)
    if manifest is None:
        return int(settings.making.get("shards", 1))
    with _in_turn(directory):
        DirectoryLock(directory).release()
    return manifest.shards


def promote(settings: WriteSettings, batch: Batch) -> None:
    """Store a batch unless the database has it, and remove the staged rows.

    If storing fails when some rows may be stored, the staged rows stay: the rest is stored when the writer's batch
    comes again, or its next one, or, without a writer's name, by the next write.
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
    """Remove the staged rows of writes, except those of a commit that has begun, which `promote` deals with."""
    staging = Path(settings.staging)
    discard(staging, {write for write in writes if not has_commit(staging / write)})


@contextmanager
def _in_turn(directory: Path) -> Iterator[None]:
    """Let Spark's writes of a database wait for each other, so that one that only checks the lock never fails a commit.

    There is no waiting for a database that doesn't exist yet.
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
    """Finish commits that were interrupted before; return whether the batch is one of them, run again.

    Warns of rows that can't be stored any more. Raises `InvalidMessageError` if they are the batch's own.
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
