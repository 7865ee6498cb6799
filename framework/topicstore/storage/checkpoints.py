"""Checkpoints: copies of a database, which are databases themselves."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from topicstore.contract.errors import NotADatabaseError, UnsupportedError
from topicstore.shard.records import Tail
from topicstore.shard.shard import Shard
from topicstore.warning import warn_caller

from .archive_locations import archive_directory
from .closed_files import ClosedFiles
from .disk_errors import failure_told
from .drafts import draft, sweep_drafts
from .durable_files import permissions_of, sync_directory
from .manifest import write_manifest
from .storage import Storage
from .synced_writes import SyncedWrites

__all__ = ["checkpoint", "write_copy"]


@failure_told()
def checkpoint(storage: Storage, target: Path, write_others: Callable[[Path], object]) -> None:
    """Write a copy of a database into the new directory ``target``; see `Database.checkpoint`.

    ``write_others`` adds to the copy, before it gets its name, what else lies in the database's directory.
    """
    storage.check_may_write()
    if "checkpoint" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} can't make checkpoints")
    if target.resolve().is_relative_to(storage.path.resolve()):
        raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
    if os.path.lexists(target):
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_drafts(target.parent)
    with draft(target.parent) as unfinished:
        copy = unfinished / target.name  # a directory in the draft, because both drafts and databases are locked
        write_copy(storage, copy)
        write_others(copy)
        copy.rename(target)  # only a complete copy gets the name
        sync_directory(target.parent)
    _warn_of_other_archives(storage, target)


def write_copy(storage: Storage, copy: Path) -> None:
    """Write a copy, consistent over all shards, into the new directory ``copy``. Writers only wait for the snapshot."""
    storage.check_open()
    copy.mkdir(permissions_of(storage.path))
    with ExitStack() as stack:
        copies = []
        for shard in storage.shards:
            steps = shard.engine().checkpoint_steps(copy / f"shard-{shard.number:04}")
            stack.callback(steps.close)
            copies.append(steps)
            next(steps)
        tails = storage.locked(
            lambda: [_taken(steps, shard) for steps, shard in zip(copies, storage.shards, strict=True)]
        )
        for steps in copies:
            deque(steps, maxlen=0)
    # If the copy is put back where the database was, its notes replace later ones.
    with closing(SyncedWrites(copy, storage.id, len(storage.shards))) as synced:
        for number, tail in enumerate(tails):
            synced.note(number, tail.writes, tail.last_position)
    ClosedFiles(copy, storage.id, len(storage.shards), storage.unneeded).write()
    write_manifest(copy, storage.manifest)


def _taken(steps: Iterator[None], shard: Shard) -> Tail:
    """Take the snapshot of a shard, whose lock is held, and return its tail."""
    next(steps)
    return shard.log.tail


def _warn_of_other_archives(storage: Storage, copy: Path) -> None:
    """Warn of exports whose relative locations lead a copy to another directory than the database."""
    locations = {record.archive for record in storage.shards[0].generations() if record.archive is not None}
    for location in sorted(locations):
        here, there = archive_directory(storage.path, location), archive_directory(copy, location)
        if here != there:
            warn_caller(
                f"what was archived to {here} is noted by a relative path: {copy} looks for it in {there}",
                UserWarning,
            )
