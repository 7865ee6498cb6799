"""Reports on a database: statistics of its shards, the structure that layouts learned, and damage."""

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
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard
from topicstore.shard.writer import ShardCounters

from .directory.manifest import MANIFEST, existing_manifest
from .storage import Storage

__all__ = ["ShardInfo", "VerifyReport", "learned_topics", "shard_info", "verify"]


@attrs.frozen(kw_only=True)
class ShardInfo:
    """The statistics of one shard."""

    number: int
    watermark: int
    """The highest position that readers may see."""
    last_position: int
    ahead: int
    """The number of microseconds by which the last position lies in the future."""
    lifted: int
    """The number of late messages that took the next free position, since the database was created."""
    failure: str | None
    """The reason why the shard takes no writes, or None."""
    disk_bytes: int
    memory_bytes: int
    counters: ShardCounters
    """The work done and the time spent since the database was opened."""
    reads: dict[int, ReadCounters]
    """The work done by reads, by generation, since the database was opened."""
    slabs: dict[int, SlabInfo]
    """The layout's statistics of each generation."""
    engine: dict[str, str | int]
    """The details that the engine reports."""


def shard_info(shard: Shard) -> ShardInfo:
    """Return the statistics of a shard: of this site's copy, or of another site's if this site keeps none.

    This is cheap: it reads no messages. Raises `ShardElsewhereError`.
    """
    if shard.elsewhere is not None:
        return shard.elsewhere.info(ShardInfo)
    if shard.writer.elsewhere:
        raise shard.writer.elsewhere_error()
    engine = shard.writer.open_engine().info()
    slabs = {record.number: slab for record, slab in shard.generations.with_slabs()}
    return ShardInfo(
        number=shard.number,
        watermark=shard.writer.watermark,
        last_position=shard.writer.tail.last_position,
        ahead=shard.writer.ahead(),
        lifted=shard.writer.tail.lifted,
        failure=shard.writer.failure,
        disk_bytes=engine.disk_bytes,
        memory_bytes=engine.memory_bytes,
        counters=shard.writer.counters,
        reads={number: slab.counters for number, slab in slabs.items()},
        slabs={number: slab.info() for number, slab in slabs.items()},
        engine=dict(engine.details),
    )


def learned_topics(storage: Storage, generation: int | None) -> dict[tuple[int, int], list[TopicNode]]:
    """Return the structure that layouts learned from topics; see `Database.learned_topics`."""
    storage.check_open()
    found = {
        (shard.number, record.number): list(slab.learned())
        for shard in storage.shards
        for record, slab in shard.generations.with_slabs()
        if generation in (None, record.number)
    }
    return {place: nodes for place, nodes in found.items() if nodes}


@attrs.frozen(kw_only=True)
class VerifyReport:
    """The result of a verification."""

    messages: int
    """The number of undamaged messages, without those of queues."""
    damages: list[Damage]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


def verify(storage: Storage, decoders: Decoders, progress: Callable[[int], None] | None = None) -> VerifyReport:
    """Read everything, and report the damage; see `Database.verify`.

    ``decoders`` are the decoders of the framework's state records.
    """
    storage.check_open()
    messages, damages = 0, list(_damaged_manifest(storage))
    for shard in storage.shards:
        for found in shard.rewriter.verify(decoders):
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
