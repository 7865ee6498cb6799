"""paho clients that publish numbers and count them, for tests that kill a server beside them.

Messages are ``kills/PUBLISHER/QOS`` with a number each, rising by one. A client connects again when it is told that the
server serves again. It must not try before: after an attempt that fails, paho-mqtt 2.2 has forgotten that a PUBREL is
due, and publishes that message of QoS 2 anew.
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
"""How many messages a publisher has under way."""
_NEVER = 0xFFFFFFFF


class Gate:
    """Whether the server serves: clients wait at it before they connect again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._starts = 1
        """How often the server has begun to serve."""

    def served(self) -> int:
        """Return a number that rises with each start of the server."""
        return self._starts

    def open(self) -> None:
        """Say that the server serves again."""
        with self._changed:
            self._starts += 1
            self._changed.notify_all()

    def wait(self, seen: int) -> int:
        """Return the number of the next start after this one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._starts > seen, PATIENCE), "the server doesn't serve again"
            return self._starts


class CountedClient:
    """A paho client with a session that stays. It runs in one thread from `start` to `close`."""

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
        """Do what a client does when it is connected for the first time."""

    def start(self) -> None:
        """Run the client in a thread of its own, and return when it is connected."""
        self._running = begin(self._run)
        wait_until(lambda: self.connections or self._running.done(), f"{self.name} is connected")

    def _run(self) -> None:
        seen = self._gate.served()
        while True:
            self.client.loop_forever()  # to the end of the connection
            if self._closing:
                return
            seen = self._gate.wait(seen)
            self.client.reconnect()

    def close(self) -> None:
        """Disconnect, and wait for the thread's end."""
        self._closing = True
        self.client.disconnect()
        self._running.result(PATIENCE)


class CountedPublisher(CountedClient):
    """Publishes numbers of QoS 1 and 2 by turns, each to the topic of its QoS, until `end`."""

    def __init__(self, port: int, name: str, version: int, gate: Gate) -> None:
        super().__init__(port, name, version, gate)
        self.sent = self.acknowledged = 0
        """How many were published and acknowledged, of both QoS together."""
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
        """Publish no more, and return when everything is acknowledged."""
        self._ending = True
        wait_until(lambda: self.acknowledged == self.sent, f"all messages of {self.name} are acknowledged")

    def numbers(self, qos: int) -> set[int]:
        """Return the numbers that were published with a QoS."""
        return set(range((self.sent + 2 - qos) // 2))


class CountingSubscriber(CountedClient):
    """Counts what it gets."""

    def __init__(self, port: int, name: str, version: int, gate: Gate, qos: int) -> None:
        super().__init__(port, name, version, gate)
        self.qos, self.received = qos, 0
        self.found: dict[str, list[int]] = defaultdict(list)
        """The numbers that came, by topic, in their order."""
        self._subscribed = threading.Event()
        self.client.on_message = self._received
        self.client.on_subscribe = lambda *_: self._subscribed.set()

    def _begin(self) -> None:
        self.client.subscribe("kills/#", self.qos)

    def start(self) -> None:
        """Run the client in a thread of its own, and return when it is subscribed to all publishers."""
        super().start()
        assert self._subscribed.wait(PATIENCE), "a subscription was not answered"

    def _received(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self.found[message.topic].append(int(message.payload))
        self.received += 1

    def missing(self, publishers: Sequence[CountedPublisher]) -> int:
        """Return how many published messages haven't come."""
        return sum(
            len(one.numbers(qos) - set(self.found.get(f"kills/{one.name}/{qos}", ())))
            for one in publishers
            for qos in (1, 2)
        )


def faults(publishers: Sequence[CountedPublisher], subscriber: CountingSubscriber) -> list[str]:
    """Return what a subscriber has to complain of: losses, order, doubles of QoS 2, refused connections."""
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
