"""Metrics of MQTT clients, their packets and bytes, and the memory that they occupy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from topicstore.server.memory_budget import MemoryBudget
from topicstore.server.packet_counts import PacketCounts
from topicstore.server.sys_topics import Traffic

from .families import counter, gauge

__all__ = ["HasTraffic", "MqttCollector"]

_PACKET = ("type", "reason")


class HasTraffic(Protocol):
    """The part of the MQTT server that the metrics read."""

    @property
    def traffic(self) -> Traffic:
        """Counters of the server's packets and bytes."""

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """The budgets of memory that clients occupy, by purpose."""


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
        yield _packets("received", "Packets that clients have sent, by type and reason code.", traffic.received)
        yield _packets("sent", "Packets that clients were sent, by type and reason code.", traffic.sent)


def _packets(way: str, text: str, counts: PacketCounts) -> Metric:
    rows = [((kind, f"0x{reason:02x}"), packets) for kind, reason, packets in counts.rows()]
    return counter(f"topicstore_mqtt_{way}_packets", text, _PACKET, rows)
