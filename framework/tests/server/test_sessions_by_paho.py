"""Sessions as paho's clients see them: they outlive connections and the server, and nobody misses anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server.quantities import Duration
from topicstore.server.settings import ProtocolSettings, ServerSettings
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient, properties

need("memory", "rocksdb")
both = pytest.mark.parametrize("version", [4, 5])


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db) as embedded:
        yield embedded


@both
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_is_published_comes_with_the_lower_qos(embedded: Embedded, version: int, qos: int) -> None:
    with PahoClient(embedded.port, version=version) as reader, PahoClient(embedded.port, version=version) as writer:
        for granted in (0, 1, 2):
            assert reader.subscribe(f"a/{granted}", granted) == granted
            writer.publish(f"a/{granted}", str(granted), qos)
        found = [(message.topic, message.qos) for message in reader.received(3)]
        assert sorted(found) == [(f"a/{granted}", min(qos, granted)) for granted in (0, 1, 2)]


@both
def test_a_session_goes_on_after_the_server_was_started_anew(tmp_path: Path, version: int) -> None:
    """With its subscriptions, and what was published while its client was away, in order."""
    path = tmp_path / "db"
    for round_ in range(3):
        with ts.open(path) as db, Embedded(db) as embedded:
            with PahoClient(embedded.port, "reader", version=version, clean=False, expiry=3600) as reader:
                assert reader.present == (round_ > 0)
                if round_ == 0:
                    assert reader.subscribe("log/#", 2) == 2
                else:
                    expected = [f"{round_ - 1}-{number}" for number in range(50)]
                    assert reader.payloads(50) == expected
            with PahoClient(embedded.port, "writer", version=version) as writer:
                for number in range(50):
                    writer.publish("log/x", f"{round_}-{number}", 2)


@both
def test_who_vanishes_gets_the_rest(embedded: Embedded, version: int) -> None:
    """What was not acknowledged comes again, then what was missed."""
    with PahoClient(embedded.port, "writer", version=version) as writer:
        reader = PahoClient(embedded.port, "reader", version=version, clean=False, expiry=3600)
        reader.subscribe("log", 1)
        for number in range(5):
            writer.publish("log", str(number))
        reader.received(5)
        reader.vanish()
        wait_until(lambda: embedded.db.sessions.connected("reader") is None, "the server to notice")
        for number in range(5, 10):
            writer.publish("log", str(number))
        with PahoClient(embedded.port, "reader", version=version, clean=False, expiry=3600) as reader:
            wait_until(lambda: reader.messages and reader.messages[-1].payload == b"9", "the last message")
            fresh = [message.payload.decode() for message in reader.messages if not message.dup]
            assert fresh == [str(number) for number in range(5, 10)]


def test_a_clean_start_begins_anew(embedded: Embedded) -> None:
    with PahoClient(embedded.port, "me", clean=False, expiry=3600) as client:
        client.subscribe("a")
    with PahoClient(embedded.port, "me", clean=True, expiry=3600) as client:
        assert not client.present
        embedded.db.publish([ts.Message("a", b"nobody's", "program", 1)])
        client.subscribe("b")
        embedded.db.publish([ts.Message("b", b"mine", "program", 1)])
        assert client.payloads(1) == ["mine"]


def test_a_session_ends_with_its_connection_if_it_was_asked_for_so(embedded: Embedded) -> None:
    with PahoClient(embedded.port, "me", clean=False, expiry=0) as client:
        client.subscribe("a")
    wait_until(lambda: "me" not in embedded.db.sessions, "the session to end")


def test_a_second_connection_of_a_client_takes_over(embedded: Embedded) -> None:
    first = PahoClient(embedded.port, "me", clean=False, expiry=3600)
    first.subscribe("a")
    with PahoClient(embedded.port, "me", clean=False, expiry=3600) as second:
        assert first.ended() == 0x8E
        first.close()
        assert second.present
        embedded.db.publish([ts.Message("a", b"x", "program", 1)])
        assert second.payloads(1) == ["x"]


def test_a_client_that_asks_for_its_answers_is_told_where_they_go(tmp_path: Path) -> None:
    settings = ServerSettings(protocol=ProtocolSettings(response_information="answers/%c/%u%%c"))
    with ts.open(tmp_path / "other", backend="memory") as db, Embedded(db, settings) as other:
        with PahoClient(other.port, "a%u", RequestResponseInformation=1) as client:
            assert client.connack is not None
            assert client.connack[2].ResponseInformation == "answers/a%u/%a%u"
        with PahoClient(other.port, "me") as client:
            assert client.connack is not None
            assert not hasattr(client.connack[2], "ResponseInformation")


def test_response_information_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    """A client id of 64 KiB makes it longer than any text of MQTT."""
    settings = ServerSettings(protocol=ProtocolSettings(response_information="answers/%c"))
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db, settings) as embedded:
        for client_id, told in (("x" * 65_535, None), ("x", "answers/x")):
            with embedded.client() as client:
                connack = client.connect(client_id, request_response_information=1)
                assert connack.reason == 0
                assert connack.properties.get("response_information") == told


def test_the_server_may_settle_keep_alive_and_expiry(tmp_path: Path) -> None:
    protocol = ProtocolSettings(max_keep_alive=Duration(30), max_session_expiry=Duration(100))
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db, ServerSettings(protocol=protocol)) as embedded:
        with PahoClient(embedded.port, "long", clean=False, expiry=3600, keep_alive=60) as client:
            assert client.connack is not None
            assert client.connack[2].ServerKeepAlive == 30
            assert client.connack[2].SessionExpiryInterval == 100
            assert db.sessions["long"].expiry_interval == 100
        with PahoClient(embedded.port, "short", clean=False, expiry=10, keep_alive=20) as client:
            assert client.connack is not None
            assert not hasattr(client.connack[2], "ServerKeepAlive")
            assert not hasattr(client.connack[2], "SessionExpiryInterval")
        with PahoClient(embedded.port, "old", version=4, clean=False):
            assert db.sessions["old"].expiry_interval == 100
        with PahoClient(embedded.port, "ever", clean=False, expiry=0xFFFFFFFF) as client:
            assert client.connack is not None
            assert client.connack[2].SessionExpiryInterval == 100


def test_a_disconnect_may_change_how_long_the_session_lasts(embedded: Embedded) -> None:
    client = PahoClient(embedded.port, "me", clean=False, expiry=3600)
    client.paho.disconnect(properties=properties("DISCONNECT", SessionExpiryInterval=7200))
    client.ended()
    wait_until(lambda: not embedded.db.sessions["me"].connected, "the connection to end")
    assert embedded.db.sessions["me"].expiry_interval == 7200


def test_properties_go_on_in_their_order(embedded: Embedded) -> None:
    with PahoClient(embedded.port) as reader, PahoClient(embedded.port) as writer:
        reader.subscribe("a", values=properties("SUBSCRIBE", SubscriptionIdentifier=7))
        pairs = [("b", "2"), ("a", "1"), ("b", "2"), ("", "")]
        sent = properties(
            "PUBLISH",
            PayloadFormatIndicator=1,
            ContentType="text/plain",
            ResponseTopic="answers",
            CorrelationData=b"\0\xff",
            MessageExpiryInterval=3600,
        )
        for pair in pairs:
            sent.UserProperty = pair
        writer.publish("a", b"x", properties=sent)
        [message] = reader.received(1)
        found = message.properties
        assert found.UserProperty == pairs
        assert (found.ContentType, found.ResponseTopic, found.CorrelationData) == ("text/plain", "answers", b"\0\xff")
        assert found.PayloadFormatIndicator == 1
        assert 3500 < found.MessageExpiryInterval <= 3600
        assert found.SubscriptionIdentifier == [7]


@both
def test_who_was_away_for_longer_than_messages_are_kept_is_told(embedded: Embedded, version: int) -> None:
    """In the CONNACK, and in the session's status; what is left comes."""
    db = embedded.db
    with PahoClient(embedded.port, "away", version=version, clean=False, expiry=3600) as client:
        client.subscribe("log", 1)
        client.subscribe("other", 1)
    db.publish([ts.Message("log", b"lost", "program", 1)])
    db.add_generation()
    db.publish([ts.Message("log", b"left", "program", 1)])
    db.drop_generation(1)
    with PahoClient(embedded.port, "away", version=version, clean=False, expiry=3600) as client:
        assert client.payloads(1) == ["left"]
        if version == 5:
            assert client.connack is not None
            told = client.connack[2].ReasonString
            assert told == "messages for log, other may have been removed by retention before they could be sent"
        session = db.sessions.connected("away")
        assert session is not None
        assert {one.dropped for one in session.status().subscriptions} == {(1,)}  # which of them had some isn't known
    with PahoClient(embedded.port, "away", version=version, clean=False, expiry=3600) as client:
        assert client.connack is not None
        assert version == 4 or not hasattr(client.connack[2], "ReasonString")
