"""Metrics with the names of EMQX's durable storage, so that dashboards for EMQX can be used.

EMQX's labels are ``db``, ``shard`` and, for rolling averages in microseconds, ``interval``: ``current``, here the last
ten seconds, or ``last5m``. Here all metrics have the labels ``shard`` and ``site``. EMQX's counters have no ``_total``
in their names, which the text formats only allow for untyped samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import topicstore as ts
from topicstore.shard.shard import Shard

from .averages import Averages, Kind
from .families import gauge, unknown

__all__ = ["FieldNamesCollector"]

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
    """Collects the metrics of one database as EMQX's durable storage ``messages`` of a site."""

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
