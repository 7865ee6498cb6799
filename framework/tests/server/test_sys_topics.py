"""The server's own topics: they are sent to their subscribers, are never stored, and match no wildcard."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.server.config.model import ProtocolSettings, ServerSettings
from topicstore.server.config.units import Duration
from topicstore.server.mqtt.sys_topics import Figures, LoadAverages, Traffic
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


@given(st.lists(st.tuples(st.floats(0.001, 3_600), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_load_averages_lie_between_the_rates(steps: list[tuple[float, int]]) -> None:
    """A load average lies between zero and the highest rate, and follows the newest rate sooner over fewer minutes.

    The result doesn't depend on how a time of a constant rate is divided into updates.
    """
    once, halved = LoadAverages(0.0), LoadAverages(0.0)
    now, total, rates = 0.0, 0, [0.0]
    for passed, events in steps:
        halved.update({"x": total + events}, now + passed / 2)
        halved.update({"x": total + 2 * events}, now + passed)
        now, total = now + passed, total + 2 * events
        once.update({"x": total}, now)
        rates.append(2 * events * 60 / passed)
        found = [once.averages[f"x/{minutes}min"] for minutes in (1, 5, 15)]
        assert found == pytest.approx([halved.averages[f"x/{minutes}min"] for minutes in (1, 5, 15)], abs=1e-6)
        assert all(0 <= one <= max(rates) * (1 + 1e-9) for one in found)
    once.update({"x": total + 600}, now + 60)
    expected = 600 + (found[0] - 600) / math.e
    assert once.averages["x/1min"] == pytest.approx(expected)


def test_load_averages_have_the_names_of_mosquitto(embedded: Embedded) -> None:
    """Load averages have mosquitto's topics, each over 1, 5 and 15 minutes, with two decimals."""
    names = [f"{of}/{way}" for of in ("messages", "publish", "bytes") for way in ("received", "sent")]
    names += ["publish/dropped", "sockets", "connections"]
    wanted = {f"$SYS/broker/load/{name}/{minutes}min" for name in names for minutes in (1, 5, 15)}
    with PahoClient(embedded.port, "watcher") as watcher:
        watcher.subscribe("$SYS/broker/load/#")
        watcher.wait(lambda: wanted <= {message.topic for message in watcher.messages}, "the averages")
        assert wanted == {message.topic for message in watcher.messages}
        assert all(re.fullmatch(rb"[0-9]+\.[0-9]{2}", message.payload) for message in watcher.messages)


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
