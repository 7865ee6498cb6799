"""`$SYS/#`: figures of the server that clients may subscribe to. They are stored nowhere, and ``#`` doesn't match them.

A client that subscribes is sent all figures at once, as it would be sent retained messages; from then on those that
have changed come every `ServerSettings.sys_interval` seconds, at QoS 0. The topics are those that other brokers have,
where they have them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.sessions import Publish, SessionCounts

from .packet_counts import PacketCounts
from .packet_types import PUBLISH

__all__ = ["SYS", "Figures", "Traffic", "is_sys_filter"]

SYS = "$SYS/"


def is_sys_filter(text: str) -> bool:
    """Return whether a filter asks for figures, and can match nothing else."""
    return text.startswith(SYS) or text == "$SYS"


@attrs.define
class Traffic:
    """What has gone through a server since it started. Counted in the event loop."""

    connections: int = 0
    """Connections that were accepted, whatever became of them."""
    connected: int = 0
    """Clients that are connected now."""
    most_connected: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    received: PacketCounts = attrs.field(factory=PacketCounts)
    """The packets that came; those that could not be taken as ``invalid``, with the reason why the connection ended."""
    sent: PacketCounts = attrs.field(factory=PacketCounts)
    """The packets that were sent. A SUBACK or UNSUBACK counts with the worst of its reason codes."""
    publishes_refused: int = 0

    def connect(self) -> None:
        """Count a client that has connected."""
        self.connected += 1
        self.most_connected = max(self.most_connected, self.connected)


class Figures:
    """The figures of one server, by topic."""

    def __init__(self, traffic: Traffic, version: str) -> None:
        self._traffic = traffic
        self._version = f"topicstore {version}"
        self._started = time.monotonic()
        self._told: dict[str, str] = {}

    def _now(self, counts: SessionCounts) -> Mapping[str, str]:
        traffic = self._traffic
        figures: dict[str, object] = {
            "version": self._version,
            "uptime": f"{int(time.monotonic() - self._started)} seconds",
            "clients/connected": traffic.connected,
            "clients/maximum": traffic.most_connected,
            "connections/total": traffic.connections,
            "subscriptions/count": counts.subscriptions,
            "messages/inflight": counts.in_flight,
            "messages/awaiting_pubrel": counts.awaiting_pubrel,
            "clients/paused": counts.paused,
            "messages/received": traffic.received.total,
            "messages/sent": traffic.sent.total,
            "publish/messages/received": traffic.received.good[PUBLISH],
            "publish/messages/sent": traffic.sent.good[PUBLISH],
            "publish/messages/refused": traffic.publishes_refused,
            "bytes/received": traffic.bytes_received,
            "bytes/sent": traffic.bytes_sent,
        }
        return {f"{SYS}broker/{name}": str(value) for name, value in figures.items()}

    def changed(self, counts: SessionCounts) -> list[Message]:
        """Return those that have changed since the last call, to be published."""
        now = self._now(counts)
        changed = [Message(topic, value.encode()) for topic, value in now.items() if self._told.get(topic) != value]
        self._told = dict(now)
        return changed

    def matching(self, filters: Sequence[str], counts: Callable[[], SessionCounts]) -> list[Publish]:
        """Return what a client that has just made subscriptions is sent: the figures as they are now.

        counts: returns the counts of the connected sessions; called only if it asked for figures.
        """
        parsed = [TopicFilter(text) for text in filters if is_sys_filter(text)]
        if not parsed:
            return []
        return [
            Publish(0, Message(topic, value.encode()), 0, retain=True)
            for topic, value in self._now(counts()).items()
            if any(one.matches(topic) for one in parsed)
        ]
