"""Requests that wait for the store at the same time are served in the order of their arrival."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.raw_client import RawClient

both = pytest.mark.parametrize("version", [4, 5])


class Gate:
    """Keeps the store's thread busy until it is opened, so that requests sent meanwhile are served in one call."""

    def __init__(self, embedded: Embedded) -> None:
        self._broker = embedded.server._broker
        self._open = threading.Event()

    def _packets(self) -> int:
        assert self._broker is not None
        return self._broker.serving.traffic.received.total

    def _under_way(self) -> bool:
        return self._broker is not None and self._broker._under_way

    def close(self, other: RawClient) -> None:
        """Begin a call that blocks the store's thread until the gate is opened."""
        assert self._broker is not None
        self._broker._thread.submit(self._open.wait, PATIENCE)
        self.send(other, wire.publish("gate", b"", version=other.version), count=1)
        wait_until(self._under_way, "a batch has begun")

    def send(self, client: RawClient, *packets: bytes, count: int) -> None:
        """Send packets, and return when the server has received ``count`` more packets."""
        before = self._packets()
        client.send(*packets)
        wait_until(lambda: self._packets() >= before + count, "the server has taken the packets")

    def open(self) -> None:
        self._open.set()


@contextmanager
def clients(db: ts.Database, version: int) -> Iterator[tuple[Gate, list[RawClient]]]:
    with Embedded(db) as embedded:
        found = [embedded.client(version=version) for _ in range(3)]
        gate = Gate(embedded)
        try:
            for number, client in enumerate(found):
                client.connect(f"client-{number}")
            yield gate, found
        finally:
            gate.open()
            for client in found:
                client.close()


@both
def test_a_subscription_holds_for_what_another_client_publishes_after_it(db: ts.Database, version: int) -> None:
    with clients(db, version) as (gate, (reader, writer, other)):
        gate.close(other)
        gate.send(reader, wire.subscribe(1, [("a", 0)], version=version), count=1)
        gate.send(writer, wire.publish("a", b"x", version=version), count=1)
        gate.open()
        reader.expect("SUBACK")
        assert reader.expect("PUBLISH").payload == b"x"


@both
def test_what_was_published_before_a_subscription_is_retained_for_it(db: ts.Database, version: int) -> None:
    """If a publish and a later subscription are served in the same call, the message arrives as a retained message."""
    with clients(db, version) as (gate, (reader, writer, other)):
        gate.close(other)
        gate.send(writer, wire.publish("a", b"x", retain=True, version=version), count=1)
        gate.send(reader, wire.subscribe(1, [("a", 0)], version=version), count=1)
        gate.open()
        reader.expect("SUBACK")
        packet = reader.expect("PUBLISH")
        assert (packet.payload, packet.retain) == (b"x", True)


@both
def test_what_a_client_asks_for_itself_keeps_its_order(db: ts.Database, version: int) -> None:
    """The requests of one client keep their order, even if another client subscribed before."""
    with clients(db, version) as (gate, (reader, both_ways, other)):
        gate.close(other)
        gate.send(reader, wire.subscribe(1, [("a", 0)], version=version), count=1)
        gate.send(
            both_ways,
            wire.publish("a", b"x", retain=True, version=version),
            wire.subscribe(1, [("a", 0)], version=version),
            wire.publish("a", b"y", version=version),
            count=2,
        )
        gate.open()
        reader.expect("SUBACK")
        assert [packet.payload for packet in reader.publishes(2)] == [b"x", b"y"]
        both_ways.expect("SUBACK")
        assert [(packet.payload, packet.retain) for packet in both_ways.publishes(2)] == [(b"x", True), (b"y", False)]


@both
def test_after_an_unsubscription_nothing_comes_that_was_published_later(db: ts.Database, version: int) -> None:
    with clients(db, version) as (gate, (reader, writer, other)):
        reader.subscribe("a", "b")
        gate.close(other)
        gate.send(reader, wire.unsubscribe(7, ["a"], version=version), count=1)
        gate.send(
            writer, wire.publish("a", b"after", version=version), wire.publish("b", b"end", version=version), count=2
        )
        gate.open()
        reader.expect("UNSUBACK")
        assert reader.expect("PUBLISH").payload == b"end"
