"""The result of `Database.info`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from .lifecycle.retention import Retention
from .lifecycle.retention_policy import RetentionSettings
from .shard.counters import ShardCounters
from .storage.compaction import CompactionScheduler
from .storage.counting import CountingScheduler
from .storage.generations import GenerationInfo, generation_infos
from .storage.reports import ShardInfo, shard_info
from .storage.storage import Storage

if TYPE_CHECKING:
    from .pubsub.hub import Hub
    from .pubsub.retained_expiry import RetainedExpiry

__all__ = ["DatabaseInfo", "database_info"]


@attrs.frozen(kw_only=True)
class DatabaseInfo:
    """Figures of a database at one moment."""

    path: str
    id: str
    backend: str
    layout: str
    """Name of the current generation's layout."""
    durability: str
    timestamps: str
    plugins: tuple[str, ...]
    streams: int
    """Number of streams in all live generations."""
    messages: int
    live_bytes: int
    disk_bytes: int
    compaction_failure: str | None
    """Why background compaction failed the last time; None if it did not."""
    counting_failure: str | None
    """Why counting in the background failed the last time; None if it did not."""
    visibility_failure: str | None
    """Why waiting for stored messages to become visible failed the last time; None if it did not."""
    retained_failure: str | None
    """Why removing expired retained messages failed the last time; None if it did not."""
    ballast_failure: str | None
    """Why no disk space could be reserved for the case of a full disk; None if it could, or none is needed."""
    notes_failure: str | None
    """Why it could not be noted what is on disk, so that a loss might go unnoticed; None if it could."""
    retention: RetentionSettings
    retention_failure: str | None
    """Why background retention failed the last time; None if it did not."""
    clock_ahead: float
    """Seconds by which the clock has jumped ahead since the opening; retention doesn't count them as passed."""
    generations: list[GenerationInfo]
    shards: list[ShardInfo]

    @property
    def total(self) -> ShardCounters:
        """Return the shards' counters, added up."""
        rows = [attrs.astuple(shard.counters) for shard in self.shards]
        return ShardCounters(*(sum(column) for column in zip(*rows, strict=True)))


def database_info(
    storage: Storage,
    retention: Retention,
    compaction: CompactionScheduler | None,
    counting: CountingScheduler | None,
    expiry: RetainedExpiry,
    hub: Hub | None,
) -> DatabaseInfo:
    """Return the figures of a database. Cheap: reads no messages."""
    generations, manifest = generation_infos(storage), storage.manifest
    shards = [shard_info(shard) for shard in storage.shards]
    return DatabaseInfo(
        path=str(storage.path),
        id=manifest.id,
        backend=manifest.backend,
        layout=generations[-1].layout,
        durability=manifest.durability,
        timestamps=manifest.timestamps,
        plugins=storage.plugins,
        streams=sum(slab.streams for shard in shards for slab in shard.slabs.values()),
        messages=sum(generation.messages for generation in generations),
        live_bytes=sum(generation.live_bytes for generation in generations),
        disk_bytes=sum(shard.disk_bytes for shard in shards),
        compaction_failure=None if compaction is None else compaction.task.failure,
        counting_failure=None if counting is None else counting.task.failure,
        visibility_failure=None if hub is None else hub.reads.failure,
        retained_failure=expiry.task.failure,
        ballast_failure=storage.ballast.failure,
        notes_failure=None if storage.notes is None else storage.notes.failure,
        retention=retention.settings,
        retention_failure=retention.failure,
        clock_ahead=retention.clock_ahead,
        generations=generations,
        shards=shards,
    )
