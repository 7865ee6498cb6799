"""`Metrics`: all collectors of one server, and the text that Prometheus reads."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition

import topicstore as ts

from .averages import Averages
from .field_names import FieldNamesCollector
from .mqtt import HasTraffic, MqttCollector
from .process import ProcessCollector
from .recent import Recent
from .session_lag import SessionLag
from .sessions import SessionsCollector
from .store import StoreCollector

__all__ = ["Metrics"]

_OPENMETRICS = "application/openmetrics-text"
_PLAIN = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4.removesuffix("; charset=utf-8")  # which the response adds itself


class Metrics:
    """What is told of one server, from `start` to `stop`. May be used in any thread."""

    def __init__(self, db: ts.Database, server: HasTraffic, *, site: str) -> None:
        """``site``: the id of the site, as `topicstore ds info` shows it."""
        averages, lag = Averages(db.storage.shards), SessionLag(db)
        store, sessions = StoreCollector(db), SessionsCollector(db, lag)
        self._db = db
        process = ProcessCollector(db, site)
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in (FieldNamesCollector(db, site, averages), store, sessions, MqttCollector(server), process):
            self.registry.register(collector)

        def renew() -> None:
            averages.sample()
            for one in (store.engines, sessions, process):
                one.renew()

        self.recent = Recent(db, server, store=store, sessions=sessions, lag=lag, renew=renew)

    def start(self) -> None:
        """Begin to take the samples of `recent`."""
        self.recent.start()

    def stop(self) -> None:
        """Take no more."""
        self.recent.stop()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that is accepted, and its media type.

        That is OpenMetrics 1.0 if ``accept``, the header of a request, names it, otherwise Prometheus's own text
        format. Raises `DatabaseClosedError`.
        """
        self._db.storage.check_open()
        if _OPENMETRICS in accept:
            text: bytes = exposition.generate_latest(self.registry)  # type: ignore[no-untyped-call] # it has no types
            return text, exposition.CONTENT_TYPE_LATEST
        return prometheus_client.generate_latest(self.registry), _PLAIN
