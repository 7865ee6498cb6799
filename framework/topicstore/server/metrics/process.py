"""Metrics of the server's process (memory, CPU time, files), and an info metric of its database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector as Standard
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import topicstore as ts

from .paced import Paced

__all__ = ["ProcessCollector"]


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
