"""What can be told of a database: its shards in numbers, what layouts learned, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from topicstore.contract.errors import (
    CorruptionError,
    DatabaseNotFoundError,
    NewerFormatError,
    NotADatabaseError,
)
from topicstore.contract.layout import Damage, ReadCounters, SlabInfo, TopicNode
from topicstore.shard.counters import ShardCounters
from topicstore.shard.shard import Shard

from .manifest import MANIFEST, existing_manifest
from .storage import Storage

__all__ = ["ShardInfo", "VerifyReport", "learned_topics", "shard_info", "verify"]


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


def shard_info(shard: Shard) -> ShardInfo:
    """Return a shard in numbers. Cheap: reads no messages."""
    stats = shard.engine().stats()
    slabs = {record.number: slab for record, slab in shard.slabs()}
    return ShardInfo(
        number=shard.number,
        watermark=shard.watermark,
        last_position=shard.last_position,
        ahead=shard.ahead(),
        lifted=shard.lifted,
        failure=shard.failure,
        disk_bytes=stats.disk_bytes,
        memory_bytes=stats.memory_bytes,
        counters=shard.counters,
        reads={number: slab.counters for number, slab in slabs.items()},
        slabs={number: slab.info() for number, slab in slabs.items()},
        engine=dict(stats.details),
    )


def learned_topics(storage: Storage, generation: int | None) -> dict[tuple[int, int], list[TopicNode]]:
    """Return what layouts learned of the topics' structure; see `Database.topics`."""
    storage.check_open()
    found = {
        (shard.number, record.number): list(slab.learned())
        for shard in storage.shards
        for record, slab in shard.slabs()
        if generation in (None, record.number)
    }
    return {place: nodes for place, nodes in found.items() if nodes}


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What a verification read, and what it found damaged."""

    messages: int
    """That are whole; those of queues are not counted."""
    damages: list[Damage]

    @property
    def ok(self) -> bool:
        """True if nothing is damaged."""
        return not self.damages


def verify(storage: Storage, progress: Callable[[int], None] | None) -> VerifyReport:
    """Read everything, and say what is damaged; see `Database.verify`."""
    storage.check_open()
    messages, damages = 0, list(_damaged_manifest(storage))
    for shard in storage.shards:
        for found in shard.verify():
            if isinstance(found, Damage):
                damages.append(found)
            else:
                messages += found
                if progress is not None:
                    progress(messages)
    return VerifyReport(messages=messages, damages=damages)


def _damaged_manifest(storage: Storage) -> Iterator[Damage]:
    if "persistent" in storage.capabilities:
        try:
            existing_manifest(storage.path)
        except (CorruptionError, DatabaseNotFoundError, NewerFormatError, NotADatabaseError) as bad:
            yield Damage(place=str(storage.path / MANIFEST), reason=str(bad))
