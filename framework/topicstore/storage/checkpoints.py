"""Checkpoints: copies of a database, databases themselves."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

from topicstore.contract.errors import NotADatabaseError, UnsupportedError

from .archive_locations import archive_directory
from .drafts import draft, sweep_drafts
from .durable_files import sync_directory
from .manifest import write_manifest
from .storage import Storage

__all__ = ["checkpoint"]


def checkpoint(storage: Storage, target: Path) -> None:
    """Write a copy of a database into the new directory ``target``; see `Database.checkpoint`."""
    storage.check_may_write()
    if "checkpoint" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} can't make checkpoints")
    if target.resolve().is_relative_to(storage.path.resolve()):
        raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
    if os.path.lexists(target):
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_drafts(target.parent)
    with draft(target.parent, stat.S_IMODE(storage.path.stat().st_mode)) as copy:
        with storage.locked():
            for shard in storage.shards:
                shard.engine().checkpoint(copy / f"shard-{shard.number:04}")
        write_manifest(copy, storage.manifest)
        copy.rename(target)  # only what is whole gets the name
        sync_directory(target.parent)
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
