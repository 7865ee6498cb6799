"""Metrics of a database's shards: operations, latencies, sizes and generations."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import topicstore as ts
from topicstore.contract.engine import EngineInfo
from topicstore.contract.errors import EngineError
from topicstore.contract.positions import time_of
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard

from .families import counter, gauge, histogram, summary
from .paced import Paced

__all__ = ["StoreCollector"]

_SHARD = ("shard",)
_GENERATION = ("shard", "generation", "layout")

_COUNTERS = {
    "batches": ("topicstore_stored_batches", "Batches committed."),
    "messages": ("topicstore_stored_messages", "Messages committed."),
    "payload_bytes": ("topicstore_stored_payload_bytes", "Bytes of their payloads."),
    "bytes": ("topicstore_written_bytes", "Bytes of the values written for them, indexes and state included."),
    "failed_batches": ("topicstore_failed_batches", "Batches that the shard refused or could not write or flush."),
    "read_messages": ("topicstore_read_messages", "Messages read."),
    "deleted": ("topicstore_deleted_messages", "Messages deleted."),
    "compacted": ("topicstore_compacted_messages", "Messages rewritten by compactions."),
    "state_writes": ("topicstore_state_writes", "Commits of state without messages, as those of sessions."),
}
"""Metric names and help texts, by attribute of `topicstore.shard.writer.ShardCounters`."""


class StoreCollector(Collector):
    """Collects the metrics of one database's shards."""

    def __init__(self, db: ts.Database) -> None:
        self._db = db
        self.engines: Paced[list[EngineInfo]] = Paced(self._look_at_engines)
        """The sizes that the engines report, by shard; empty while an engine can't be read."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shards = list(self._db.storage.shards)
        for attribute, (name, text) in _COUNTERS.items():
            yield counter(name, text, _SHARD, ((_of(one), getattr(one.writer.counters, attribute)) for one in shards))
        yield from _latencies(shards)
        now = self._db.storage.clock()
        yield gauge(
            "topicstore_watermark_age_seconds",
            "How long ago the newest visible message of a shard was stored.",
            _SHARD,
            ((_of(one), max(0, now - time_of(one.writer.watermark)) / 1e6) for one in shards if one.writer.watermark),
        )
        yield gauge(
            "topicstore_shard_writable",
            "1 if the shard takes writes, 0 since a write has failed.",
            _SHARD,
            ((_of(one), float(one.writer.failure is None)) for one in shards),
        )
        yield from _generations(shards)
        yield from self._sizes()

    def _sizes(self) -> Iterator[Metric]:
        engines = [((str(number),), info) for number, info in enumerate(self.engines.value())]
        yield gauge(
            "topicstore_disk_bytes", "Bytes of a shard's files.", _SHARD, ((of, one.disk_bytes) for of, one in engines)
        )
        yield gauge(
            "topicstore_engine_memory_bytes",
            "Memory that a shard's engine says it uses; shards may share a part of it.",
            _SHARD,
            ((of, one.memory_bytes) for of, one in engines),
        )
        free = self.disk_free()
        text = "Bytes that are free where the database is."
        yield gauge("topicstore_disk_free_bytes", text, (), [] if free is None else [((), free)])

    def _look_at_engines(self) -> list[EngineInfo]:
        """Return the sizes that the engines report; expensive, because engines inspect all files."""
        try:
            return [shard.writer.open_engine().info() for shard in self._db.storage.shards]
        except EngineError:  # `/health/ready` reports it
            return []

    def disk_free(self) -> int | None:
        """Return the free bytes of the database's disk; None for a database in memory, or if the disk is missing."""
        if "persistent" not in self._db.storage.capabilities:
            return None
        try:
            return shutil.disk_usage(self._db.path).free
        except OSError:  # `/health/ready` reports it
            return None


def _of(shard: Shard) -> tuple[str]:
    return (str(shard.number),)


def _latencies(shards: Sequence[Shard]) -> Iterator[Metric]:
    counted = [(one, one.writer.counters) for one in shards]
    yield histogram(
        "topicstore_store_seconds",
        "From a batch's arrival until it is as durable as promised, and visible.",
        _SHARD,
        ((_of(one), one.writer.latencies.store) for one in shards),
    )
    yield histogram(
        "topicstore_next_seconds",
        "Of reading the next messages of a stream.",
        _SHARD,
        ((_of(one), one.writer.latencies.read) for one in shards),
    )
    yield summary(
        "topicstore_commit_seconds",
        "Of writes by the engine.",
        _SHARD,
        ((_of(one), each.batches + each.state_writes, each.commit_seconds) for one, each in counted),
    )
    yield summary(
        "topicstore_flush_seconds",
        "Of flushes of the engine's log; one may serve many batches.",
        _SHARD,
        ((_of(one), each.flushes, each.flush_seconds) for one, each in counted),
    )


def _generations(shards: Sequence[Shard]) -> Iterator[Metric]:
    """Yield the metrics of generations. Reads without locks, so that writers and metrics don't block each other."""
    backlog: list[tuple[tuple[str], float]] = []
    messages: list[tuple[tuple[str, str, str], float]] = []
    sizes: list[tuple[tuple[str, str, str], float]] = []
    for shard in shards:
        waiting = 0
        for record, slab in shard.generations.with_slabs():
            count, size = _counts(shard, record)
            labels = (str(shard.number), str(record.number), record.layout)
            messages.append((labels, count))
            sizes.append((labels, size))
            waiting += slab.backlog(count)
        backlog.append((_of(shard), waiting))
    yield gauge("topicstore_backlog_messages", "Messages that wait to be merged by a compaction.", _SHARD, backlog)
    yield gauge("topicstore_generation_messages", "Messages of a generation.", _GENERATION, messages)
    text = "Bytes of the values written for a generation's messages; deletes don't lower it."
    yield gauge("topicstore_generation_bytes", text, _GENERATION, sizes)


def _counts(shard: Shard, record: GenerationRecord) -> tuple[int, int]:
    """Return the messages and bytes of a generation; the tail has those of the current generation."""
    counted = record if record.sealed is not None else shard.writer.tail
    return counted.messages, counted.live_bytes
