"""``$SYS/#``: statistics of the server as messages, which are not stored and not matched by the filter ``#``.

A new subscriber receives all statistics at once, like retained messages. Afterwards it receives changed values every
`ProtocolSettings.sys_interval` seconds, at QoS 0. Where other brokers publish the same value, the topic is the same.
Packets are counted in each direction, by type and reason code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.server.codec.packets import CONNECT, NAMES, PUBLISH
from topicstore.sessions import Publish, SessionCounts

__all__ = [
    "SYS",
    "Figures",
    "LoadAverages",
    "PacketCounts",
    "Traffic",
    "is_sys_filter",
]


class PacketCounts:
    """Numbers of packets by type and reason code. The event loop counts them; any thread may read them."""

    __slots__ = ("_others", "good")

    def __init__(self) -> None:
        self.good = [0] * len(NAMES)
        """By type, the number of packets with reason code 0 or without one."""
        self._others: dict[tuple[int, int], int] = {}

    def add(self, kind: int, reason: int = 0, packets: int = 1) -> None:
        """Count packets of a type."""
        if reason:
            key = kind, reason
            self._others[key] = self._others.get(key, 0) + packets
        else:
            self.good[kind] += packets

    @property
    def total(self) -> int:
        """The number of all packets."""
        return sum(self.good) + sum(self._others.copy().values())

    def rows(self) -> list[tuple[str, int, int]]:
        """Return rows of type name, reason code and number of packets, in a fixed order."""
        good = [(NAMES[kind], 0, packets) for kind, packets in enumerate(self.good) if packets]
        return good + [
            (NAMES[kind], reason, packets) for (kind, reason), packets in sorted(self._others.copy().items())
        ]


SYS = "$SYS/"


def is_sys_filter(text: str) -> bool:
    """Return whether a filter can only match ``$SYS`` topics."""
    return text.startswith(SYS) or text == "$SYS"


@attrs.define
class Traffic:
    """Counters of a server's connections, packets and bytes since its start. Counted in the event loop."""

    connections: int = 0
    """Accepted connections, with or without a later CONNECT."""
    connected: int = 0
    """Currently connected clients."""
    most_connected: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    received: PacketCounts = attrs.field(factory=PacketCounts)
    """Received packets. Packets that were refused count as ``invalid``, with the reason code that ended the
    connection."""
    sent: PacketCounts = attrs.field(factory=PacketCounts)
    """Sent packets. A SUBACK or UNSUBACK counts with the worst of its reason codes."""
    publishes_refused: int = 0

    def connect(self) -> None:
        """Count a client that has connected."""
        self.connected += 1
        self.most_connected = max(self.most_connected, self.connected)


_MINUTES = (1, 5, 15)
"""The times, in minutes, over which load averages are taken."""


class LoadAverages:
    """Exponentially weighted averages of counters, in events a minute, as mosquitto computes and names them.

    The weight of an event decays by a factor of e: for ``1min`` in a minute, for ``5min`` in five minutes, and so on.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        """The time of the last update (`time.monotonic`)."""
        self._totals: dict[str, int] = {}
        self.averages: dict[str, float] = {}
        """The averages by the end of their topics, such as ``bytes/sent/5min``."""

    def update(self, totals: Mapping[str, int], now: float) -> None:
        """Include the events since the last update. ``totals`` are counters that begin with 0, by name."""
        passed = now - self._since
        if passed <= 0:
            return
        for name, total in totals.items():
            rate = (total - self._totals.get(name, 0)) * 60 / passed
            for minutes in _MINUTES:
                key = f"{name}/{minutes}min"
                self.averages[key] = rate + (self.averages.get(key, 0.0) - rate) * math.exp(-passed / (60 * minutes))
        self._totals, self._since = dict(totals), now


class Figures:
    """The ``$SYS`` messages of one server."""

    def __init__(self, traffic: Traffic, version: str) -> None:
        self._traffic = traffic
        self._version = f"topicstore {version}"
        self._started = time.monotonic()
        self._load = LoadAverages(self._started)
        self._published: dict[str, str] = {}

    def _now(self, counts: SessionCounts) -> Mapping[str, str]:
        traffic, now = self._traffic, time.monotonic()
        dropped = counts.missed + counts.skipped.messages
        totals = {
            "messages/received": traffic.received.total,
            "messages/sent": traffic.sent.total,
            "publish/received": traffic.received.good[PUBLISH],
            "publish/sent": traffic.sent.good[PUBLISH],
            "publish/dropped": dropped,
            "bytes/received": traffic.bytes_received,
            "bytes/sent": traffic.bytes_sent,
            "sockets": traffic.connections,
            "connections": traffic.received.good[CONNECT],
        }
        self._load.update(totals, now)
        figures: dict[str, object] = {
            "version": self._version,
            "uptime": f"{int(now - self._started)} seconds",
            "clients/connected": traffic.connected,
            "clients/maximum": traffic.most_connected,
            "connections/total": traffic.connections,
            "subscriptions/count": counts.subscriptions,
            "messages/inflight": counts.in_flight,
            "messages/awaiting_pubrel": counts.awaiting_pubrel,
            "clients/paused": counts.paused,
            "messages/received": totals["messages/received"],
            "messages/sent": totals["messages/sent"],
            "publish/messages/received": totals["publish/received"],
            "publish/messages/sent": totals["publish/sent"],
            "publish/messages/refused": traffic.publishes_refused,
            "publish/messages/dropped": dropped,
            "bytes/received": traffic.bytes_received,
            "bytes/sent": traffic.bytes_sent,
            **{f"load/{name}": f"{average:.2f}" for name, average in self._load.averages.items()},
        }
        return {f"{SYS}broker/{name}": str(value) for name, value in figures.items()}

    def changed(self, counts: SessionCounts) -> list[Message]:
        """Return messages for the values that have changed since the last call."""
        now = self._now(counts)
        changed = [
            Message(topic, value.encode()) for topic, value in now.items() if self._published.get(topic) != value
        ]
        self._published = dict(now)
        return changed

    def matching(self, filters: Sequence[str], counts: Callable[[], SessionCounts]) -> list[Publish]:
        """Return the current values for a client that has just subscribed to filters, as retained messages.

        counts: returns the counts of the connected sessions; called only if a filter matches ``$SYS`` topics.
        """
        parsed = [TopicFilter(text) for text in filters if is_sys_filter(text)]
        if not parsed:
            return []
        return [
            Publish(0, Message(topic, value.encode()), 0, retain=True)
            for topic, value in self._now(counts()).items()
            if any(one.matches(topic) for one in parsed)
        ]
