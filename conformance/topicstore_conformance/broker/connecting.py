"""Tests of statements about connecting, sessions, wills and keep alive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import NEVER
from topicstore_conformance.mqtt.statements import statement

from .fixtures import Broker, Connect, Fixtures, MustEnd, both

__all__ = ["Connecting"]

MALFORMED: dict[str, tuple[Callable[[int], bytes], int]] = {
    "a length of five bytes": (lambda _: b"\x30\xff\xff\xff\xff\x01", 0x81),
    "a reserved type": (lambda _: b"\0\0", 0x81),
    "a packet of the server": (lambda _: b"\xd0\0", 0x82),
    "a topic with a wildcard": (lambda version: wire.publish("a/#", version=version), 0x90),
    "a topic that isn't UTF-8": (lambda version: wire.frame("PUBLISH", 0, b"\0\2\xc3\x28", bytes(version == 5)), 0x81),
    "no filter": (lambda version: wire.subscribe(7, [], version=version), 0x82),
}
"""One fault for each step of reading a packet, with its reason code."""


class Connecting(Fixtures):
    """Tests of connecting, sessions, wills and keep alive."""

    @both
    @statement("3.1.0-1")
    def test_the_first_packet_is_connect(self, stranger: Connect, version: int) -> None:
        """A first packet other than CONNECT ends the connection without an answer."""
        for first in (wire.PINGREQ, wire.publish("a", version=version), wire.disconnect(version=version)):
            client = stranger(version)
            client.send(first)
            assert client.ended() is None

    @both
    @statement("3.1.0-2", "3.2.0-2")
    def test_a_second_connect_is_a_protocol_error(
        self, connect: Connect, must_end: MustEnd, name: str, version: int
    ) -> None:
        """A second CONNECT ends the connection, and no second CONNACK is sent."""
        client = connect(name, version=version)
        client.send(wire.connect(name, version=version))
        must_end(client, 0x82)

    @both
    @statement("3.1.4-1", "3.2.2-6", "3.2.2-7")
    def test_a_connect_that_does_not_conform_is_refused(
        self, broker: Broker, stranger: Connect, name: str, version: int
    ) -> None:
        """A CONNECT that violates the standard ends the connection, after a CONNACK with an error code or none."""
        malformed, unsupported = (None, 1) if version == 4 else (0x81, 0x84)
        for protocol, level, flags, answer in (
            ("MQTT", version, 3, malformed),
            ("MQTT", version, 0x82, malformed),
            ("mqtt", version, 2, None),
            ("MQTT", 2 if version == 4 else 6, 2, unsupported),
        ):
            client = stranger(version)
            rest = (wire.properties() if version == 5 else b"") + wire.binary(name)
            client.send(wire.frame("CONNECT", 0, wire.binary(protocol), bytes((level, flags, 0, 0)), rest))
            answered = client.rest()
            assert not answered or (answered[0], answered[2], answered[3] > 0) == (0x20, 0, True)
            assert (answered[3] if answered else None) == answer or not broker.strict

    @both
    @statement("3.1.2-4", "3.1.2-5", "3.1.2-6", "3.1.2-23", "3.1.3-2", "3.1.4-4", "3.1.4-5")
    @statement("3.2.0-1", "3.2.2-1", "3.2.2-2", "3.2.2-3")
    def test_a_session_is_new_resumed_or_discarded(self, connect: Connect, name: str, version: int) -> None:
        """Session Present tells a client whether its session is new, resumed or discarded."""
        first = connect(name, version=version, keep=True)
        assert not first.connack.present
        first.subscribe(name, options=1)
        first.leave()
        publisher = connect(version=version)
        publisher.publish(name, b"1")
        second = connect(name, version=version, keep=True)
        assert second.connack.present
        packet = second.expect("PUBLISH")
        assert packet.payload == b"1"
        second.acknowledge(packet)
        second.leave()
        third = connect(name, version=version)
        assert not third.connack.present
        publisher.publish(name, b"2")
        third.subscribe(f"{name}/end", options=1)
        publisher.publish(f"{name}/end", b"3")
        assert third.expect("PUBLISH").payload == b"3"

    @statement("3.1.3-6", "3.1.3-7", "3.2.2-16")
    def test_clients_without_an_id_get_one_each(self, connect: Connect, must_end: MustEnd) -> None:
        """A client that connects without an id is assigned an id of its own, which the CONNACK names."""
        first, second = connect(""), connect("")
        ids = [str(client.connack.properties["assigned_client_identifier"]) for client in (first, second)]
        assert len(set(ids)) == 2
        assert all(ids)
        named = connect(ids[0])  # a client may connect with an id that the server assigned
        assert "assigned_client_identifier" not in named.connack.properties
        must_end(first, 0x8E)

    @statement("3.1.3-8")
    @pytest.mark.parametrize("version", [4], ids=["MQTT 3.1.1"])
    def test_without_an_id_a_client_of_version_4_must_begin_anew(
        self, broker: Broker, stranger: Connect, version: int
    ) -> None:
        """A client of MQTT 3.1.1 without an id and without Clean Session is refused with the code 2."""
        if broker.strict:  # other servers may refuse every client without an id
            stranger(version).connect("")
        client = stranger(version)
        client.send(wire.connect("", version=4, clean=False))
        assert client.farewell() == ("CONNACK", 2)

    @both
    @statement("3.1.4-3", "4.13.2-1")
    def test_a_second_client_of_an_id_takes_over(
        self, connect: Connect, must_end: MustEnd, name: str, version: int
    ) -> None:
        """A second client of an id takes the session over, and the connection of the first ends."""
        first = connect(name, version=version, keep=True)
        first.subscribe(name, options=1)
        second = connect(name, version=version, keep=True)
        assert second.connack.present
        must_end(first, 0x8E)
        connect(version=version).publish(name, b"x")
        assert second.expect("PUBLISH").payload == b"x"

    @statement("3.1.4-2", "3.1.4-6", "4.12.0-1", "4.12.0-4", "3.14.0-1")
    def test_enhanced_authentication_is_refused(
        self, broker: Broker, stranger: Connect, name: str, connect: Connect
    ) -> None:
        """A CONNECT with an unknown authentication method is refused, and packets after it are not processed."""
        watcher = connect()
        watcher.subscribe(f"{name}/#")
        client = stranger()
        client.send(wire.connect(name, authentication_method="x"), wire.publish(f"{name}/early"))
        last = client.ended()
        assert last is None or (last.kind, last.reason in (0x8C, 0x87)) == ("CONNACK", True)
        assert last is not None or not broker.strict
        watcher.send(wire.publish(f"{name}/end"))
        assert watcher.expect("PUBLISH").topic == f"{name}/end"

    @statement("4.12.0-6", "4.12.0-7", "3.15.1-1")
    def test_auth_without_a_method_is_a_protocol_error(self, connect: Connect, must_end: MustEnd) -> None:
        """An AUTH ends the connection of a client that named no method of authentication in its CONNECT."""
        client = connect()
        assert "authentication_method" not in client.connack.properties
        client.send(wire.auth(0x19, authentication_method="x"))
        must_end(client, 0x82)
        client = connect()
        client.send(wire.frame("AUTH", 1, b"\x19", wire.properties(authentication_method="x")))
        must_end(client, 0x81)

    @both
    @statement("3.1.2-7", "3.1.2-8", "3.1.2-14", "3.1.2-15")
    @pytest.mark.parametrize("retain", [False, True])
    def test_a_will_is_published_when_the_network_fails(
        self, connect: Connect, name: str, version: int, retain: bool
    ) -> None:
        """A will is published when the network connection fails, as a retained message if the will has that flag."""
        watcher = connect(version=version)
        watcher.subscribe(name, options=2)
        connect(version=version, will=wire.Will(topic=name, payload=b"gone", qos=2, retain=retain)).close()
        packet = watcher.expect("PUBLISH")
        assert (packet.topic, packet.payload, packet.qos, packet.retain) == (name, b"gone", 2, False)
        late = connect(version=version)
        late.subscribe(name)
        late.send(wire.publish(name, b"end", version=version))
        found = [(packet.payload, packet.retain) for packet in late.publishes(1 + retain)]
        assert found == [(b"gone", True)] * retain + [(b"end", False)]

    @both
    @statement("3.1.2-10", "3.1.2-8", "3.14.4-3")
    def test_no_will_after_an_orderly_end(self, connect: Connect, name: str, version: int) -> None:
        """After a DISCONNECT the will of the client is deleted and not published."""
        watcher = connect(version=version)
        watcher.subscribe(f"{name}/#")
        connect(version=version, will=wire.Will(topic=f"{name}/a", payload=b"x")).leave()
        connect(version=version).close()
        connect(version=version, will=wire.Will(topic=f"{name}/b", payload=b"y")).close()
        assert watcher.expect("PUBLISH").topic == f"{name}/b"

    @statement("3.14.2-1", "3.1.2-8")
    def test_a_client_may_ask_for_its_will(self, connect: Connect, name: str) -> None:
        """A client may request its will by the reason code 0x04 in its DISCONNECT."""
        watcher = connect()
        watcher.subscribe(name)
        connect(will=wire.Will(topic=name, payload=b"x")).leave(0x04)
        assert watcher.expect("PUBLISH").payload == b"x"

    @statement("3.1.3-9", "3.1.2-8")
    def test_a_delayed_will_is_not_sent_if_the_client_comes_back(self, connect: Connect, name: str) -> None:
        """A delayed will is not sent if the client returns before the delay has passed."""
        # The delay is an hour, so only the end of the session could send the will.
        watcher = connect()
        watcher.subscribe(f"{name}/#")
        will = wire.Will(topic=f"{name}/will", payload=b"x", properties={"will_delay_interval": 3600})
        connect(name, will=will, session_expiry_interval=NEVER).close()
        back = connect(name, keep=True)
        assert back.connack.present
        back.leave(session_expiry_interval=0)
        assert not connect(name, clean=False).connack.present
        connect(will=wire.Will(topic=f"{name}/end")).close()
        assert watcher.expect("PUBLISH").topic == f"{name}/end"

    @statement("3.1.2-8", "4.1.0-2")
    def test_a_session_ends_when_it_expires_and_with_it_comes_its_will(self, connect: Connect, name: str) -> None:
        """When a session expires, its will is published, even if the will's delay is longer."""
        watcher = connect()
        watcher.subscribe(f"{name}/#")
        will = wire.Will(topic=f"{name}/x", payload=b"x", properties={"will_delay_interval": 3600})
        connect(name, will=will, session_expiry_interval=1).close()
        assert watcher.expect("PUBLISH").payload == b"x"
        assert not connect(name, clean=False).connack.present

    @statement("3.1.2-9", "3.1.3-10")
    def test_a_will_keeps_its_properties(self, connect: Connect, name: str) -> None:
        """A will is published with its properties, and with its user properties in their order."""
        watcher = connect()
        watcher.subscribe(name)
        values: dict[str, wire.Value] = {"content_type": "text", "user_property": [("b", "1"), ("a", "2"), ("b", "0")]}
        connect(will=wire.Will(topic=name, properties=values)).close()
        assert watcher.expect("PUBLISH").properties == values

    @both
    @statement("3.1.2-22", "3.2.2-22")
    def test_a_silent_client_is_disconnected(
        self, connect: Connect, must_end: MustEnd, name: str, version: int
    ) -> None:
        """A silent client is disconnected, and its will is published; a client without a keep alive stays connected."""
        watcher = connect(version=version)
        watcher.subscribe(name)
        client = connect(version=version, keep_alive=1, will=wire.Will(topic=name, payload=b"x"))
        must_end(client, 0x8D)
        assert watcher.expect("PUBLISH").payload == b"x"
        watcher.ping()

    @both
    @statement("3.12.4-1")
    def test_a_ping_is_answered(self, connect: Connect, version: int) -> None:
        """Each PINGREQ is answered with a PINGRESP."""
        client = connect(version=version)
        client.send(wire.PINGREQ * 3)
        for _ in range(3):
            client.expect("PINGRESP")

    @both
    @statement("3.14.4-1", "3.14.4-2")
    def test_after_disconnect_nothing_is_taken(self, connect: Connect, name: str, version: int) -> None:
        """After a DISCONNECT the connection ends, and packets that came behind it are not processed."""
        watcher = connect(version=version)
        watcher.subscribe(f"{name}/#")
        client = connect(version=version)
        client.send(wire.disconnect(version=version), wire.publish(f"{name}/late", version=version))
        assert client.ended() is None
        watcher.send(wire.publish(f"{name}/end", version=version))
        assert watcher.expect("PUBLISH").topic == f"{name}/end"

    @statement("3.1.2-23", "4.1.0-1")
    def test_an_expiry_can_be_changed_when_leaving(self, connect: Connect, must_end: MustEnd, name: str) -> None:
        """A DISCONNECT may change the expiry interval, unless it was 0."""
        connect(name, session_expiry_interval=NEVER).leave(session_expiry_interval=0)
        assert not connect(name, clean=False, session_expiry_interval=1000).connack.present
        client = connect(f"{name}-2")
        client.send(wire.disconnect(session_expiry_interval=100))
        must_end(client, 0x82)

    @statement("3.1.2-28", "3.1.2-29")
    def test_what_was_not_asked_for_is_not_sent(self, connect: Connect) -> None:
        """Response information and explanations that the client didn't ask for are not sent."""
        client = connect(request_problem_information=0)
        assert "response_information" not in client.connack.properties
        number = client.next_id()
        client.send(wire.subscribe(number, [("a/#/b", 0)]))
        packet = client.receive()
        if packet is not None and packet.kind == "SUBACK":  # a DISCONNECT may have a reason string
            assert packet.properties == {}

    @both
    @statement("3.14.2-2", "4.13.1-1")
    @pytest.mark.parametrize("bad", MALFORMED)
    def test_what_must_not_be_ends_its_connection(
        self, broker: Broker, connect: Connect, name: str, version: int, bad: str
    ) -> None:
        """A malformed packet ends its connection, and no other one, and packets behind it are not processed."""
        good, client = connect(version=version), connect(version=version)
        good.subscribe(f"{name}/#")
        packet, reason = MALFORMED[bad]
        client.send(packet(version), wire.publish(f"{name}/behind", version=version), wire.PINGREQ)
        last = client.ended()
        assert last is None or version == 5
        assert last is not None or version == 4 or not broker.strict
        if last is not None:
            assert (last.kind, "session_expiry_interval" in last.properties) == ("DISCONNECT", False)
            assert last.reason == reason if broker.strict else last.reason >= 0x80
        good.send(wire.publish(f"{name}/end", version=version))
        assert good.expect("PUBLISH").topic == f"{name}/end"

    @statement("3.2.2-19", "3.2.2-20", "3.9.2-1", "3.9.2-2", "3.14.2-3", "3.14.2-4", "3.11.2-1", "3.11.2-2")
    def test_explanations_are_left_out_where_they_are_too_long(
        self, broker: Broker, connect: Connect, stranger: Connect, name: str
    ) -> None:
        """Reason strings and user properties are omitted where they would exceed the client's maximum packet size."""
        client = stranger()
        client.send(wire.connect(name, authentication_method="x", maximum_packet_size=8))
        last = client.ended()
        assert last is None or last.size <= 8
        client = connect(maximum_packet_size=60)
        number = client.next_id()
        text = "a/#/b" if broker.strict else name  # Other servers may end the connection because of an invalid filter.
        client.send(wire.subscribe(number, [(text, 0)] * 50), wire.unsubscribe(number, ["x"] * 50))
        assert client.expect("SUBACK").size <= 60
        assert client.expect("UNSUBACK").size <= 60
        client.send(b"\x00\x00")
        last = client.ended()
        assert last is None or (last.kind, last.size <= 60) == ("DISCONNECT", True)
        assert last is not None or not broker.strict
