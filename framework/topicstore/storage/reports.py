"""What `Database.info`, `Database.generations` and `Database.verify` answer."""

from __future__ import annotations

from typing import Any

import attrs

from topicstore.contract.layout import Damage, ReadCounters, SlabInfo
from topicstore.lifecycle.retention import RetentionSettings
from topicstore.shard.counters import ShardCounters

__all__ = ["CompactReport", "DatabaseInfo", "GenerationInfo", "ShardInfo", "VerifyReport"]


@attrs.frozen(kw_only=True)
class GenerationInfo:
    """One generation over all shards. Times are microseconds since the epoch."""

    number: int
    layout: str
    options: dict[str, Any]
    created: int
    sealed: int | None
    """None for the current generation."""
    messages: int
    """Live messages."""
    live_bytes: int
    """Bytes of the values written for them; deletes don't lower it, dropping does."""


@attrs.frozen(kw_only=True)
class ShardInfo:
    """One shard."""

    number: int
    watermark: int
    """Position."""
    last_position: int
    ahead: int
    """Microseconds by which the last position lies in the future."""
    lifted: int
    """Late messages that took the next position, since the database was created."""
    failure: str | None
    """Why the shard takes no writes."""
    disk_bytes: int
    memory_bytes: int
    counters: ShardCounters
    """Since the database was opened."""
    reads: dict[int, ReadCounters]
    """By generation, since the database was opened."""
    slabs: dict[int, SlabInfo]
    """What the layout says of each generation."""
    engine: dict[str, str | int]
    """What the engine says of itself."""


@attrs.frozen(kw_only=True)
class DatabaseInfo:
    """A database at one moment."""

    path: str
    id: str
    backend: str
    layout: str
    """Of the current generation."""
    durability: str
    timestamps: str
    plugins: tuple[str, ...]
    streams: int
    """Over all live generations."""
    messages: int
    live_bytes: int
    disk_bytes: int
    compaction_failure: str | None
    """Why background compaction has ended before the database was closed."""
    retention: RetentionSettings
    retention_failure: str | None
    """Why background retention failed the last time; None if it did not."""
    generations: list[GenerationInfo]
    shards: list[ShardInfo]

    @property
    def total(self) -> ShardCounters:
        """Return the shards' counters, added up."""
        rows = [attrs.astuple(shard.counters) for shard in self.shards]
        return ShardCounters(*(sum(column) for column in zip(*rows, strict=True)))


@attrs.frozen(kw_only=True)
class CompactReport:
    """What a compaction did."""

    messages: int
    """Rewritten; one that was merged twice counts twice."""
    live_bytes_before: int
    live_bytes_after: int
    disk_bytes_before: int
    disk_bytes_after: int
    seconds: float


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What a verification read, and what it found damaged."""

    messages: int
    """That are whole."""
    damages: list[Damage]

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not self.damages
