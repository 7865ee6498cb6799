"""The server conforms to the numbered statements of the MQTT standard, and a table lists the tests of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import topicstore
from topicstore_conformance import Broker, BrokerSuite
from topicstore_conformance.broker.fixtures import Connect, both
from topicstore_conformance.broker.subscribing import until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.serving import Serving
from topicstore_conformance.mqtt.statements import statement, statements_of

TABLE = Path(topicstore.__file__).parent / "server" / "README.md"
ROW = re.compile(r"^\| \[MQTT-([\d.]+-\d+)\] \| (.*) \|$", re.MULTILINE)
PACKETS = re.compile(r"^\| ([\d.]+-\d+) \| [\d.–-]+ \| [^|]+ \| `test", re.MULTILINE)
"""The numbers in the README's table about packets, which `protocol/test_statements_about_packets.py` checks."""
STATEMENTS = 251
"""The number of statements in MQTT 5, appendix B."""
TEST = re.compile(r"`(test_\w+)`")


class TestServer(BrokerSuite):
    """The suite for the server, and tests of choices that the standard leaves open."""

    @pytest.fixture
    def broker(self, mqtt: Serving) -> Broker:
        return Broker("127.0.0.1", mqtt.port, strict=True)

    @statement("3.2.2-8")
    def test_what_the_server_announces(self, connect: Connect) -> None:
        """The CONNACK restricts nothing: all QoS, retained messages and all subscriptions are available."""
        values = connect().connack.properties
        for absent in ("maximum_qos", "authentication_method", "response_information"):
            assert absent not in values
        for available in ("retain", "wildcard_subscription", "subscription_identifier", "shared_subscription"):
            assert values.get(f"{available}_available", 1) == 1
        assert values.get("receive_maximum", 65_535) > 0
        assert values.get("topic_alias_maximum", 0) > 0

    @statement("3.1.2-24")
    def test_a_client_whose_connack_is_too_large_is_refused(
        self, connect: Connect, stranger: Connect, name: str
    ) -> None:
        """A client is refused if its CONNACK would exceed its maximum packet size.

        Neither a session nor a will remains.
        """
        witness, client = connect(), stranger()
        witness.subscribe(f"{name}/#")
        will = wire.Will(topic=f"{name}/will", payload=b"will")
        client.send(wire.connect(name, maximum_packet_size=15, session_expiry_interval=100, will=will))
        answer = client.expect("CONNACK")
        assert (answer.reason, answer.size) == (0x95, 5)
        assert client.receive() is None
        assert not connect(name, clean=False, maximum_packet_size=16).connack.present
        connect().publish(f"{name}/end", b"end")
        assert witness.expect("PUBLISH").payload == b"end"

    @statement("4.3.3-9")
    def test_an_id_that_was_refused_is_free_again(self, connect: Connect, name: str) -> None:
        """The packet id of a refused message is free again.

        The message is refused because clients can't publish to topics of the server.
        """
        reader, writer = connect(), connect()
        reader.subscribe(name)
        writer.send(wire.publish("$SYS/broker/uptime", qos=2, packet_id=7))
        answer = writer.expect("PUBREC")
        assert (answer.packet_id, answer.reason >= 0x80) == (7, True)
        writer.send(wire.publish(name, b"x", qos=2, packet_id=7))
        assert writer.expect("PUBREC").reason == 0
        assert reader.expect("PUBLISH").payload == b"x"

    @both
    @statement("3.8.4-1", "4.7.2-1")
    def test_figures_of_the_server(self, connect: Connect, version: int) -> None:
        """Topics of the server are sent to clients that subscribe to them by name, and to no leading wildcard."""
        everything, figures = connect(version=version), connect(version=version)
        everything.subscribe("#", "+/broker/#")
        figures.subscribe("$SYS/broker/clients/connected")
        while int(figures.expect("PUBLISH").payload) < 2:
            pass
        everything.send(wire.publish("figures/end", b"end", version=version))
        assert [packet.topic for packet in until(everything, b"end") if packet.topic.startswith("$")] == []


def named() -> dict[str, list[str]]:
    """Return the names of the tests of each statement, by the statement's number."""
    found: dict[str, list[str]] = {}
    for name in dir(TestServer):
        for number in statements_of(getattr(TestServer, name)) if name.startswith("test_") else ():
            found.setdefault(number, []).append(name)
    return found


def test_the_table_names_the_tests_of_each_statement() -> None:
    rows = {number: set(TEST.findall(text)) for number, text in ROW.findall(TABLE.read_text())}
    expected = {number: set(names) for number, names in named().items()}
    for number, names in expected.items():
        assert names <= rows.get(number, set()), f"[MQTT-{number}] is tested by {sorted(names)}"
    ours = {name for names in expected.values() for name in names}
    for number, names in rows.items():
        assert names & ours == expected.get(number, set()), f"[MQTT-{number}]"


def test_a_statement_without_a_test_says_why() -> None:
    """The table has each normative MQTT statement once, with a test or with a reason for having none."""
    rows = ROW.findall(TABLE.read_text())
    assert len(rows) == len({number for number, _ in rows})
    assert len({number for number, _ in rows} | set(PACKETS.findall(TABLE.read_text()))) == STATEMENTS
    assert [number for number, text in rows if not (TEST.search(text) or len(text) > 10)] == []
