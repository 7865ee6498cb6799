"""Rules of MQTT 5 about a packet's bytes that have no numbered statement: properties, and errors in the text."""

from __future__ import annotations

import pytest
from topicstore.server.codec.packets import SubscribePacket
from topicstore.server.codec.reason import ReasonCode
from topicstore_conformance.mqtt import wire

from .conftest import read, reason_of, refused

MALFORMED, PROTOCOL_ERROR = ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR
ID = b"\0\7"
TEXT, PAIR = b"\0\1a", b"\0\1a\0\1b"


ACKS = {"PUBACK", "PUBREC", "PUBREL", "PUBCOMP"}
PLACES = ("CONNECT", "WILL", "PUBLISH", *sorted(ACKS), "SUBSCRIBE", "UNSUBSCRIBE", "DISCONNECT", "AUTH")
MESSAGE = {"WILL", "PUBLISH"}


def with_properties(place: str, fields: bytes) -> bytes:
    """Return a packet with these properties; will properties are put into a CONNECT."""
    block = wire.variable(len(fields)) + fields
    if place == "CONNECT":
        return wire.frame(place, 0, b"\0\4MQTT\5\2\0\0", block, TEXT)
    if place == "WILL":
        return wire.frame("CONNECT", 0, b"\0\4MQTT\5\6\0\0", b"\0", TEXT, block, TEXT, TEXT)
    if place == "PUBLISH":
        return wire.frame(place, 2, TEXT, ID, block, b"payload")
    if place in ACKS:
        return wire.frame(place, 2 if place == "PUBREL" else 0, ID, b"\0", block)
    if place == "SUBSCRIBE":
        return wire.frame(place, 2, ID, block, TEXT, b"\1")
    if place == "UNSUBSCRIBE":
        return wire.frame(place, 2, ID, block, TEXT)
    if place == "DISCONNECT":
        return wire.frame(place, 0, b"\0", block)
    method = b"" if b"\x15" in fields else b"\x15" + TEXT
    return wire.frame(place, 0, b"\x18", wire.variable(len(method + fields)) + method + fields)


PROPERTIES: dict[int, tuple[bytes, set[str]]] = {
    0x01: (b"\1", MESSAGE),
    0x02: (b"\0\0\0\1", MESSAGE),
    0x03: (TEXT, MESSAGE),
    0x08: (TEXT, MESSAGE),
    0x09: (TEXT, MESSAGE),
    0x0B: (b"\1", {"SUBSCRIBE"}),
    0x11: (b"\0\0\0\1", {"CONNECT", "DISCONNECT"}),
    0x12: (TEXT, set()),
    0x13: (b"\0\1", set()),
    0x15: (TEXT, {"CONNECT", "AUTH"}),
    0x16: (TEXT, {"AUTH"}),
    0x17: (b"\1", {"CONNECT"}),
    0x18: (b"\0\0\0\1", {"WILL"}),
    0x19: (b"\1", {"CONNECT"}),
    0x1A: (TEXT, set()),
    0x1C: (TEXT, {"DISCONNECT"}),
    0x1F: (TEXT, {*ACKS, "DISCONNECT", "AUTH"}),
    0x21: (b"\0\1", {"CONNECT"}),
    0x22: (b"\0\1", {"CONNECT"}),
    0x23: (b"\0\1", {"PUBLISH"}),
    0x24: (b"\1", set()),
    0x25: (b"\1", set()),
    0x26: (PAIR, set(PLACES)),
    0x27: (b"\0\0\0\1", {"CONNECT"}),
    0x28: (b"\1", set()),
    0x29: (b"\1", set()),
    0x2A: (b"\1", set()),
}
"""Table 2-4: by identifier, a value and the client packets that may have the property.

In a CONNECT, authentication data (0x16) needs a method, which `test_authentication_data_need_a_method` tests.
"""


@pytest.mark.parametrize("place", PLACES)
def test_a_property_belongs_into_its_packets(place: str) -> None:
    for identifier in range(256):
        value, places = PROPERTIES.get(identifier, (b"\1", set[str]()))
        expected: ReasonCode | None = None if place in places else MALFORMED
        if (identifier, place) == (0x0B, "PUBLISH"):
            expected = PROTOCOL_ERROR  # [MQTT-3.3.4-6]: a client must not send a subscription identifier in a PUBLISH
        if (identifier, place) == (0x16, "CONNECT"):
            expected = PROTOCOL_ERROR
        assert reason_of(5, with_properties(place, bytes((identifier,)) + value)) == expected, f"{identifier:#04x}"


@pytest.mark.parametrize("identifier", PROPERTIES)
def test_a_property_is_there_once(identifier: int) -> None:
    """A property may occur only once, except user properties (section 2.2.2.2)."""
    value, places = PROPERTIES[identifier]
    field = bytes((identifier,)) + value
    for place in places:
        assert reason_of(5, with_properties(place, field)) is None
        expected = None if identifier == 0x26 else PROTOCOL_ERROR
        assert reason_of(5, with_properties(place, field + b"\x26" + PAIR + field)) == expected, place


@pytest.mark.parametrize("identifier", PROPERTIES)
def test_a_property_is_not_cut_off(identifier: int) -> None:
    value, places = PROPERTIES[identifier]
    field = bytes((identifier,)) + value
    for place in places:
        for size in range(1, len(field)):
            assert reason_of(5, with_properties(place, field[:size])) in (MALFORMED, PROTOCOL_ERROR), (place, size)
        end = 2 if place in ACKS else 1
        assert reason_of(5, with_properties(place, field + b"\x26" + PAIR[:-end])) == MALFORMED


OUT_OF_RANGE = {
    "payload format indicator 2": ("PUBLISH", b"\x01\2"),
    "payload format indicator 2 of a will": ("WILL", b"\x01\2"),
    "request problem information 2": ("CONNECT", b"\x17\2"),
    "request response information 2": ("CONNECT", b"\x19\2"),
    "receive maximum 0": ("CONNECT", b"\x21\0\0"),
    "maximum packet size 0": ("CONNECT", b"\x27\0\0\0\0"),
    "subscription identifier 0": ("SUBSCRIBE", b"\x0b\0"),
}


@pytest.mark.parametrize(("place", "field"), OUT_OF_RANGE.values(), ids=list(OUT_OF_RANGE))
def test_a_value_out_of_its_range_is_a_protocol_error(place: str, field: bytes) -> None:
    assert reason_of(5, with_properties(place, field)) == PROTOCOL_ERROR


def test_authentication_data_need_a_method() -> None:
    """Authentication data needs a method (section 3.1.2.11.10), and an AUTH always has one (section 3.15.2.2.2)."""
    assert reason_of(5, with_properties("CONNECT", b"\x16" + TEXT)) == PROTOCOL_ERROR
    assert reason_of(5, with_properties("CONNECT", b"\x16" + TEXT + b"\x15" + TEXT)) is None
    assert reason_of(5, wire.frame("AUTH", 0, b"\x18\0")) == PROTOCOL_ERROR
    assert reason_of(5, wire.frame("AUTH", 0)) == PROTOCOL_ERROR


def test_a_subscribe_has_one_identifier() -> None:
    """A SUBSCRIBE with several identifiers is a protocol error, even if they are equal (section 3.8.2.1.2)."""
    for identifiers in ([5, 5], [5, 6], [300, 300], [1, 1, 1]):
        for pairs in ({}, {"user_property": [("水", "é")]}):
            packet = wire.subscribe(7, [("é/水", 1), ("b", 0)], subscription_identifier=identifiers, **pairs)  # type: ignore[arg-type]
            assert reason_of(5, packet) == PROTOCOL_ERROR
    packet = wire.subscribe(7, [("é/水", 1), ("b", 0)], subscription_identifier=300, user_property=[("水", "é")])
    assert read(5, packet) == SubscribePacket(7, [("é/水", 1), ("b", 0)], 300, (("水", "é"),))


def test_properties_that_are_longer_than_their_packet_are_malformed() -> None:
    for length in (1, 20, 127, 128, 268_435_455):
        size = wire.variable(length)
        assert reason_of(5, wire.frame("PUBLISH", 0, TEXT, size)) == MALFORMED
        assert reason_of(5, wire.frame("SUBSCRIBE", 2, ID, size)) == MALFORMED
        assert reason_of(5, wire.frame("CONNECT", 0, b"\0\4MQTT\5\2\0\0", size)) == MALFORMED
        assert reason_of(5, wire.frame("PUBACK", 0, ID, b"\0", size)) == MALFORMED
    for padded in (b"\x80", b"\x80\x80\x80\x80", b"\xff\xff\xff\xff\x01"):
        assert reason_of(5, wire.frame("PUBLISH", 0, TEXT, padded)) == MALFORMED
        assert reason_of(5, wire.frame("SUBSCRIBE", 2, ID, padded)) == MALFORMED


@pytest.mark.parametrize("version", [4, 5])
def test_a_packet_has_nothing_behind_its_fields(version: int) -> None:
    """A packet with bytes after its last field is malformed.

    In MQTT 5, acknowledgements and DISCONNECT may have a reason code and the length of properties; in MQTT 3.1.1 not.
    """
    short = [wire.acknowledgement(kind, 7) for kind in sorted(ACKS)]
    for packet, may_follow in [
        (wire.connect("me", version=version), b""),
        (wire.PINGREQ, b""),
        (wire.disconnect(version=version), b"\0\0"),
        *((packet, b"\0\0") for packet in short),
    ]:
        first, begin, size = wire.split(packet) or (0, 0, 0)
        for more in range(1, 5):
            longer = bytes((first, size - begin + more)) + packet[begin:] + bytes(more)
            if version == 5 and more <= len(may_follow):
                assert read(5, longer) == read(5, packet)
            else:
                refused(version, longer, MALFORMED)
