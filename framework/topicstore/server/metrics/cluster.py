"""The metrics of a server as a site of a cluster: its replicas, take-overs, and requests to the log store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from topicstore.contract.errors import RecoverableError
from topicstore.replication.site import ReplicaLag, Site

from .collectors import counter, gauge, histogram
from .paced import Paced

__all__ = ["ClusterCollector"]

_SHARD = ("shard",)
_KIND = ("kind",)


class ClusterCollector(Collector):
    """Collects the metrics of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lags = Paced(self._find_lags)
        """The entries that replicas are behind, for which the log store is asked."""
        self._known: list[ReplicaLag] = []

    def _find_lags(self) -> list[ReplicaLag]:
        with suppress(RecoverableError):  # the log reports it, and the last values stay
            self._known = self._site.lag()
        return self._known

    def renew(self) -> None:
        """Ask for the replicas' lag again if that is due."""
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
