"""The server's process: memory, CPU time, files; and which database it serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector as Standard
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import topicstore as ts

from .paced import Paced

__all__ = ["ProcessCollector"]


class ProcessCollector(Collector):
    """The figures that every client of Prometheus has, and a line about the database."""

    def __init__(self, db: ts.Database, site: str) -> None:
        standard = Standard(registry=None)
        self._found: Paced[Iterable[Metric]] = Paced(standard.collect)  # it lists all open files
        manifest = db.manifest
        self._about = {
            "version": ts.__version__,
            "backend": manifest.backend,
            "durability": manifest.durability,
            "database": manifest.id,
            "site": site,
        }

    def renew(self) -> None:
        """Find out what is dear to find out, if it is time."""
        self._found.renew()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._found.value()
        yield InfoMetricFamily("topicstore", "What serves which database.", value=self._about)
