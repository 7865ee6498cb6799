"""Adding, dropping and listing the generations of a database, which are the same in all shards; archive locations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from topicstore.contract.errors import ManifestMismatchError, ShardElsewhereError, UnsupportedError
from topicstore.contract.options import options_dict
from topicstore.plugins import registry
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.writer import DropGeneration, PendingWrite

from .storage import Storage
from .store_path import finish_commits, submit_locked

if TYPE_CHECKING:
    from topicstore.replication.objects import GenerationPlan

__all__ = [
    "GenerationInfo",
    "add_generation",
    "all_live_records",
    "archive_directory",
    "check_apart",
    "check_shared",
    "complete_generations",
    "drop_generation",
    "generation_infos",
    "live_records",
    "location_of",
    "reclaim_removed",
    "remove_dropped",
]


@attrs.frozen(kw_only=True)
class GenerationInfo:
    """Statistics of one generation, summed over all shards. Times are in microseconds since the epoch."""

    number: int
    layout: str
    options: dict[str, Any]
    created: int
    sealed: int | None
    """The time at which the generation was sealed; None for the current one."""
    messages: int
    """The number of live messages."""
    live_bytes: int
    """The size of the live messages' values, in bytes. Deletes and compactions lower it by the bytes that they free."""
    missing: Mapping[int, str] = attrs.field(factory=dict)
    """The shards of a cluster that are not included, and for each the reason why no site that keeps it answered."""


def live_records(
    shards: Sequence[Shard], elsewhere: Iterable[Sequence[GenerationRecord]] = ()
) -> dict[int, list[GenerationRecord]]:
    """Return the generations that exist in all shards, oldest first, each with its record in every shard.

    Shards are left out if this site of a cluster doesn't keep them, or has no copy of them yet. ``elsewhere`` has the
    records of shards that other sites keep.
    """
    kept = [shard for shard in shards if not shard.writer.elsewhere and shard.generations.current]
    listed = chain((shard.generations.listed() for shard in kept), elsewhere)
    by_shard = [{record.number: record for record in records} for records in listed]
    everywhere = sorted(set.intersection(*map(set, by_shard))) if by_shard else []
    return {number: [records[number] for records in by_shard] for number in everywhere}


def all_live_records(
    storage: Storage,
) -> tuple[dict[int, list[GenerationRecord]], dict[int, ShardElsewhereError]]:
    """Return the records as `live_records`, with those of shards that only other sites of a cluster keep.

    Also return, by shard, why the records of others could not be read: no site that keeps the shard answers.
    """
    found, failed = list[list[GenerationRecord]](), dict[int, ShardElsewhereError]()
    for shard in storage.shards:
        if shard.writer.elsewhere:
            try:
                found.append([slab.record for slab in shard.reader.slabs(None).slabs])
            except ShardElsewhereError as error:
                failed[shard.number] = error
    # With all locks held, so that the shards list the same generations.
    return storage.locked(lambda: live_records(storage.shards, found)), failed


def generation_infos(storage: Storage) -> list[GenerationInfo]:
    """Return the live generations, oldest first.

    A site of a cluster reads the records of shards that it doesn't keep at other sites. A site that has no copy of any
    shard yet, because no owner has written one, returns the planned generations.
    """
    storage.check_open()
    live, failed = all_live_records(storage)
    missing = {shard: str(error) for shard, error in failed.items()}
    if not live and storage.site is not None:
        return _planned(storage.site.document.generations, storage.clock(), missing)
    return [
        GenerationInfo(
            number=number,
            layout=one.layout,
            options=options_dict(registry().full_options(one.layout, one.options)),
            created=min(record.created for record in records),
            sealed=None if one.sealed is None else max(record.sealed or 0 for record in records),
            messages=sum(record.messages for record in records),
            live_bytes=sum(record.live_bytes for record in records),
            missing=missing,
        )
        for number, records in live.items()
        for one in records[:1]
    ]


def _planned(plans: Sequence[GenerationPlan], now: int, missing: Mapping[int, str]) -> list[GenerationInfo]:
    """Return the generations that every shard of a cluster is to have, as created and sealed now, and empty."""
    return [
        GenerationInfo(
            number=plan.number,
            layout=plan.layout,
            options=options_dict(registry().full_options(plan.layout, plan.options)),
            created=now,
            sealed=None if plan.number == len(plans) else now,
            messages=0,
            live_bytes=0,
            missing=missing,
        )
        for plan in plans
        if not plan.dropped
    ]


def complete_generations(shards: Sequence[Shard], layout: str, options: Mapping[str, Any]) -> None:
    """Finish changes that were interrupted between shards. A new database gets a first generation of ``layout``."""
    newest = max(shards, key=lambda shard: shard.generations.current)
    if newest.generations.current == 0:
        newest.generations.add(layout, dict(options))
    wanted = {record.number: record for shard in shards for record in shard.generations.listed()}
    for shard in shards:
        for number in range(shard.generations.current + 1, newest.generations.current + 1):
            record = wanted.get(
                number, wanted[newest.generations.current]
            )  # a generation that was already dropped is added only so that numbers have no gap, and dropped below
            shard.generations.add(record.layout, record.options)
    live = live_records(shards)
    for shard in shards:
        for record in shard.generations.listed():
            if record.number not in live:
                shard.generations.drop(record.number)
        shard.generations.remove_dropped()
        shard.generations.reclaim_removed()


def add_generation(storage: Storage, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
    """Seal the current generation of every shard and add a new one; see `Database.add_generation`."""
    storage.check_may_write()
    storage.check_whole(storage.shards[:1])
    before: Sequence[GenerationRecord | GenerationPlan] = storage.shards[0].generations.listed()
    if storage.site is not None:
        before = storage.site.document.generations
    name = layout or before[-1].layout
    if options is None:
        options = next((record.options for record in reversed(before) if record.layout == name), {})
    storage.make_layout(name, options)
    if storage.site is not None:
        check_shared(name)
        return storage.site.add_generation(name, options)
    pending: list[PendingWrite] = []

    def add() -> int:
        number = min(shard.generations.current for shard in storage.shards) + 1
        for shard in storage.shards:
            one = shard.generations.adding(name, dict(options))
            shard.writer.prepare_locked(one)  # checks that all shards are writable, even those without a change
            if shard.generations.current < number:
                pending.append(one)
        submit_locked(pending)
        return number

    try:
        number = storage.locked(add)
    finally:
        finish_commits(pending)
    storage.flush()
    storage.ballast.keep(storage.shards)
    return number


def check_shared(layout: str) -> None:
    """Raise `UnsupportedError` for a layout that stores SQL rows, which other sites' backends may not support."""
    if "sql" in registry().layout(layout).requires:
        raise UnsupportedError(f"a database that is shared through a cluster can't have layout {layout!r}")


def drop_generation(storage: Storage, generation: int, *, remove: bool = True) -> bool:
    """Drop a sealed generation with all its messages; see `Database.drop_generation`.

    Without ``remove``, the generation only becomes invisible, which is quick. The caller must call `remove_dropped` and
    `reclaim_removed` later.
    """
    storage.check_may_write()
    if storage.site is not None:
        return storage.site.drop_generation(generation)
    pending: list[PendingWrite] = []

    def drop() -> None:
        for shard in storage.shards:
            one = shard.generations.pending_drop(DropGeneration(generation))
            shard.writer.prepare_locked(one)
            if shard.generations.check_droppable(generation):
                pending.append(one)
        submit_locked(pending)

    def drop_and_remove() -> None:
        try:
            storage.locked(drop)
        finally:
            if storage.listener is not None and any(one.number for one in pending):
                storage.listener.dropped()
            finish_commits(pending)
        storage.flush()
        for shard in storage.shards if remove else ():
            shard.generations.remove_dropped()
            shard.generations.reclaim_removed()

    storage.ballast.given_up(storage.shards, drop_and_remove)
    return bool(pending)


def remove_dropped(storage: Storage) -> None:
    """Remove the messages of dropped generations; `reclaim_removed` frees their disk space."""

    def remove() -> None:
        for shard in storage.shards:
            shard.generations.remove_dropped()

    storage.ballast.given_up(storage.shards, remove)


def reclaim_removed(storage: Storage) -> None:
    """Free the disk space of generations whose messages were removed. This may take long."""

    def reclaim() -> None:
        for shard in storage.shards:
            shard.generations.reclaim_removed()

    storage.ballast.given_up(storage.shards, reclaim)


def location_of(database: Path, target: Path) -> str:
    """Return the location of an export in the form in which a database stores it.

    An absolute path is unchanged; a relative path becomes relative to the database's directory.
    """
    return str(target) if target.is_absolute() else os.path.relpath(target.resolve(), database.resolve())


def archive_directory(database: Path, location: str) -> Path:
    """Return the directory of a stored location (see `location_of`)."""
    return (database / location).resolve()


def check_apart(database: Path, target: Path) -> None:
    """Raise `ManifestMismatchError` if an export would lie inside the database's directory, and be removed with it."""
    if target.resolve().is_relative_to(database.resolve()):
        raise ManifestMismatchError(f"{target} lies inside the database; an export needs a place of its own")
