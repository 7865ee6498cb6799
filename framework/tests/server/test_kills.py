"""The server is killed with SIGKILL under load, repeatedly; clients check that no message is lost or duplicated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import Serving, serving

KILLS = tries(quick=5, full=30)
BETWEEN = 400
"""The numbers of acknowledged and of received messages between two kills."""
ACKNOWLEDGED = 50_000


@pytest.fixture
def server() -> Iterator[Serving]:
    need("rocksdb")
    with quick_directory() as directory, serving(Path(directory) / "db") as running:
        yield running


@pytest.mark.slow
def test_kills_lose_nothing(server: Serving) -> None:
    """According to paho clients, kills lose no QoS 1 message and deliver each QoS 2 message once.

    Each publisher's messages arrive in order within a topic.
    """
    pytest.importorskip("paho.mqtt", reason="needs paho-mqtt: pip install paho-mqtt")
    from topicstore_conformance.mqtt.counting_clients import CountedPublisher, CountingSubscriber, Gate, faults

    gate = Gate()
    with ExitStack() as clients:
        subscribers = [
            CountingSubscriber(server.port, f"reader-{qos}-{version}", version, gate, qos)
            for qos in (1, 2)
            for version in (4, 5)
        ]
        publishers = [CountedPublisher(server.port, f"writer-{version}", version, gate) for version in (4, 5)]
        for client in (*subscribers, *publishers):
            client.start()
            clients.callback(client.close)
        for _ in range(KILLS):
            targets = (
                [one.acknowledged + BETWEEN for one in publishers],
                [one.received + BETWEEN for one in subscribers],
            )

            def reached(targets: tuple[list[int], list[int]] = targets) -> bool:
                acknowledged, received = targets
                return all(p.acknowledged >= n for p, n in zip(publishers, acknowledged, strict=True)) and all(
                    s.received >= n for s, n in zip(subscribers, received, strict=True)
                )

            wait_until(reached, "messages are acknowledged and received")
            server.restart()
            gate.open()
        for publisher in publishers:
            publisher.end()
        for subscriber in subscribers:
            wait_until(lambda one=subscriber: not one.missing(publishers), f"{subscriber.name} has everything")  # type: ignore[misc]
        assert [fault for subscriber in subscribers for fault in faults(publishers, subscriber)] == []
        assert {client.connections for client in (*subscribers, *publishers)} == {KILLS + 1}


class ExactPublisher:
    """A publisher of numbers at QoS 2 over a raw socket, which resumes as section 4.3.3 of MQTT 5 requires.

    After a kill it repeats PUBREL for received messages, and PUBLISH for all others.
    """

    def __init__(self, server: Serving, version: int) -> None:
        self._server, self._version = server, version
        self.published = 0
        self.under_way: dict[int, bytes | None] = {}
        """Payloads in flight by packet id; None once the PUBREC has arrived."""

    def resume(self, client: RawClient) -> None:
        """Connect, and send all messages in flight again."""
        client.connect("writer", keep=True)
        for number, payload in self.under_way.items():
            if payload is None:
                client.send(wire.acknowledgement("PUBREL", number))
            else:
                self._send(client, number, payload, dup=True)

    def fill(self, client: RawClient) -> None:
        """Publish until a hundred messages are in flight."""
        while len(self.under_way) < 100:
            self.published += 1
            self.under_way[self.published] = payload = b"%d" % self.published
            self._send(client, self.published, payload, dup=False)

    def _send(self, client: RawClient, number: int, payload: bytes, *, dup: bool) -> None:
        client.send(wire.publish("once", payload, qos=2, packet_id=number, dup=dup, version=self._version))

    def answered(self, client: RawClient) -> None:
        """Process the server's next answer."""
        packet = client.receive()
        assert packet is not None
        if packet.kind == "PUBREC":
            self.under_way[packet.packet_id] = None
            client.send(wire.acknowledgement("PUBREL", packet.packet_id))
        else:
            assert packet.kind == "PUBCOMP"
            del self.under_way[packet.packet_id]


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 5])
def test_quality_2_is_stored_once(server: Serving, version: int) -> None:
    """A QoS 2 message is stored exactly once, at whatever point of the exchange the server is killed."""
    source, publisher = random.Random(version), ExactPublisher(server, version)
    with server.client(version=version) as reader:
        reader.connect("reader", keep=True)
        reader.subscribe("once", options=2)
        reader.leave()
    for _ in range(tries(quick=2, full=15)):
        with server.client(version=version) as client:
            publisher.resume(client)
            for _ in range(source.randrange(20, 400)):
                publisher.fill(client)
                publisher.answered(client)
            server.restart()
    with server.client(version=version) as client:
        publisher.resume(client)
        while publisher.under_way:
            publisher.answered(client)
    with server.client(version=version) as reader:
        assert reader.connect("reader", keep=True).present
        found: list[int] = []
        while len(found) < publisher.published:
            packet = reader.receive()
            assert packet is not None
            if packet.kind == "PUBLISH":
                found.append(int(packet.payload))
            reader.send(wire.acknowledgement("PUBREC" if packet.kind == "PUBLISH" else "PUBCOMP", packet.packet_id))
    assert found == list(range(1, publisher.published + 1))


def test_what_was_acknowledged_is_there(server: Serving) -> None:
    """After 50,000 acknowledged publishes and a SIGKILL, a session receives all of them in order."""
    with server.client() as reader:
        reader.connect("reader", keep=True)
        reader.subscribe("log/#", options=1)
        reader.leave()
    with server.client() as writer:
        window = min(1_000, writer.connect("writer").properties.get("receive_maximum", 65_535))  # type: ignore[type-var]
        for first in range(0, ACKNOWLEDGED, window):  # type: ignore[arg-type]
            numbers = range(first, min(first + window, ACKNOWLEDGED))  # type: ignore[operator]
            writer.send(*[wire.publish(f"log/{n % 7}", b"%d" % n, qos=1, packet_id=n % 65_535 + 1) for n in numbers])
            assert [n % 65_535 + 1 for n in numbers] == [writer.expect("PUBACK").packet_id for _ in numbers]
        server.kill()
    server.start()
    with server.client() as reader:
        assert reader.connect("reader", keep=True).present
        found = []
        while len(found) < ACKNOWLEDGED:
            packet = reader.expect("PUBLISH")
            found.append(int(packet.payload))
            reader.send(wire.acknowledgement("PUBACK", packet.packet_id))
        reader.ping()  # nothing more arrives
    assert found == list(range(ACKNOWLEDGED))
