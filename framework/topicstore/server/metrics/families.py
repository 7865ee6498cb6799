"""Short constructors of Prometheus metric families: name, help text, labels and samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
    UnknownMetricFamily,
)

from topicstore.shard.writer import BOUNDS, Latencies

__all__ = ["Rows", "counter", "gauge", "histogram", "summary", "unknown"]

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
