"""Statements of the standard about subscriptions: answers, options, overlaps, and sharing."""

from __future__ import annotations

import pytest
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.statements import statement

NO_LOCAL, ONLY_IF_NEW, NO_RETAINED = 4, 0x10, 0x20
"""Subscription options (section 3.8.3.1)."""
both = pytest.mark.parametrize("version", [4, 5])
BAD_FILTERS = ["a/#/b", "a+", "", "a/\0"]
BAD_SHARES = ["$share/", "$share//a", "$share/g", "$share/+/a"]


def until(client: RawClient, payload: bytes) -> list[wire.Packet]:
    """Return the messages that arrive before the one with this payload."""
    found = []
    while (packet := client.expect("PUBLISH")).payload != payload:
        found.append(packet)
    return found


@both
@statement("3.8.4-1", "3.8.4-2", "3.8.4-5", "3.8.4-6", "3.8.4-7", "3.9.3-1", "3.9.3-2", "2.2.1-6")
def test_each_filter_is_answered_in_its_place(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    client = connect(version=version)
    rows = [(f"{name}/{n}", n % 3) for n in range(30)]
    client.send(wire.subscribe(500, rows, version=version))
    answer = client.expect("SUBACK")
    assert (answer.packet_id, answer.reasons) == (500, tuple(options for _, options in rows))


@statement("3.1.2-24")
@pytest.mark.parametrize("make", [lambda rows: wire.subscribe(1, rows), lambda rows: wire.unsubscribe(1, dict(rows))])
def test_an_answer_that_is_too_large_for_a_client_is_not_sent(connect, name: str, make: object) -> None:  # type: ignore[no-untyped-def]
    """An answer larger than the client's maximum packet size isn't sent; the connection ends with the reason."""
    client = connect(name, maximum_packet_size=40)
    rows = [(f"{name}/{n}", 1) for n in range(36)]
    client.send(make(rows[:35]))  # type: ignore[operator]
    assert client.receive().size == 40
    client.send(make(rows))  # type: ignore[operator]
    answer = client.expect("DISCONNECT")
    assert (answer.reason, answer.size <= 40) == (0x95, True)


@both
@statement("4.7.1-1", "4.7.1-2", "4.7.3-1", "4.7.3-2", "3.8.3-1")
@pytest.mark.parametrize("text", BAD_FILTERS)
def test_a_filter_that_can_not_be(connect, name: str, version: int, text: str) -> None:  # type: ignore[no-untyped-def]
    """An invalid filter is refused in the SUBACK, which grants the other filters, or the connection ends."""
    client = connect(version=version)
    client.send(wire.subscribe(1, [(f"{name}/a", 1), (text, 0), (f"{name}/b", 2)], version=version))
    packet = client.receive()
    if packet is None or packet.kind == "DISCONNECT":
        assert version == 4 or packet.reason in (0x81, 0x82, 0x8F)
    else:
        assert (packet.kind, packet.reasons) == ("SUBACK", (1, 0x8F if version == 5 else 0x80, 2))


@statement("4.8.2-1", "4.8.2-2")
@pytest.mark.parametrize("text", BAD_SHARES)
def test_a_share_that_can_not_be(connect, text: str) -> None:  # type: ignore[no-untyped-def]
    """A shared subscription without a name or a filter is refused."""
    client = connect()
    client.send(wire.subscribe(1, [(text, 0)]))
    packet = client.receive()
    if packet.kind == "DISCONNECT":
        assert packet.reason in (0x81, 0x82, 0x8F)
    else:
        assert packet.reasons in ((0x8F,), (0x80,))


@both
@statement("3.10.4-1", "3.10.4-2", "3.10.4-4", "3.10.4-5", "3.10.4-6", "3.11.3-1", "3.11.3-2")
def test_filters_are_removed_character_by_character(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    client, writer = connect(version=version), connect(version=version)
    client.subscribe(f"{name}/+", f"{name}/b", f"{name}/end", options=1)
    client.send(wire.unsubscribe(77, [f"{name}/+", f"{name}/a", f"{name}/B"], version=version))
    answer = client.expect("UNSUBACK")
    assert answer.packet_id == 77
    assert answer.reasons == ((0, 0x11, 0x11) if version == 5 else ())
    for level in ("a", "b", "end"):
        writer.publish(f"{name}/{level}", level.encode())
    assert [packet.topic for packet in until(client, b"end")] == [f"{name}/b"]


@both
@statement("3.10.4-3")
def test_what_was_begun_is_delivered_after_unsubscribing(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    client, writer = connect(name, version=version, keep=True), connect(version=version)
    client.subscribe(name, options=2)
    writer.publish(name, b"x", 2)
    first = client.expect("PUBLISH")
    client.send(wire.unsubscribe(9, [name], version=version))
    client.expect("UNSUBACK")
    client.close()
    client = connect(name, version=version, keep=True)
    again = client.expect("PUBLISH")
    assert (again.packet_id, again.payload, again.dup) == (first.packet_id, b"x", True)
    client.acknowledge(again)
    client.ping()


@both
@statement("3.8.4-3", "3.8.4-4")
def test_a_subscription_is_replaced(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    """Subscribing again changes the QoS and sends retained messages again."""
    client, writer = connect(version=version), connect(version=version)
    writer.publish(name, b"kept", 1, retain=True)
    for qos in (0, 1, 0):
        assert client.subscribe(name, options=qos) == (qos,)
        packet = client.expect("PUBLISH")
        assert (packet.payload, packet.qos, packet.retain) == (b"kept", qos, True)
        client.acknowledge(packet)
        writer.publish(name, b"new", 1)
        packet = client.expect("PUBLISH")
        assert (packet.payload, packet.qos) == (b"new", qos)
        client.acknowledge(packet)
    client.ping()


@statement("3.3.1-9", "3.3.1-10", "3.3.1-11", "3.8.4-4")
def test_when_retained_messages_come(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    writer = connect()
    writer.publish(name, b"kept", 1, retain=True)
    for handling, times in ((0, 2), (ONLY_IF_NEW, 1), (NO_RETAINED, 0)):
        client = connect()
        found = 0
        for _ in range(2):
            client.subscribe(name, options=handling)
            writer.publish(name, b"end")
            found += len(until(client, b"end"))
        assert found == times


@statement("3.8.3-3")
def test_no_local(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """With No Local, a client doesn't receive its own messages, but other clients receive them."""
    client, other = connect(name), connect()
    client.subscribe(name, options=NO_LOCAL)
    other.subscribe(name)
    client.publish(name, b"mine")
    assert other.expect("PUBLISH").payload == b"mine"
    connect().publish(name, b"theirs")
    assert client.expect("PUBLISH").payload == b"theirs"


@statement("3.3.4-3", "3.3.4-4", "3.3.4-5", "3.3.4-2")
def test_overlapping_subscriptions(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """A message that matches several subscriptions is delivered once with all identifiers, or once per subscription.

    The highest QoS applies.
    """
    client, writer = connect(), connect()
    client.subscribe(f"{name}/#", options=1, subscription_identifier=[268_435_455])
    client.subscribe(f"{name}/x", options=2, subscription_identifier=[1])
    client.subscribe(f"{name}/+", options=0)
    client.subscribe(f"{name}/end", options=0)
    writer.publish(f"{name}/x", b"x", 2)
    writer.publish(f"{name}/end", b"end")
    packets = until(client, b"end")
    identifiers = sorted(one for packet in packets for one in packet.properties.get("subscription_identifier", []))
    assert identifiers == [1, 268_435_455]
    assert max(packet.qos for packet in packets) == 2
    assert len(packets) in (1, 3)


@both
@statement("4.8.2-3", "4.8.2-1")
def test_a_group_shares_what_comes(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    """Each message of a shared subscription goes to one member, at the QoS granted to that member.

    A separate subscriber gets all messages.
    """
    members = [connect(version=version) for _ in range(3)]
    alone, writer = connect(version=version), connect(version=version)
    for number, member in enumerate(members):
        assert member.subscribe(f"$share/group/{name}/+", options=number) == (number,)
        member.subscribe(f"{name}/to/all")
    alone.subscribe(f"{name}/+")
    for number in range(60):
        writer.publish(f"{name}/x", b"%d" % number, 2)
    assert [int(packet.payload) for packet in alone.publishes(60)] == list(range(60))
    found = []
    while len(found) < 60:
        for number, member in enumerate(members):
            writer.publish(f"{name}/to/all", b"end")
            for other in members:
                if other is not member:
                    found += _shared(other, members.index(other))
            found += _shared(member, number)
    assert sorted(found) == list(range(60))


def _shared(member: RawClient, qos: int) -> list[int]:
    """Return the payloads that a member receives before the mark, and acknowledge them."""
    found = []
    while True:
        packet = member.receive()
        assert packet is not None
        if packet.kind == "PUBREL":
            member.send(wire.acknowledgement("PUBCOMP", packet.packet_id))
        elif packet.payload == b"end":
            return found
        else:
            assert packet.qos == qos
            found.append(int(packet.payload))
            if qos:
                member.send(wire.acknowledgement("PUBACK" if qos == 1 else "PUBREC", packet.packet_id))


@both
@statement("4.8.2-4")
def test_a_member_gets_the_rest_of_its_message(connect, name: str, version: int) -> None:  # type: ignore[no-untyped-def]
    """A QoS 2 exchange that was begun with a member is completed with it, even if other members are connected."""
    first, writer = connect(f"{name}-1", version=version, keep=True), connect(version=version)
    first.subscribe(f"$share/group/{name}", options=2)
    writer.publish(name, b"x", 2)
    begun = first.expect("PUBLISH")
    second = connect(f"{name}-2", version=version)
    second.subscribe(f"$share/group/{name}", f"{name}/end", options=2)
    first.send(wire.acknowledgement("PUBREC", begun.packet_id))
    first.expect("PUBREL")
    first.close()
    first = connect(f"{name}-1", version=version, keep=True)
    assert first.expect("PUBREL").packet_id == begun.packet_id
    first.send(wire.acknowledgement("PUBCOMP", begun.packet_id))
    first.ping()
    writer.publish(f"{name}/end", b"end")
    assert until(second, b"end") == []


@statement("4.8.2-5")
def test_a_message_that_was_begun_ends_with_its_session(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    """A QoS 2 message sent to a member whose session ends is delivered to no other member."""
    first, writer = connect(f"{name}-1"), connect()
    first.subscribe(f"$share/group/{name}", options=2)
    writer.publish(name, b"x", 2)
    first.expect("PUBLISH")
    second = connect()
    second.subscribe(f"$share/group/{name}", f"{name}/end", options=2)
    first.leave()  # the session ends with the connection
    writer.publish(f"{name}/end", b"end")
    assert until(second, b"end") == []


@statement("4.8.2-6")
def test_what_a_member_refuses_goes_to_nobody_else(connect, name: str) -> None:  # type: ignore[no-untyped-def]
    first, writer = connect(), connect()
    first.subscribe(f"$share/group/{name}", options=1)
    writer.publish(name, b"x", 1)
    packet = first.expect("PUBLISH")
    second = connect()
    second.subscribe(f"$share/group/{name}", f"{name}/end", options=1)
    first.send(wire.acknowledgement("PUBACK", packet.packet_id, 0x80))
    first.ping()
    first.close()
    writer.publish(f"{name}/end", b"end")
    assert until(second, b"end") == []


@both
@statement("3.8.4-1", "4.7.2-1")
def test_figures_of_the_server(connect, version: int) -> None:  # type: ignore[no-untyped-def]
    """Topics of the server are sent to clients that subscribe to them by name, and not to wildcard subscriptions."""
    everything, figures = connect(version=version), connect(version=version)
    everything.subscribe("#", "+/broker/#")
    figures.subscribe("$SYS/broker/clients/connected")
    while int(figures.expect("PUBLISH").payload) < 2:
        pass
    everything.send(wire.publish("figures/end", b"end", version=version))
    assert [packet.topic for packet in until(everything, b"end") if packet.topic.startswith("$")] == []
