"""The metrics of shards, sessions, queues, clients, process and site of a cluster, as Prometheus metric families.

Averages of latencies of stores, commits and reads are over the last seconds and minutes, by shard. Sessions have no
time series of their own: their numbers and their total lag are exported.

Metrics of the durable storage also have the names of EMQX, so that dashboards for EMQX can be used. EMQX's labels are
``db``, ``shard`` and, for rolling averages in microseconds, ``interval``: ``current``, here the last ten seconds, or
``last5m``. Here all metrics have the labels ``shard`` and ``site``. EMQX's counters have no ``_total`` in their names,
which the text formats only allow for untyped samples.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol

from prometheus_client import ProcessCollector as Standard
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

import topicstore as ts
from topicstore.contract.engine import EngineInfo
from topicstore.contract.errors import EngineError, RecoverableError
from topicstore.contract.positions import time_of
from topicstore.queues.queue import QueueInfo
from topicstore.server.mqtt.sys_topics import PacketCounts, Traffic
from topicstore.server.resource_limits import MemoryBudget
from topicstore.sessions import SessionCounts
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.writer import BOUNDS, Latencies

from .paced import Paced, SessionLag

if TYPE_CHECKING:  # at run time only a site of a cluster imports the module
    from topicstore.replication.site import ReplicaLag, Site

__all__ = [
    "INTERVALS",
    "Averages",
    "ClusterCollector",
    "FieldNamesCollector",
    "HasTraffic",
    "Kind",
    "MqttCollector",
    "ProcessCollector",
    "Rows",
    "SessionsCollector",
    "StoreCollector",
    "counter",
    "gauge",
    "histogram",
    "summary",
    "unknown",
]

INTERVALS = {"current": 10.0, "last5m": 300.0}
"""The lengths of the intervals in seconds, by name."""

Kind = Literal["store", "commit", "read"]
_KINDS: tuple[Kind, ...] = ("store", "commit", "read")
_Totals = tuple[tuple[tuple[int, float], ...], ...]
"""By kind and shard, the number of operations, and their total duration in seconds."""
_SHARD = ("shard",)
_KIND = ("kind",)


class Averages:
    """Rolling averages, computed from samples of totals over the last five minutes. Thread-safe."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        """Guards the samples."""
        self._samples: deque[tuple[float, _Totals]] = deque()
        """Times and totals; all samples but the first are within the longest interval."""
        self.sample()

    def sample(self) -> None:
        """Take a sample of the current totals. To be called about once a second."""
        now, totals = time.monotonic(), self._totals()
        with self._lock:
            self._samples.append((now, totals))
            while len(self._samples) > 1 and self._samples[1][0] <= now - max(INTERVALS.values()):
                self._samples.popleft()

    def microseconds(self, kind: Kind) -> dict[tuple[int, str], float]:
        """Return averages by shard and interval, in microseconds; 0 without operations."""
        now, place, totals = time.monotonic(), _KINDS.index(kind), self._totals()[_KINDS.index(kind)]
        with self._lock:
            samples = list(self._samples)
        found = {}
        for interval, seconds in INTERVALS.items():
            before = next((old for at, old in reversed(samples) if at <= now - seconds), samples[0][1])[place]
            for shard, ((times, took), (times_before, took_before)) in enumerate(zip(totals, before, strict=True)):
                done = times - times_before
                found[shard, interval] = (took - took_before) / done * 1e6 if done else 0.0
        return found

    def _totals(self) -> _Totals:
        counters = [(shard.writer.counters, shard.writer.latencies) for shard in self._shards]
        return (
            tuple((sum(latencies.store.counts), latencies.store.seconds) for _, latencies in counters),
            tuple((one.batches + one.state_writes, one.commit_seconds) for one, _ in counters),
            tuple((one.reads, one.read_seconds) for one, _ in counters),
        )


Rows = Iterable[tuple[Sequence[str], float]]
"""Samples: the values of the labels, and the sample's value."""

_EDGES = [*map(repr, BOUNDS), "+Inf"]


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return a counter, whose sample's name ends in ``_total``."""
    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return a gauge."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def unknown(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return an untyped metric, whose sample has exactly this name, without a counter's ``_total``."""
    return _filled(UnknownMetricFamily(name, text, labels=labels), rows)


def summary(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int, float]]) -> Metric:
    """Return a summary: the number of operations (``_count``) and their total seconds (``_sum``)."""
    family = SummaryMetricFamily(name, text, labels=labels)
    for values, times, seconds in rows:
        family.add_metric(values, times, seconds)
    return family


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Latencies]]) -> Metric:
    """Return a histogram of durations."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, latencies in rows:
        family.add_metric(values, list(zip(_EDGES, accumulate(latencies.counts), strict=True)), latencies.seconds)
    return family


def _filled(family: CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily, rows: Rows) -> Metric:
    for values, value in rows:
        family.add_metric(values, value)
    return family


_LABELS = ("db", "shard", "site")
_AVERAGED = (*_LABELS, "interval")
_DS = "messages"
_LAYOUT = "wildcard_optimized"
_ROLLING: dict[Kind, tuple[str, str]] = {
    "store": ("emqx_ds_egress_flush_time", "Rolling average, in microseconds, of storing a batch durably."),
    "commit": ("emqx_ds_store_batch_time", "Rolling average, in microseconds, of the engine's write of a batch."),
    "read": ("emqx_ds_builtin_next_time", "Rolling average, in microseconds, of reading a batch."),
}


class FieldNamesCollector(Collector):
    """Collects the metrics of one database under EMQX's names, as those of a durable storage called ``messages``."""

    def __init__(self, db: ts.Database, site: str, averages: Averages) -> None:
        self._db, self._site, self._averages = db, site, averages

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shards = list(self._db.storage.shards)
        for name, text, values in (
            ("batches", "Batches written.", [one.writer.counters.batches for one in shards]),
            ("messages", "Messages written.", [one.writer.counters.messages for one in shards]),
            ("bytes", "Bytes of their payloads.", [one.writer.counters.payload_bytes for one in shards]),
            (
                "batches_failed",
                "Batches that failed, for any reason.",
                [one.writer.counters.failed_batches for one in shards],
            ),
        ):
            yield unknown(f"emqx_ds_egress_{name}", text, _LABELS, zip(self._shards(shards), values, strict=True))
        yield from self._rolling()
        counts = [_walked(shard) for shard in shards]
        for place, (name, text) in enumerate(
            (
                ("seek", f"Seeks of {_LAYOUT}."),
                ("next", f"Keys that {_LAYOUT} went on to without a seek; they should grow faster than the seeks."),
            )
        ):
            rows = zip(self._shards(shards), [count[place] for count in counts], strict=True)
            yield unknown(f"emqx_ds_storage_bitfield_lts_counter_{name}", text, _LABELS, rows)

    def _rolling(self) -> Iterator[Metric]:
        for kind, (name, text) in _ROLLING.items():
            found = self._averages.microseconds(kind)
            rows = [
                ((_DS, str(shard), self._site, interval), value) for (shard, interval), value in sorted(found.items())
            ]
            yield gauge(name, text, _AVERAGED, rows)

    def _shards(self, shards: Sequence[Shard]) -> list[tuple[str, str, str]]:
        return [(_DS, str(one.number), self._site) for one in shards]


def _walked(shard: Shard) -> tuple[int, int]:
    """Return the number of seeks, and the number of keys that were read by iteration."""
    counters = [slab.counters for record, slab in shard.generations.with_slabs() if record.layout == _LAYOUT]
    return sum(one.seeks for one in counters), sum(one.visited + one.skipped for one in counters)


_PACKET = ("type", "reason")


class HasTraffic(Protocol):
    """The part of the MQTT server that the metrics read."""

    @property
    def traffic(self) -> Traffic:
        """Counters of the server's packets and bytes."""

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """The budgets of memory that clients occupy, by purpose."""

    @property
    def certificate_ends(self) -> Mapping[str, datetime]:
        """The end of validity of the certificates in use, by section of the settings."""


class MqttCollector(Collector):
    """Collects the metrics of one server's connections."""

    def __init__(self, server: HasTraffic) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        traffic = self._server.traffic
        yield gauge("topicstore_mqtt_clients", "Clients that are connected.", (), [((), traffic.connected)])
        for name, text, value in (
            ("connections", "Connections that were accepted, whatever became of them.", traffic.connections),
            ("received_bytes", "Bytes that clients have sent.", traffic.bytes_received),
            ("sent_bytes", "Bytes that clients were sent.", traffic.bytes_sent),
            ("publishes_refused", "Publishes that were refused.", traffic.publishes_refused),
        ):
            yield counter(f"topicstore_mqtt_{name}", text, (), [((), value)])
        budgets = self._server.budgets.items()
        text = "Bytes that are held for clients: packets that aren't whole, and what HTTP keeps for them."
        yield gauge("topicstore_held_bytes", text, ("of",), [((name,), one.held) for name, one in budgets])
        text = "Connections that were ended, or requests refused, because too much was held or a client was too slow."
        yield counter("topicstore_broken_off", text, ("of",), [((name,), one.broken_off) for name, one in budgets])
        text = "The time, since 1970, until which a certificate is valid, by the section of the settings that names it."
        ends = [((section,), end.timestamp()) for section, end in self._server.certificate_ends.items()]
        yield gauge("topicstore_certificate_end_timestamp_seconds", text, ("section",), ends)
        yield _packets("received", "Packets that clients have sent, by type and reason code.", traffic.received)
        yield _packets("sent", "Packets that clients were sent, by type and reason code.", traffic.sent)


def _packets(way: str, text: str, counts: PacketCounts) -> Metric:
    rows = [((kind, f"0x{reason:02x}"), packets) for kind, reason, packets in counts.rows()]
    return counter(f"topicstore_mqtt_{way}_packets", text, _PACKET, rows)


class ProcessCollector(Collector):
    """Collects Prometheus' standard process metrics, and an info metric of the database."""

    def __init__(self, db: ts.Database, site: str) -> None:
        standard = Standard(registry=None)
        self._found: Paced[Iterable[Metric]] = Paced(standard.collect)  # expensive: it lists all open files
        manifest = db.manifest
        self._about = {
            "version": ts.__version__,
            "backend": manifest.backend,
            "durability": manifest.durability,
            "database": manifest.id,
            "site": site,
        }

    def renew(self) -> None:
        """Compute the expensive values that are due."""
        self._found.renew()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield from self._found.value()
        yield InfoMetricFamily("topicstore", "What serves which database.", value=self._about)


_QUEUE = ("queue",)


class SessionsCollector(Collector):
    """Collects the metrics of one database's sessions and open queues."""

    def __init__(self, db: ts.Database, lag: SessionLag) -> None:
        self._lag = lag
        self.number: Paced[int] = Paced(lambda: len(db.sessions.clients()))
        """Number of sessions, connected or not."""
        self.counts: Paced[SessionCounts] = Paced(lambda: db.sessions.counts())
        """Counts of the connected sessions."""
        self._queues: Paced[list[QueueInfo]] = Paced(lambda: db.queues.opened())

    def renew(self) -> None:
        """Compute the expensive values that are due. Raises `DatabaseClosedError`."""
        for one in (self.number, self.counts, self._queues, self._lag):
            one.renew()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        number, counts = self.number.value(), self.counts.value()
        for name, text, value in (
            ("topicstore_sessions", "Sessions, connected or not.", number),
            ("topicstore_connected_sessions", "Sessions whose clients are connected.", counts.connected),
            ("topicstore_paused_sessions", "Connected sessions whose clients read too slowly.", counts.paused),
            ("topicstore_subscriptions", "Subscriptions of connected sessions.", counts.subscriptions),
            (
                "topicstore_in_flight_messages",
                "Messages that were sent, or are to be sent again, and not acknowledged.",
                counts.in_flight,
            ),
            (
                "topicstore_awaiting_pubrel_messages",
                "Messages of QoS 2 that came, and wait for their PUBREL.",
                counts.awaiting_pubrel,
            ),
        ):
            yield gauge(name, text, (), [((), value)])
        yield counter(
            "topicstore_dropped_qos0_messages",
            "Messages of QoS 0 that were dropped because their client read too slowly.",
            (),
            [((), counts.missed)],
        )
        yield counter(
            "topicstore_dropped_queued_messages",
            "Messages that were dropped for one session because too many waited for it.",
            (),
            [((), counts.skipped.messages)],
        )
        yield from self._lags()
        yield from self._depths()
        yield gauge(
            "topicstore_session_counts_age_seconds",
            "How old the counts of sessions are, the oldest of them.",
            (),
            [((), max(self.number.age, self.counts.age))],
        )

    def _lags(self) -> Iterator[Metric]:
        totals, age = self._lag.totals()
        for name, text, value in (
            ("messages", "Stored messages that are still to be delivered to all sessions together.", totals.messages),
            ("max_messages", "The same, of the session that has most.", totals.most_messages),
            (
                "max_seconds",
                "How much older than the newest message the next one of the session furthest behind is.",
                totals.most_seconds,
            ),
            ("sessions", "Sessions that are behind.", totals.lagging),
            ("unknown_sessions", "Sessions of which it could not be found out.", totals.unknown),
            ("age_seconds", "The age of the other lag metrics in seconds: the time since their counting began.", age),
        ):
            yield gauge(f"topicstore_session_lag_{name}", text, (), [((), value)])

    def _depths(self) -> Iterator[Metric]:
        queues = self._queues.value()
        text = "Messages of an open queue that are not committed."
        yield gauge("topicstore_queue_messages", text, _QUEUE, (((one.name,), one.messages) for one in queues))
        yield gauge("topicstore_queue_bytes", "Their bytes.", _QUEUE, (((one.name,), one.bytes) for one in queues))
        text = "Messages that found no room in a queue, or were removed to make room, since it was made."
        yield counter("topicstore_queue_dropped_messages", text, _QUEUE, (((one.name,), one.dropped) for one in queues))


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
        except EngineError:  # `/health/ready` reports the error
            return []

    def disk_free(self) -> int | None:
        """Return the free bytes of the database's disk; None for a database in memory, or if the disk is missing."""
        if "persistent" not in self._db.storage.capabilities:
            return None
        try:
            return shutil.disk_usage(self._db.path).free
        except OSError:  # `/health/ready` reports the error
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


class ClusterCollector(Collector):
    """Collects the metrics of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lags = Paced(self._find_lags)
        """The entries by which replicas lag, read from the log store."""
        self._known: list[ReplicaLag] = []

    def _find_lags(self) -> list[ReplicaLag]:
        with suppress(RecoverableError):  # the site logs the error; the last values stay
            self._known = self._site.lag()
        return self._known

    def renew(self) -> None:
        """Read the replicas' lag again if that is due."""
        self._lags.renew()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        replicas, now = [one for one in self._site.replicas if one.kept], time.monotonic()
        text = "Seconds since a replica last had all entries of its log; 0 for the owner."
        seconds = [0.0 if one.owned else now - one.caught_up for one in replicas]
        labels = [(str(one.shard.number),) for one in replicas]
        yield gauge("topicstore_replica_lag_seconds", text, _SHARD, zip(labels, seconds, strict=True))
        text = "Entries of the log that the owner has applied, and this replica has not."
        lags = [((str(one.shard),), one.entries) for one in self._lags.value()]
        yield gauge("topicstore_replica_lag_entries", text, _SHARD, lags)
        text = "Whether this site owns the shard: 1 or 0."
        yield gauge("topicstore_shard_owned", text, _SHARD, zip(labels, [one.owned for one in replicas], strict=True))
        text = "Whether this site's replica takes no writes, because one has failed: 1 or 0."
        yield gauge(
            "topicstore_replica_failed", text, _SHARD, zip(labels, [one.failed for one in replicas], strict=True)
        )
        text = "Times that this site has become the owner of the shard."
        taken = [one.log.takeovers for one in replicas]
        yield counter("topicstore_takeovers", text, _SHARD, zip(labels, taken, strict=True))
        text = "Entries that this site could not write, because another site had become the owner."
        fenced = [one.log.fenced for one in replicas]
        yield counter("topicstore_fenced_writes", text, _SHARD, zip(labels, fenced, strict=True))
        store = self._site.store
        text = "Of requests to the log store, by kind: put, get, list, delete."
        rows = [((kind,), latencies) for kind, latencies in store.latencies.items()]
        yield histogram("topicstore_log_store_seconds", text, _KIND, rows)
        text = "Requests to the log store that had no conclusive answer."
        failed = [((kind,), number) for kind, number in store.failed.items()]
        yield counter("topicstore_log_store_failures", text, _KIND, failed)
