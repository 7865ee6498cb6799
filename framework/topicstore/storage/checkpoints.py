"""Checkpoints: copies of a database, databases themselves."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

from topicstore.contract.errors import NotADatabaseError, UnsupportedError

from .archive_locations import archive_directory
from .manifest import sync_directory, write_manifest
from .storage import Storage

__all__ = ["checkpoint"]


def checkpoint(storage: Storage, target: Path) -> None:
    """Write a copy of a database into the new directory ``target``; see `Database.checkpoint`."""
    storage.check_may_write()
    if "checkpoint" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} can't make checkpoints")
    if target.resolve().is_relative_to(storage.path.resolve()):
        raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
    if target.exists():
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
    draft = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        with storage.locked():
            for shard in storage.shards:
                shard.engine().checkpoint(draft / f"shard-{shard.number:04}")
        write_manifest(draft, storage.manifest)
        draft.rename(target)  # only what is whole gets the name
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _warn_of_other_archives(storage, target)


def _warn_of_other_archives(storage: Storage, copy: Path) -> None:
    """Say which exports a copy looks for elsewhere than the database does."""
    locations = {record.archive for record in storage.shards[0].generations() if record.archive is not None}
    for location in sorted(locations):
        here, there = archive_directory(storage.path, location), archive_directory(copy, location)
        if here != there:
            warnings.warn(
                f"what was archived to {here} is noted by a relative path: {copy} looks for it in {there}",
                stacklevel=4,  # whoever called `Database.checkpoint`
            )
