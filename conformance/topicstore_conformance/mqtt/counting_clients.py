"""paho clients that publish numbers and count them, for tests that kill the server meanwhile.

A message's topic is ``kills/PUBLISHER/QOS``, and its payload is a number that rises by one. A client reconnects when
the test reports that the server serves again, and not before. The reason: after a failed attempt to connect, paho-mqtt
2.2 forgets that a PUBREL is due, and publishes the QoS 2 message again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until

__all__ = ["CountedPublisher", "CountingSubscriber", "Gate", "faults"]

_WINDOW = 100
"""The number of messages that a publisher keeps in flight."""
_NEVER = 0xFFFFFFFF


class Gate:
    """An event that notifies clients of each start of the server, so that they reconnect. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._starts = 1
        """The number of times that the server was started."""

    def served(self) -> int:
        """Return the number of the server's latest start."""
        return self._starts

    def open(self) -> None:
        """Notify the waiting clients that the server serves again."""
        with self._changed:
            self._starts += 1
            self._changed.notify_all()

    def wait(self, seen: int) -> int:
        """Wait for a later start than number ``seen``, and return the number of the latest one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._starts > seen, PATIENCE), "the server doesn't serve again"
            return self._starts


class CountedClient:
    """A paho client with a persistent session. It runs in a thread of its own from `start` to `close`."""

    def __init__(self, port: int, client_id: str, version: int, gate: Gate) -> None:
        protocol = paho.MQTTv5 if version == 5 else paho.MQTTv311
        session: dict[str, Any] = {} if version == 5 else {"clean_session": False}
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=protocol, reconnect_on_failure=False, **session
        )
        self.client.max_inflight_messages_set(2 * _WINDOW)
        self.name, self.connections = client_id, 0
        self.failures: list[str] = []
        self.client.on_connect = self._connected
        self._gate, self._closing = gate, False
        self._connect(port, version)

    def _connect(self, port: int, version: int) -> None:
        if version == 5:
            kept = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            kept.SessionExpiryInterval = _NEVER
            self.client.connect("127.0.0.1", port, keepalive=60, clean_start=False, properties=kept)
        else:
            self.client.connect("127.0.0.1", port, keepalive=60)

    def _connected(self, _client: object, _data: object, flags: Any, reason: Any, _properties: object) -> None:
        if reason.is_failure:
            self.failures.append(f"a connection was refused: {reason}")
        elif self.connections and not flags.session_present:
            self.failures.append("a session was lost")
        self.connections += 1
        if self.connections == 1:
            self._begin()

    def _begin(self) -> None:
        """Start publishing or subscribe, once the client is connected for the first time."""

    def start(self) -> None:
        """Start the client's thread, and return when the client is connected."""
        self._running = begin(self._run)
        wait_until(lambda: self.connections or self._running.done(), f"{self.name} is connected")

    def _run(self) -> None:
        seen = self._gate.served()
        while True:
            self.client.loop_forever()  # returns when the connection ends
            if self._closing:
                return
            seen = self._gate.wait(seen)
            self.client.reconnect()

    def close(self) -> None:
        """Disconnect, and wait until the thread ends."""
        self._closing = True
        self.client.disconnect()
        self._running.result(PATIENCE)


class CountedPublisher(CountedClient):
    """A client that publishes numbers with QoS 1 and 2 alternately, each to the topic of its QoS, until `end`."""

    def __init__(self, port: int, name: str, version: int, gate: Gate) -> None:
        super().__init__(port, name, version, gate)
        self.sent = self.acknowledged = 0
        """The numbers of messages published and acknowledged, with QoS 1 and 2 together."""
        self._ending = False
        self.client.on_publish = self._published

    def _begin(self) -> None:
        for _ in range(_WINDOW):
            self._publish()

    def _publish(self) -> None:
        number, qos = self.sent // 2, self.sent % 2 + 1
        self.sent += 1
        self.client.publish(f"kills/{self.name}/{qos}", b"%d" % number, qos)

    def _published(self, *_: object) -> None:
        if not self._ending:
            self._publish()
        self.acknowledged += 1

    def end(self) -> None:
        """Stop publishing, and return when all messages are acknowledged."""
        self._ending = True
        wait_until(lambda: self.acknowledged == self.sent, f"all messages of {self.name} are acknowledged")

    def numbers(self, qos: int) -> set[int]:
        """Return the numbers that were published with a QoS."""
        return set(range((self.sent + 2 - qos) // 2))


class CountingSubscriber(CountedClient):
    """A client that subscribes to all counted publishers and records the numbers that it receives."""

    def __init__(self, port: int, name: str, version: int, gate: Gate, qos: int) -> None:
        super().__init__(port, name, version, gate)
        self.qos, self.received = qos, 0
        self.found: dict[str, list[int]] = defaultdict(list)
        """The received numbers by topic, in order of arrival."""
        self._subscribed = threading.Event()
        self.client.on_message = self._received
        self.client.on_subscribe = lambda *_: self._subscribed.set()

    def _begin(self) -> None:
        self.client.subscribe("kills/#", self.qos)

    def start(self) -> None:
        """Start the client's thread, and return when the client is subscribed to all publishers."""
        super().start()
        assert self._subscribed.wait(PATIENCE), "a subscription was not answered"

    def _received(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.found[message.topic].append(int(message.payload))
        self.received += 1

    def missing(self, publishers: Sequence[CountedPublisher]) -> int:
        """Return the number of published messages that were not received."""
        return sum(
            len(one.numbers(qos) - set(self.found.get(f"kills/{one.name}/{qos}", ())))
            for one in publishers
            for qos in (1, 2)
        )


def faults(publishers: Sequence[CountedPublisher], subscriber: CountingSubscriber) -> list[str]:
    """Return a description of each fault: lost messages, wrong order, QoS 2 duplicates, refused connections."""
    found = [*subscriber.failures]
    for publisher in publishers:
        found += [f"{publisher.name}: {failure}" for failure in publisher.failures]
        for qos in (1, 2):
            got = subscriber.found.get(f"kills/{publisher.name}/{qos}", [])
            what = f"{subscriber.name} and {publisher.name}, published with QoS {qos}"
            first = list(dict.fromkeys(got))
            if lost := publisher.numbers(qos) - set(first):
                found.append(f"{what}: {len(lost)} lost, first {min(lost)}")
            if first != sorted(first):
                found.append(f"{what}: out of order")
            if qos == subscriber.qos == 2 and len(got) != len(first):
                found.append(f"{what}: {len(got) - len(first)} came twice")
    return found
