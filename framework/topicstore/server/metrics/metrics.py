"""`Metrics`: all collectors of one server, and their text for Prometheus."""

from __future__ import annotations

from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition

import topicstore as ts

from .collectors import (
    Averages,
    ClusterCollector,
    FieldNamesCollector,
    HasTraffic,
    MqttCollector,
    ProcessCollector,
    SessionsCollector,
    StoreCollector,
)
from .paced import SessionLag
from .recent import Recent

__all__ = ["Metrics"]

_OPENMETRICS = "application/openmetrics-text"
_PLAIN = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4.removesuffix("; charset=utf-8")  # Litestar adds the charset


class _Renewed(Protocol):
    """A value that is computed about once a second, or less often."""

    def renew(self) -> None:
        """Compute the value again if that is due."""


class Metrics:
    """All metrics of one server. Thread-safe."""

    def __init__(self, db: ts.Database, server: HasTraffic, *, site: str) -> None:
        """``site`` is the id of the site, as in `topicstore ds info`."""
        averages, lag = Averages(db.storage.shards), SessionLag(db)
        store, sessions = StoreCollector(db), SessionsCollector(db, lag)
        self._db = db
        process = ProcessCollector(db, site)
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (FieldNamesCollector(db, site, averages), store, sessions, MqttCollector(server), process):
            self.registry.register(collector)
        paced: list[_Renewed] = [store.engines, sessions, process]
        if db.cluster is not None:
            cluster = ClusterCollector(db.cluster)
            self.registry.register(cluster)
            paced.append(cluster)

        def renew() -> None:
            averages.sample()
            for one in paced:
                one.renew()

        self.recent = Recent(db, server, store=store, sessions=sessions, lag=lag, renew=renew)

    def start(self) -> None:
        """Begin to take samples for `recent`."""
        self.recent.start()

    def stop(self) -> None:
        """Stop taking samples."""
        self.recent.stop()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in an accepted text format, and its media type.

        The format is OpenMetrics 1.0 if ``accept``, a request's header, names it, else Prometheus' text format. Raises
        `DatabaseClosedError`.
        """
        self._db.storage.check_open()
        if _OPENMETRICS in accept:
            text: bytes = exposition.generate_latest(self.registry)  # type: ignore[no-untyped-call] # untyped
            return text, exposition.CONTENT_TYPE_LATEST
        return prometheus_client.generate_latest(self.registry), _PLAIN
