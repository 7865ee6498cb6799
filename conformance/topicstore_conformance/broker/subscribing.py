"""Tests of statements about subscriptions: answers, options, overlaps, and sharing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.statements import statement

from .fixtures import Broker, Connect, Fixtures, both, needs

__all__ = ["Subscribing"]

NO_LOCAL, ONLY_IF_NEW, NO_RETAINED = 4, 0x10, 0x20
"""Subscription options (section 3.8.3.1)."""
BAD_FILTERS = ["a/#/b", "a+", "", "a/\0"]
BAD_SHARES = ["$share/", "$share//a", "$share/g", "$share/+/a"]


def shares(broker: Broker, version: int) -> None:
    """Skip a test of shared subscriptions of MQTT 3.1.1, which that version doesn't have, unless it is strict."""
    if version == 4 and not broker.strict:
        pytest.skip("MQTT 3.1.1 has no shared subscriptions")


def until(client: RawClient, payload: bytes) -> list[wire.Packet]:
    """Return the messages that arrive before the message with this payload."""
    found: list[wire.Packet] = []
    while (packet := client.expect("PUBLISH")).payload != payload:
        found.append(packet)
    return found


def taken(member: RawClient, qos: int) -> list[int]:
    """Acknowledge the messages that a member receives before the marker message, and return their payloads."""
    found: list[int] = []
    while True:
        packet = member.next()
        if packet.kind == "PUBREL":
            member.send(wire.acknowledgement("PUBCOMP", packet.packet_id))
        elif packet.payload == b"end":
            return found
        else:
            assert packet.qos == qos
            found.append(int(packet.payload))
            if qos:
                member.send(wire.acknowledgement("PUBACK" if qos == 1 else "PUBREC", packet.packet_id))


class Subscribing(Fixtures):
    """Tests of subscriptions."""

    @both
    @statement("3.8.4-1", "3.8.4-2", "3.8.4-5", "3.8.4-6", "3.8.4-7", "3.9.3-1", "3.9.3-2", "2.2.1-6")
    def test_each_filter_is_answered_in_its_place(self, connect: Connect, name: str, version: int) -> None:
        """A SUBACK has the packet id of its SUBSCRIBE, and a reason code for each filter, in the same order."""
        client = connect(version=version)
        rows = [(f"{name}/{n}", n % 3) for n in range(30)]
        client.send(wire.subscribe(500, rows, version=version))
        answer = client.expect("SUBACK")
        assert (answer.packet_id, answer.reasons) == (500, tuple(options for _, options in rows))

    @statement("3.1.2-24")
    @pytest.mark.parametrize(
        "make", [lambda rows: wire.subscribe(1, rows), lambda rows: wire.unsubscribe(1, dict(rows))]
    )
    def test_an_answer_that_is_too_large_for_a_client_is_not_sent(
        self, broker: Broker, connect: Connect, name: str, make: Callable[[list[tuple[str, int]]], bytes]
    ) -> None:
        """An answer that is larger than the client's maximum packet size isn't sent."""
        client = connect(name, maximum_packet_size=40)
        rows = [(f"{name}/{n}", 1) for n in range(36)]
        client.send(make(rows[:35]))
        assert client.next().size <= 40
        client.send(make(rows), wire.PINGREQ)
        packet = client.receive()
        assert packet is None or packet.size <= 40
        if broker.strict:
            assert packet is not None
            assert (packet.kind, packet.reason) == ("DISCONNECT", 0x95)

    @both
    @statement("4.7.1-1", "4.7.1-2", "4.7.3-1", "4.7.3-2", "3.8.3-1")
    @pytest.mark.parametrize("text", BAD_FILTERS)
    def test_a_filter_that_can_not_be(
        self, broker: Broker, connect: Connect, name: str, version: int, text: str
    ) -> None:
        """An invalid filter is refused in the SUBACK, which grants the other filters, or the connection ends."""
        client = connect(version=version)
        client.send(wire.subscribe(1, [(f"{name}/a", 1), (text, 0), (f"{name}/b", 2)], version=version))
        packet = client.receive()
        if packet is None:
            assert version == 4 or not broker.strict
        elif packet.kind == "DISCONNECT":
            assert packet.reason in (0x81, 0x82, 0x8F)
        else:
            assert (packet.kind, packet.reasons) == ("SUBACK", (1, 0x8F if version == 5 else 0x80, 2))

    @statement("4.8.2-1", "4.8.2-2")
    @pytest.mark.parametrize("text", BAD_SHARES)
    def test_a_share_that_can_not_be(self, broker: Broker, connect: Connect, text: str) -> None:
        """A shared subscription without a name or a filter is refused."""
        client = connect()
        client.send(wire.subscribe(1, [(text, 0)]))
        packet = client.receive()
        if packet is None:
            assert not broker.strict
        elif packet.kind == "DISCONNECT":
            assert packet.reason in (0x81, 0x82, 0x8F)
        else:
            assert packet.reasons in ((0x8F,), (0x80,))

    @both
    @statement("3.10.4-1", "3.10.4-2", "3.10.4-4", "3.10.4-5", "3.10.4-6", "3.11.3-1", "3.11.3-2")
    def test_filters_are_removed_character_by_character(self, connect: Connect, name: str, version: int) -> None:
        """An UNSUBSCRIBE removes exactly the filters that equal its own, and its UNSUBACK answers each of them."""
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
    def test_what_was_begun_is_delivered_after_unsubscribing(self, connect: Connect, name: str, version: int) -> None:
        """A delivery that has begun is completed after the client has unsubscribed."""
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
    @needs("retain")
    @statement("3.8.4-3", "3.8.4-4")
    def test_a_subscription_is_replaced(self, connect: Connect, name: str, version: int) -> None:
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

    @needs("retain")
    @statement("3.3.1-9", "3.3.1-10", "3.3.1-11", "3.8.4-4")
    def test_when_retained_messages_come(self, connect: Connect, name: str) -> None:
        """Retained messages come at every subscription, only at a new one, or never, as its Retain Handling says."""
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
    def test_no_local(self, connect: Connect, name: str) -> None:
        """With No Local, a client doesn't receive its own messages, but other clients receive them."""
        client, other = connect(name), connect()
        client.subscribe(name, options=NO_LOCAL)
        other.subscribe(name)
        client.publish(name, b"mine")
        assert other.expect("PUBLISH").payload == b"mine"
        connect().publish(name, b"theirs")
        assert client.expect("PUBLISH").payload == b"theirs"

    @needs("subscription_identifier")
    @statement("3.3.4-3", "3.3.4-4", "3.3.4-5", "3.3.4-2")
    def test_overlapping_subscriptions(self, connect: Connect, name: str) -> None:
        """A message of overlapping subscriptions is delivered once for each, or once with all identifiers.

        In either case the highest of their QoS is among the deliveries.
        """
        client, writer = connect(), connect()
        client.subscribe(f"{name}/#", options=1, subscription_identifier=[268_435_455])
        client.subscribe(f"{name}/x", options=2, subscription_identifier=[1])
        client.subscribe(f"{name}/+", options=0)
        client.subscribe(f"{name}/end", options=0)
        writer.publish(f"{name}/x", b"x", 2)
        writer.publish(f"{name}/end", b"end")
        packets = until(client, b"end")
        lists = [packet.properties.get("subscription_identifier", []) for packet in packets]
        assert sorted(one for some in lists for one in some) == [1, 268_435_455]  # type: ignore[union-attr]
        assert max(packet.qos for packet in packets) == 2
        assert len(packets) in (1, 3)

    @both
    @needs("shared_subscription")
    @statement("4.8.2-3", "4.8.2-1")
    def test_a_group_shares_what_comes(self, broker: Broker, connect: Connect, name: str, version: int) -> None:
        """Each message goes to one member of a shared subscription, at its QoS, and to each separate subscriber."""
        shares(broker, version)
        members = [connect(version=version) for _ in range(3)]
        alone, writer = connect(version=version), connect(version=version)
        for number, member in enumerate(members):
            assert member.subscribe(f"$share/group/{name}/+", options=number) == (number,)
            member.subscribe(f"{name}/to/all")
        alone.subscribe(f"{name}/+")
        for number in range(60):
            writer.publish(f"{name}/x", b"%d" % number, 2)
        assert [int(packet.payload) for packet in alone.publishes(60)] == list(range(60))
        found: list[int] = []
        while len(found) < 60:
            for number, member in enumerate(members):
                writer.publish(f"{name}/to/all", b"end")
                for other in members:
                    if other is not member:
                        found += taken(other, members.index(other))
                found += taken(member, number)
        assert sorted(found) == list(range(60))

    @both
    @needs("shared_subscription")
    @statement("4.8.2-4")
    def test_a_member_gets_the_rest_of_its_message(
        self, broker: Broker, connect: Connect, name: str, version: int
    ) -> None:
        """A QoS 2 exchange is completed with the member with which it began, even if other members are connected."""
        shares(broker, version)
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

    @needs("shared_subscription")
    @statement("4.8.2-5")
    def test_a_message_that_was_begun_ends_with_its_session(self, connect: Connect, name: str) -> None:
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

    @needs("shared_subscription")
    @statement("4.8.2-6")
    def test_what_a_member_refuses_goes_to_nobody_else(self, connect: Connect, name: str) -> None:
        """A message that a member refuses with an error code is sent to no other member."""
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
