"""The server's own topics: they are sent to their subscribers, are never stored, and match no wildcard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import topicstore as ts
from topicstore.server.config.model import ProtocolSettings, ServerSettings
from topicstore.server.config.units import Duration
from topicstore.server.mqtt.sys_topics import Figures, Traffic
from topicstore.sessions import SessionCounts
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient

both = pytest.mark.parametrize("version", [4, 5])
CONNECTED = "$SYS/broker/clients/connected"
TOTAL = "$SYS/broker/connections/total"


@pytest.fixture
def embedded(db: ts.Database) -> Iterator[Embedded]:
    """A server that publishes its ``$SYS`` topics every millisecond, and stores messages of any QoS."""
    settings = ServerSettings(protocol=ProtocolSettings(sys_interval=Duration(0.001), store_qos0=True))
    with Embedded(db, settings) as embedded:
        db.persistence.add("#")
        yield embedded


@both
def test_a_subscriber_gets_them_at_once_and_when_they_change(embedded: Embedded, version: int) -> None:
    with PahoClient(embedded.port, "watcher", version=version) as watcher:
        assert watcher.subscribe(CONNECTED, 2) == 0
        first = watcher.received(1)[0]
        assert (first.payload, first.retain, first.qos) == (b"1", True, 0)
        with PahoClient(embedded.port, "other"):
            watcher.wait(lambda: b"2" in [message.payload for message in watcher.messages], "the figure to change")
        watcher.subscribe("$SYS/#")  # matches all topics of the server
        names = {"version", "uptime", "clients/connected", "subscriptions/count", "bytes/received"}
        wanted = {f"$SYS/broker/{name}" for name in names}
        watcher.wait(lambda: wanted <= {message.topic for message in watcher.messages}, "the figures")


def test_they_are_stored_nowhere(embedded: Embedded) -> None:
    """Messages of ``$SYS`` topics aren't stored, even if a persistent session receives them and QoS 0 is stored."""
    with PahoClient(embedded.port, "watcher", clean=False, expiry=3600) as watcher:
        assert watcher.subscribe("$SYS/#", 1) == 0
        for number in range(3):
            with PahoClient(embedded.port, f"other-{number}"):
                watcher.wait(
                    lambda: [one for one in watcher.messages if one.topic == TOTAL and not one.retain],
                    "a figure to change",
                )
            watcher.messages.clear()
    assert embedded.db.topics("#") == embedded.db.topics("$SYS/#") == []
    assert embedded.db.retained("$SYS/#") == []


@both
def test_nobody_else_publishes_them_and_no_group_shares_them(embedded: Embedded, version: int) -> None:
    with PahoClient(embedded.port, version=version) as client:
        assert client.publish(CONNECTED, b"99") == (0 if version == 4 else 0x90)
        assert client.subscribe("$share/g/$SYS/#") == (0x80 if version == 4 else 0x87)


def test_only_what_has_changed_is_reported_again() -> None:
    traffic = Traffic()
    figures = Figures(traffic, "1.0")
    counts = SessionCounts(connected=0, paused=0, subscriptions=0, in_flight=0, awaiting_pubrel=0)
    assert len(figures.changed(counts)) > 10
    traffic.connect()
    changed = {message.topic.removeprefix("$SYS/broker/") for message in figures.changed(counts)}
    assert {"clients/connected", "clients/maximum"} <= changed <= {"clients/connected", "clients/maximum", "uptime"}
