"""Statements of the standard about connecting, sessions, wills and keep alive, over raw sockets."""

from __future__ import annotations

import pytest
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import NEVER
from topicstore_conformance.mqtt.statements import statement

both = pytest.mark.parametrize("version", [4, 5])
MALFORMED = {
    "a length of five bytes": (lambda _: b"\x30\xff\xff\xff\xff\x01", 0x81),
    "a reserved type": (lambda _: b"\0\0", 0x81),
    "a packet of the server": (lambda _: b"\xd0\0", 0x82),
    "a topic with a wildcard": (lambda version: wire.publish("a/#", version=version), 0x90),
    "a topic that isn't UTF-8": (lambda version: wire.frame("PUBLISH", 0, b"\0\2\xc3\x28", bytes(version == 5)), 0x81),
    "no filter": (lambda version: wire.subscribe(7, [], version=version), 0x82),
}
"""One fault for each step of reading a packet, with its reason code; `protocol` tests every fault of each packet."""


@both
@statement("3.1.0-1")
def test_the_first_packet_is_connect(stranger, version: int) -> None:  # type: ignore[no-untyped-def]
    """A first packet other than CONNECT ends the connection without an answer."""
    for first in (wire.PINGREQ, wire.publish("a", version=version), wire.disconnect(version=version)):
        client = stranger(version)
        client.send(first)
        assert client.ended() is None


@both
@statement("3.1.0-2", "3.2.0-2")
def test_a_second_connect_is_a_protocol_error(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    client = connect(name, version=version)
    client.send(wire.connect(name, version=version))
    assert client.farewell() == (None if version == 4 else ("DISCONNECT", 0x82))


@both
@statement("3.1.4-1", "3.2.2-6", "3.2.2-7")
def test_a_connect_that_does_not_conform_is_refused(stranger, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    """A CONNECT that violates the standard is refused, with a CONNACK where the version has a code for it.

    The tests in `protocol` cover each violation.
    """
    malformed, unsupported = (None, 1) if version == 4 else (("CONNACK", 0x81), 0x84)
    for protocol, level, flags, answer in (
        ("MQTT", version, 3, malformed),
        ("MQTT", version, 0x82, malformed),
        ("mqtt", version, 2, None),
        ("MQTT", 2 if version == 4 else 6, 2, ("CONNACK", unsupported)),
    ):
        client = stranger(version)
        rest = (wire.properties() if version == 5 else b"") + wire.binary(name)
        client.send(wire.frame("CONNECT", 0, wire.binary(protocol), bytes((level, flags, 0, 0)), rest))
        assert client.farewell() == answer


@both
@statement("3.1.2-4", "3.1.2-5", "3.1.2-6", "3.1.2-23", "3.1.3-2", "3.1.4-4", "3.1.4-5")
@statement("3.2.0-1", "3.2.2-1", "3.2.2-2", "3.2.2-3")
def test_a_session_is_new_resumed_or_discarded(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
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
def test_clients_without_an_id_get_one_each(connect) -> None:  # type: ignore[no-untyped-def]
    first, second = connect(), connect()
    ids = [client.connack.properties["assigned_client_identifier"] for client in (first, second)]
    assert len(set(ids)) == 2
    assert all(ids)
    named = connect(ids[0])  # a client may connect with an id that the server assigned
    assert "assigned_client_identifier" not in named.connack.properties
    assert first.farewell() == ("DISCONNECT", 0x8E)


@statement("3.1.3-8")
def test_without_an_id_a_client_of_version_4_must_begin_anew(connect, stranger) -> None:  # type: ignore[no-untyped-def]
    connect(version=4)
    client = stranger(4)
    client.send(wire.connect("", version=4, clean=False))
    assert client.farewell() == ("CONNACK", 2)


@both
@statement("3.1.4-3", "4.13.2-1")
def test_a_second_client_of_an_id_takes_over(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    first = connect(name, version=version, keep=True)
    first.subscribe(name, options=1)
    second = connect(name, version=version, keep=True)
    assert second.connack.present
    assert first.farewell() == (None if version == 4 else ("DISCONNECT", 0x8E))
    connect(version=version).publish(name, b"x")
    assert second.expect("PUBLISH").payload == b"x"


@statement("3.1.4-2", "3.1.4-6", "4.12.0-1", "4.12.0-4", "3.14.0-1")
def test_enhanced_authentication_is_refused(stranger, name: str, connect) -> None:  # type: ignore[no-untyped-def]
    """A CONNECT with enhanced authentication is refused, and packets sent after it are not processed."""
    watcher = connect()
    watcher.subscribe(f"{name}/#")
    client = stranger()
    client.send(wire.connect(name, authentication_method="x"), wire.publish(f"{name}/early"))
    last = client.ended()
    assert last.kind == "CONNACK"
    assert last.reason in (0x8C, 0x87)
    watcher.send(wire.publish(f"{name}/end"))
    assert watcher.expect("PUBLISH").topic == f"{name}/end"


@statement("4.12.0-6", "4.12.0-7", "3.15.1-1")
def test_auth_without_a_method_is_a_protocol_error(connect) -> None:  # type: ignore[no-untyped-def]
    client = connect()
    assert "authentication_method" not in client.connack.properties
    client.send(wire.auth(0x19, authentication_method="x"))
    assert client.farewell() == ("DISCONNECT", 0x82)
    client = connect()
    client.send(wire.frame("AUTH", 1, b"\x19", wire.properties(authentication_method="x")))
    assert client.farewell() == ("DISCONNECT", 0x81)


@both
@statement("3.1.2-7", "3.1.2-8", "3.1.2-14", "3.1.2-15")
@pytest.mark.parametrize("retain", [False, True])
def test_a_will_is_published_when_the_network_fails(connect, name: str, version: int, retain: bool) -> None:  # type: ignore[no-untyped-def]
    """A will is published when the network connection fails, as a retained message if the client requested that."""
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
def test_no_will_after_an_orderly_end(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    watcher = connect(version=version)
    watcher.subscribe(f"{name}/#")
    connect(version=version, will=wire.Will(topic=f"{name}/a", payload=b"x")).leave()
    connect(version=version).close()
    connect(version=version, will=wire.Will(topic=f"{name}/b", payload=b"y")).close()
    assert watcher.expect("PUBLISH").topic == f"{name}/b"


@statement("3.14.2-1", "3.1.2-8")
def test_a_client_may_ask_for_its_will(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """A client may request its will by the reason code 0x04 in its DISCONNECT."""
    watcher = connect()
    watcher.subscribe(name)
    connect(will=wire.Will(topic=name, payload=b"x")).leave(0x04)
    assert watcher.expect("PUBLISH").payload == b"x"


@statement("3.1.3-9", "3.1.2-8")
def test_a_delayed_will_is_not_sent_if_the_client_comes_back(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """A delayed will is not sent if the client returns before the delay has passed.

    The delay is an hour here, so only the end of the session could send the will.
    """
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
def test_a_session_ends_when_it_expires_and_with_it_comes_its_will(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """When a session expires, its will is published, even if the will's delay is longer."""
    watcher = connect()
    watcher.subscribe(f"{name}/#")
    will = wire.Will(topic=f"{name}/x", payload=b"x", properties={"will_delay_interval": 3600})
    connect(name, will=will, session_expiry_interval=1).close()
    assert watcher.expect("PUBLISH").payload == b"x"
    assert not connect(name, clean=False).connack.present


@statement("3.1.2-9", "3.1.3-10")
def test_a_will_keeps_its_properties(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    watcher = connect()
    watcher.subscribe(name)
    values: dict[str, wire.Value] = {"content_type": "text", "user_property": [("b", "1"), ("a", "2"), ("b", "0")]}
    connect(will=wire.Will(topic=name, properties=values)).close()
    assert watcher.expect("PUBLISH").properties == values


@both
@statement("3.1.2-22", "3.2.2-22")
def test_a_silent_client_is_disconnected(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    """A silent client is disconnected, and its will is published; a client without a keep alive stays connected."""
    watcher = connect(version=version)
    watcher.subscribe(name)
    client = connect(version=version, keep_alive=1, will=wire.Will(topic=name, payload=b"x"))
    assert client.farewell() == (None if version == 4 else ("DISCONNECT", 0x8D))
    assert watcher.expect("PUBLISH").payload == b"x"
    watcher.ping()


@both
@statement("3.12.4-1")
def test_a_ping_is_answered(connect, version: int) -> None:  # type: ignore[no-untyped-def]
    client = connect(version=version)
    client.send(wire.PINGREQ * 3)
    for _ in range(3):
        client.expect("PINGRESP")


@both
@statement("3.14.4-1", "3.14.4-2")
def test_after_disconnect_nothing_is_taken(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    watcher = connect(version=version)
    watcher.subscribe(f"{name}/#")
    client = connect(version=version)
    client.send(wire.disconnect(version=version), wire.publish(f"{name}/late", version=version))
    assert client.ended() is None
    watcher.send(wire.publish(f"{name}/end", version=version))
    assert watcher.expect("PUBLISH").topic == f"{name}/end"


@statement("3.1.2-23", "4.1.0-1")
def test_an_expiry_can_be_changed_when_leaving(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """A DISCONNECT may change the expiry interval, unless it was 0."""
    connect(name, session_expiry_interval=NEVER).leave(session_expiry_interval=0)
    assert not connect(name, clean=False, session_expiry_interval=1000).connack.present
    client = connect(f"{name}-2")
    client.send(wire.disconnect(session_expiry_interval=100))
    assert client.farewell() == ("DISCONNECT", 0x82)


@statement("3.1.2-28", "3.1.2-29")
def test_what_was_not_asked_for_is_not_sent(connect) -> None:  # type: ignore[no-untyped-def]
    client = connect(request_problem_information=0)
    assert "response_information" not in client.connack.properties
    number = client.next_id()
    client.send(wire.subscribe(number, [("a/#/b", 0)]))
    packet = client.receive()
    if packet.kind == "SUBACK":  # a DISCONNECT may have a reason string
        assert packet.properties == {}


@both
@statement("3.14.2-2", "4.13.1-1")
@pytest.mark.parametrize("bad", MALFORMED)
def test_what_must_not_be_ends_its_connection(connect, name: str, version: int, bad: str) -> None:  # type: ignore[no-untyped-def]
    """A malformed packet ends its connection, with the reason code in MQTT 5.

    Packets after it are not processed, and no other connection ends.
    """
    good, client = connect(version=version), connect(version=version)
    good.subscribe(f"{name}/#")
    packet, reason = MALFORMED[bad]
    client.send(packet(version), wire.publish(f"{name}/behind", version=version), wire.PINGREQ)
    last = client.ended()
    assert (last is None) == (version == 4)
    if last is not None:
        assert (last.kind, last.reason, "session_expiry_interval" in last.properties) == ("DISCONNECT", reason, False)
    good.send(wire.publish(f"{name}/end", version=version))
    assert good.expect("PUBLISH").topic == f"{name}/end"


@statement("3.2.2-8")
def test_what_the_server_announces(connect) -> None:  # type: ignore[no-untyped-def]
    """The CONNACK restricts nothing: all QoS, retained messages and all kinds of subscriptions are available."""
    values = connect().connack.properties
    for absent in ("maximum_qos", "authentication_method", "response_information"):
        assert absent not in values
    for available in ("retain", "wildcard_subscription", "subscription_identifier", "shared_subscription"):
        assert values.get(f"{available}_available", 1) == 1
    assert values.get("receive_maximum", 65_535) > 0
    assert values.get("topic_alias_maximum", 0) > 0


@statement("3.2.2-19", "3.2.2-20", "3.9.2-1", "3.9.2-2", "3.14.2-3", "3.14.2-4", "3.11.2-1", "3.11.2-2")
def test_explanations_are_left_out_where_they_are_too_long(connect, stranger, name: str) -> None:  # type: ignore[no-untyped-def]
    """Reason strings and user properties are omitted if the packet would exceed the client's maximum packet size."""
    client = stranger()
    client.send(wire.connect(name, authentication_method="x", maximum_packet_size=8))
    assert client.ended().size <= 8
    client = connect(maximum_packet_size=60)
    number = client.next_id()
    client.send(wire.subscribe(number, [("a/#/b", 0)] * 50), wire.unsubscribe(number, ["x"] * 50))
    assert client.expect("SUBACK").size <= 60
    assert client.expect("UNSUBACK").size <= 60
    client.send(b"\x00\x00")
    last = client.ended()
    assert (last.kind, last.size <= 60) == ("DISCONNECT", True)


@statement("3.1.2-24")
def test_a_client_whose_connack_is_too_large_is_refused(connect, stranger, name: str) -> None:  # type: ignore[no-untyped-def]
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
