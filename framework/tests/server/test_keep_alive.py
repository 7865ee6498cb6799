"""The conditions under which a client counts as silent (MQTT 5, section 3.1.2.10)."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore.sessions import Session
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded


def test_a_client_in_the_middle_of_a_packet_is_not_silent(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is sending a large packet is not silent: each part of the packet counts."""
    heard = 0
    alive = Session.alive

    def counted(session: Session) -> None:
        nonlocal heard
        alive(session)
        heard += 1

    monkeypatch.setattr(Session, "alive", counted)
    with Embedded(db) as embedded, embedded.client("slow", keep_alive=3_600) as client:
        packet = wire.publish("large", b"x" * 1_000, qos=1, packet_id=1)
        for at in range(0, len(packet) - 100, 100):
            before = heard
            client.send(packet[at : at + 100])
            wait_until(lambda before=before: heard > before, "the client to be heard")  # type: ignore[misc]
        client.send(packet[at + 100 :])
        assert client.expect("PUBACK").packet_id == 1
