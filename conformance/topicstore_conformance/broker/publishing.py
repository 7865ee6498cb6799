"""Tests of statements about messages: QoS, retained messages, properties, flow control, order."""

from __future__ import annotations

import pytest

from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.statements import statement

from .fixtures import Broker, Connect, Fixtures, MustEnd, both, needs

__all__ = ["Publishing"]

AS_PUBLISHED = 8
"""The subscription option Retain As Published."""


def most_aliases(client: RawClient) -> int:
    """Return the number of topic aliases that the broker allows a client; skip the test if it allows none."""
    most = client.connack.properties.get("topic_alias_maximum", 0)
    assert isinstance(most, int)
    if not most:
        pytest.skip("the broker says in its CONNACK that it takes no topic alias")
    return most


class Publishing(Fixtures):
    """Tests of messages: QoS, retained messages, properties, flow control, order."""

    @both
    @statement("3.3.4-1", "4.3.2-4", "4.3.3-8", "4.3.3-11", "2.2.1-5", "3.4.2-1", "3.5.2-1", "3.7.2-1")
    def test_each_quality_has_its_answer(self, broker: Broker, connect: Connect, name: str, version: int) -> None:
        """Each QoS has its acknowledgements; in MQTT 5 their reason code may be 0x10, No matching subscribers."""
        reader, writer = connect(version=version), connect(version=version)
        unwanted = (0,) if version == 4 else (0x10,) if broker.strict else (0, 0x10)
        assert writer.publish(name, b"x", 1).reason in unwanted
        writer.send(wire.publish(name, b"x", qos=2, packet_id=9, version=version), wire.acknowledgement("PUBREL", 9))
        received, completed = (writer.expect(kind).reason for kind in ("PUBREC", "PUBCOMP"))
        assert (received in unwanted, completed) == (True, 0)
        reader.subscribe(name, options=2)
        for qos in (0, 1, 2):
            answer = writer.publish(name, b"%d" % qos, qos)
            assert answer is None or answer.reason == 0
            packet = reader.expect("PUBLISH")
            assert (packet.payload, packet.qos, packet.dup) == (b"%d" % qos, qos, False)
            reader.acknowledge(packet)
        reader.ping()
        writer.ping()

    @both
    @statement("3.8.4-8", "3.3.4-2")
    @pytest.mark.parametrize("published", [0, 1, 2])
    @pytest.mark.parametrize("granted", [0, 1, 2])
    def test_the_lesser_quality_counts(
        self, connect: Connect, name: str, version: int, published: int, granted: int
    ) -> None:
        """A message is sent with the lower of its publisher's QoS and the QoS granted to the subscription."""
        reader, writer = connect(version=version), connect(version=version)
        assert reader.subscribe(name, options=granted) == (granted,)
        writer.publish(name, b"x", published)
        packet = reader.expect("PUBLISH")
        assert packet.qos == min(published, granted)
        assert bool(packet.packet_id) == bool(packet.qos)

    @both
    @statement("3.3.1-3", "3.3.1-2", "4.3.1-1", "4.3.2-2", "4.3.3-2", "4.3.2-5")
    def test_dup_of_a_publisher_goes_no_further(self, connect: Connect, name: str, version: int) -> None:
        """The DUP flag of a publisher isn't passed on; a repeated QoS 1 message counts as a new message."""
        reader, writer = connect(version=version), connect(version=version)
        reader.subscribe(name, options=1)
        for dup in (False, True):
            writer.send(wire.publish(name, b"x", qos=1, packet_id=7, dup=dup, version=version))
            assert writer.expect("PUBACK").packet_id == 7
        assert [packet.dup for packet in reader.publishes(2)] == [False, False]

    @both
    @statement("4.3.3-10", "4.3.3-12", "3.1.2-5")
    @pytest.mark.parametrize("anew", [False, True])
    def test_quality_2_comes_once_until_it_is_released(
        self, connect: Connect, name: str, version: int, anew: bool
    ) -> None:
        """A QoS 2 message is delivered once until its packet id is released, also across reconnections."""
        reader, writer = connect(version=version), connect(name, version=version, keep=True)
        reader.subscribe(f"{name}/#", options=0)
        for _ in range(2):
            for dup in (False, True, True):
                writer.send(wire.publish(f"{name}/x", b"x", qos=2, packet_id=7, dup=dup, version=version))
                assert writer.expect("PUBREC").packet_id == 7
                if anew:
                    writer.close()
                    writer = connect(name, version=version, keep=True)
            writer.send(wire.acknowledgement("PUBREL", 7))
            assert writer.expect("PUBCOMP").packet_id == 7
        writer.publish(f"{name}/end", qos=1)
        assert [packet.topic for packet in reader.publishes(3)] == [f"{name}/x", f"{name}/x", f"{name}/end"]

    @both
    @statement("4.4.0-1", "3.3.1-1", "4.3.2-3", "4.3.3-3", "4.3.3-5", "4.3.3-6", "4.6.0-1", "3.6.2-1", "2.2.1-4")
    def test_what_was_not_acknowledged_is_sent_again(self, connect: Connect, name: str, version: int) -> None:
        """After a reconnection unacknowledged messages and PUBRELs are sent again in order with their packet ids."""
        reader, writer = connect(name, version=version, keep=True), connect(version=version)
        reader.subscribe(name, options=2)
        for number, qos in enumerate((1, 2, 2, 1)):
            writer.publish(name, b"%d" % number, qos)
        first = reader.publishes(4)
        assert len({packet.packet_id for packet in first}) == 4
        reader.send(wire.acknowledgement("PUBREC", first[1].packet_id))
        assert reader.expect("PUBREL").packet_id == first[1].packet_id
        reader.acknowledge(first[3])
        reader.ping()
        reader.close()
        reader = connect(name, version=version, keep=True)
        again = [reader.next() for _ in range(3)]
        found = [(packet.kind, packet.packet_id, packet.payload, packet.dup) for packet in again]
        assert sorted(found) == sorted(
            [
                ("PUBLISH", first[0].packet_id, b"0", True),
                ("PUBREL", first[1].packet_id, b"", False),
                ("PUBLISH", first[2].packet_id, b"2", True),
            ]
        )
        assert [packet.payload for packet in again if packet.kind == "PUBLISH"] == [b"0", b"2"]
        reader.ping()  # no further packet arrives before the PINGRESP

    @statement("4.4.0-2", "4.3.3-4")
    def test_what_was_refused_is_not_sent_again(self, connect: Connect, name: str) -> None:
        """A message whose acknowledgement has an error code is not sent again."""
        reader, writer = connect(name, keep=True), connect()
        reader.subscribe(name, options=2)
        writer.publish(name, b"1", 1)
        writer.publish(name, b"2", 2)
        one, two = reader.publishes(2)
        reader.send(wire.acknowledgement("PUBACK", one.packet_id, 0x80))
        reader.send(wire.acknowledgement("PUBREC", two.packet_id, 0x80))
        reader.ping()
        reader.close()
        reader = connect(name, keep=True)
        writer.publish(name, b"3", 1)
        assert reader.expect("PUBLISH").payload == b"3"

    @statement("4.3.3-4")
    def test_a_pubrec_that_refuses_is_never_answered(self, broker: Broker, connect: Connect, name: str) -> None:
        """A PUBREC with an error code gets no PUBREL, whether or not its packet id is known."""
        reader, writer = connect(name, keep=True), connect()
        reader.subscribe(name, options=2)
        writer.publish(name, b"1", 2)
        [one] = reader.publishes(1)
        if not broker.strict:  # other servers may end the connection because of an unknown packet id
            reader.send(wire.acknowledgement("PUBREC", one.packet_id, 0x80))
            reader.ping()
            return
        reader.send(wire.acknowledgement("PUBREC", 77, 0x80))
        reader.ping()
        reader.send(wire.acknowledgement("PUBREC", one.packet_id))
        assert reader.expect("PUBREL").packet_id == one.packet_id
        reader.send(wire.acknowledgement("PUBREC", one.packet_id, 0x80))
        reader.ping()
        reader.close()
        reader = connect(name, keep=True)
        reader.ping()  # the server doesn't repeat the PUBREL
        reader.send(wire.acknowledgement("PUBREC", 77))
        assert (reader.expect("PUBREL").reason) == 0x92

    @both
    @statement("4.5.0-1")
    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_what_comes_together_with_a_disconnect_is_published(
        self, broker: Broker, connect: Connect, name: str, version: int, qos: int
    ) -> None:
        """A message sent together with a DISCONNECT in one segment is published."""
        if qos == 2 and not broker.strict:
            pytest.skip("a broker may publish QoS 2 messages when they are released")
        reader, writer = connect(version=version), connect(version=version)
        reader.subscribe(name)
        writer.send(
            wire.publish(name, b"1", qos=qos, packet_id=1, version=version),
            wire.publish(name, b"2", qos=qos, packet_id=2, version=version),
            wire.disconnect(version=version),
        )
        writer.ended()
        connect(version=version).publish(name, b"end")
        assert [packet.payload for packet in reader.publishes(3)] == [b"1", b"2", b"end"]

    @both
    @statement("4.3.2-4", "4.4.0-2")
    def test_what_is_acknowledged_together_with_a_disconnect_does_not_come_again(
        self, connect: Connect, name: str, version: int
    ) -> None:
        """A message is not sent again if its PUBACK came together with a DISCONNECT."""
        reader, writer = connect(name, version=version, keep=True), connect(version=version)
        reader.subscribe(name, options=1)
        writer.publish(name, b"x")
        reader.send(
            wire.acknowledgement("PUBACK", reader.expect("PUBLISH").packet_id), wire.disconnect(version=version)
        )
        reader.ended()
        reader = connect(name, version=version, keep=True)
        assert reader.connack.present
        reader.ping()

    @both
    @statement("4.6.0-2", "4.6.0-3", "4.6.0-5", "4.6.0-6", "4.5.0-1", "4.3.2-1", "4.3.3-1")
    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_messages_keep_their_order(self, connect: Connect, name: str, version: int, qos: int) -> None:
        """Messages and their acknowledgements keep their order, however many are in flight."""
        reader, writer = connect(version=version), connect(version=version)
        reader.subscribe(name, options=0)
        packets = [wire.publish(name, b"%d" % n, qos=qos, packet_id=n, version=version) for n in range(1, 101)]
        for first in range(0, 100, 10):
            writer.send(*packets[first : first + 10])
            if qos:
                kind = "PUBACK" if qos == 1 else "PUBREC"
                numbers = list(range(first + 1, first + 11))
                assert [writer.expect(kind).packet_id for _ in numbers] == numbers
                if qos == 2:
                    writer.send(*[wire.acknowledgement("PUBREL", number) for number in numbers])
                    assert [writer.expect("PUBCOMP").packet_id for _ in numbers] == numbers
        assert [int(packet.payload) for packet in reader.publishes(100)] == list(range(1, 101))

    @both
    @statement("4.6.0-4")
    def test_exchanges_go_on_in_the_order_of_their_receipts(self, connect: Connect, name: str, version: int) -> None:
        """PUBRELs are sent in the order of the PUBRECs, even if the messages were sent in another order."""
        reader, writer = connect(version=version), connect(version=version)
        reader.subscribe(name, options=2)
        for number in range(6):
            writer.publish(name, b"%d" % number, 2)
        ids = [packet.packet_id for packet in reader.publishes(6)]
        for group in ((ids[4],), (ids[2], ids[5], ids[0]), (ids[3], ids[1])):
            reader.send(*[wire.acknowledgement("PUBREC", packet_id) for packet_id in group])
            assert tuple(reader.expect("PUBREL").packet_id for _ in group) == group

    @both
    @needs("retain")
    @statement("3.3.1-5", "3.3.1-6", "3.3.1-7", "3.3.1-8", "3.3.1-9")
    def test_a_retained_message_is_set_replaced_and_removed(self, connect: Connect, name: str, version: int) -> None:
        """A retained message is stored, replaced by the next one, and removed by one without a payload."""
        writer = connect(version=version)

        def retained() -> list[tuple[bytes, int, bool]]:
            reader = connect(version=version)
            reader.subscribe(f"{name}/+", options=2)
            writer.publish(f"{name}/end", b"end", 0)
            found = []
            while (packet := reader.expect("PUBLISH")).payload != b"end":
                found.append((packet.payload, packet.qos, packet.retain))
            return found

        writer.publish(f"{name}/x", b"1", 1, retain=True)
        assert retained() == [(b"1", 1, True)]
        writer.publish(f"{name}/x", b"2", 2, retain=True)
        writer.publish(f"{name}/x", b"3", 1)
        assert retained() == [(b"2", 2, True)]
        writer.publish(f"{name}/x", b"4", 0, retain=True)
        writer.ping()
        assert retained() == [(b"4", 0, True)]
        writer.publish(f"{name}/x", b"", 1, retain=True)
        assert retained() == []

    @needs("retain")
    @statement("3.3.1-12", "3.3.1-13")
    def test_retain_as_published(self, connect: Connect, name: str) -> None:
        """With Retain As Published a message keeps its RETAIN flag; without this option the flag is 0."""
        plain, exact, writer = connect(), connect(), connect()
        plain.subscribe(name)
        exact.subscribe(name, options=AS_PUBLISHED)
        for retain in (True, False):
            writer.publish(name, b"x", 1, retain=retain)
            assert (plain.expect("PUBLISH").retain, exact.expect("PUBLISH").retain) == (False, retain)

    @statement("3.3.2-4", "3.3.2-15", "3.3.2-16", "3.3.2-17", "3.3.2-18", "3.3.2-20", "2.2.2-1")
    @pytest.mark.parametrize("qos", [0, 1, 2])
    def test_properties_go_on_unaltered(self, connect: Connect, name: str, qos: int) -> None:
        """The properties of a message reach its subscribers unaltered, and user properties in their order."""
        reader, writer = connect(), connect()
        reader.subscribe(name, options=qos)
        values: dict[str, wire.Value] = {
            "payload_format_indicator": 1,
            "content_type": "text/plain ☂",
            "response_topic": "answers/äöü",
            "correlation_data": bytes(range(256)),
            "user_property": [("b", "1"), ("a", ""), ("b", "0"), ("", "ﬁ")],
        }
        writer.publish(name, b"x", qos, **values)
        packet = reader.expect("PUBLISH")
        assert packet.properties == values
        reader.acknowledge(packet)
        writer.publish(name, b"x", qos)
        assert reader.expect("PUBLISH").properties == {}

    @statement("3.3.2-5", "3.3.2-6", "4.3.3-7", "4.3.3-13")
    def test_what_has_expired_is_not_sent(self, connect: Connect, name: str) -> None:
        """An expired message isn't sent, others carry their remaining seconds, and a begun exchange is completed."""
        away, here = connect(f"{name}-away", keep=True), connect(f"{name}-here", keep=True)
        away.subscribe(f"{name}/kept/#", options=1)
        away.leave()  # a message that was already sent doesn't expire
        here.subscribe(f"{name}/kept/long", options=1)
        begun, writer = connect(), connect()
        begun.subscribe(f"{name}/begun", options=2)
        writer.publish(f"{name}/kept/short", b"x", 1, message_expiry_interval=1)
        writer.publish(f"{name}/kept/long", b"x", 1, message_expiry_interval=10_000)
        packet = None
        while (
            packet is None or packet.payload == b"too late"
        ):  # on a slow machine the message may expire before it is sent
            writer.publish(f"{name}/begun", b"x", 2, message_expiry_interval=1)
            writer.publish(f"{name}/begun", b"too late", 0)
            packet = begun.expect("PUBLISH")
        assert begun.expect("PUBLISH").payload == b"too late"
        watcher = connect()
        watcher.subscribe(f"{name}/later")
        will = wire.Will(topic=f"{name}/later", properties={"will_delay_interval": 2})
        connect(f"{name}-will", will=will, keep=True).close()
        watcher.expect("PUBLISH")  # two seconds have passed by the server's clock
        begun.acknowledge(packet)
        begun.ping()
        for client in (f"{name}-away", f"{name}-here"):
            late = connect(client, keep=True).expect("PUBLISH")
            left = late.properties["message_expiry_interval"]
            assert isinstance(left, int)
            assert (late.topic, 0 < left <= 9_998) == (f"{name}/kept/long", True)

    @statement("3.3.2-12", "3.3.2-7", "3.3.2-9")
    def test_topic_aliases_of_a_publisher(self, connect: Connect, must_end: MustEnd, name: str) -> None:
        """A publisher may use all topic aliases that the server allows, and assign them again on its connection."""
        reader, writer = connect(), connect()
        reader.subscribe(f"{name}/#")
        most = most_aliases(writer)
        for alias in (1, most):
            writer.send(wire.publish(f"{name}/{alias}", topic_alias=alias), wire.publish("", topic_alias=alias))
        writer.send(wire.publish(f"{name}/new", topic_alias=1), wire.publish("", topic_alias=1))
        topics = [packet.topic for packet in reader.publishes(6)]
        assert topics == [f"{name}/1"] * 2 + [f"{name}/{most}"] * 2 + [f"{name}/new"] * 2
        other = connect()
        other.send(wire.publish("", topic_alias=1))
        must_end(other, 0x82)

    @statement("3.3.2-8", "3.2.2-17")
    def test_a_topic_alias_that_can_not_be(self, connect: Connect, must_end: MustEnd, name: str) -> None:
        """A topic alias of 0, or above the maximum that the server announced, ends the connection."""
        most = most_aliases(connect())
        for alias in {0, min(most + 1, 65_535), 65_535} - {most}:
            client = connect()
            client.send(wire.publish(name, topic_alias=alias))
            must_end(client, *((0x94,) if alias else (0x94, 0x81, 0x82)))

    @statement("3.1.2-26", "3.1.2-27", "3.3.2-10", "3.3.2-11", "3.3.2-3")
    @pytest.mark.parametrize("most", [0, 1, 5])
    def test_topic_aliases_to_a_subscriber(self, connect: Connect, name: str, most: int) -> None:
        """A subscriber gets no more topic aliases than it allows, and each alias keeps the topic of its first use."""
        reader, writer = connect(**({"topic_alias_maximum": most} if most else {})), connect()
        reader.subscribe(f"{name}/#")
        expected = [f"{name}/{n % 3}" for n in range(12)]
        for topic in expected:
            writer.publish(topic)
        topics: dict[int, str] = {}
        found = []
        for packet in reader.publishes(12):
            alias = packet.properties.get("topic_alias", 0)
            assert isinstance(alias, int)
            if "topic_alias" not in packet.properties:
                assert packet.topic
            else:
                assert 0 < alias <= most
                if packet.topic:
                    topics[alias] = packet.topic
            found.append(packet.topic or topics[alias])
        assert found == expected

    @statement("3.1.2-24", "3.1.2-25")
    def test_what_is_too_large_for_a_client_is_as_if_it_was_sent(self, connect: Connect, name: str) -> None:
        """A message too large for a client counts as delivered, and not towards the client's receive maximum."""
        reader, writer = connect(maximum_packet_size=100, receive_maximum=1), connect()
        reader.subscribe(name, options=1)
        for payload in (b"x" * 200, b"1", b"x" * 200, b"2"):
            writer.publish(name, payload)
        for expected in (b"1", b"2"):
            packet = reader.expect("PUBLISH")
            assert (packet.payload, packet.size <= 100) == (expected, True)
            reader.acknowledge(packet)

    @statement("3.3.4-9", "3.3.4-10", "4.9.0-1", "4.9.0-2", "4.9.0-3")
    @pytest.mark.parametrize("qos", [1, 2])
    def test_the_receive_maximum_of_a_subscriber(self, connect: Connect, name: str, qos: int) -> None:
        """At most as many messages are in flight as the subscriber allows; QoS 0 messages and replies still arrive."""
        reader, writer = connect(receive_maximum=2), connect()
        reader.subscribe(f"{name}/a", options=qos)
        reader.subscribe(f"{name}/b", options=0)
        for number in range(4):
            writer.publish(f"{name}/a", b"%d" % number, qos)
        first = reader.publishes(2)
        writer.publish(f"{name}/b", b"free")
        assert reader.expect("PUBLISH").payload == b"free"
        reader.ping()
        reader.send(wire.acknowledgement("PUBACK" if qos == 1 else "PUBREC", first[0].packet_id))
        if qos == 2:
            reader.expect("PUBREL")
            writer.publish(f"{name}/b", b"free")
            assert reader.expect("PUBLISH").payload == b"free"
            reader.send(wire.acknowledgement("PUBCOMP", first[0].packet_id))
        assert reader.expect("PUBLISH").payload == b"2"
        writer.publish(f"{name}/b", b"free")
        assert reader.expect("PUBLISH").payload == b"free"

    @statement("3.3.4-7", "3.3.4-8")
    def test_the_receive_maximum_of_the_server(self, connect: Connect, must_end: MustEnd, name: str) -> None:
        """A client that exceeds the server's receive maximum with QoS 2 messages is disconnected."""
        client = connect()
        most = client.connack.properties.get("receive_maximum", 65_535)
        assert isinstance(most, int)
        client.send(*[wire.publish(name, qos=2, packet_id=number) for number in range(1, min(most + 2, 65_536))])
        if most < 65_535:
            must_end(client, 0x93)

    @both
    @statement("4.7.2-1", "4.7.3-4", "4.7.0-1")
    def test_what_a_wildcard_matches(self, broker: Broker, connect: Connect, name: str, version: int) -> None:
        """A wildcard doesn't match topics with a leading dollar sign, and topics aren't normalised."""
        reader, writer = connect(version=version), connect(version=version)
        exact = connect(version=version)
        reader.subscribe(f"+/{name}")
        exact.subscribe(f"{name}/\u00e9")
        for topic in (f"$x/{name}", f"{name}/e\u0301", f"{name}/\u00c9", f"{name}/\u00e9", f"x/{name}"):
            assert writer.publish(topic).reason in (0, 0x10) or (topic.startswith("$") and not broker.strict)
        assert reader.expect("PUBLISH").topic == f"x/{name}"
        assert exact.expect("PUBLISH").topic == f"{name}/\u00e9"

    @both
    @statement("3.3.2-3", "1.5.4-3", "4.7.3-3")
    def test_topics_are_kept_as_they_are(self, connect: Connect, name: str, version: int) -> None:
        """Topics keep spaces, byte order marks and empty levels, and may have the maximum length."""
        reader, writer = connect(version=version), connect(version=version)
        topics = ["\ufeffx", f"{name}//a/", f"/{name}", f"{name}/ a b ", f"{name}/" + "l" * (65_535 - len(name) - 1)]
        for topic in topics:
            reader.subscribe(topic)
            writer.publish(topic)
            assert reader.expect("PUBLISH").topic == topic

    @both
    @statement("4.3.3-11")
    def test_a_pubrel_of_an_unknown_id_is_answered(self, connect: Connect, version: int) -> None:
        """A PUBREL of an unknown packet id is answered with a PUBCOMP of that id."""
        client = connect(version=version)
        client.send(wire.acknowledgement("PUBREL", 77))
        packet = client.expect("PUBCOMP")
        assert packet.packet_id == 77
        assert packet.reason in (0, 0x92)
