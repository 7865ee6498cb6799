"""However large one packet is, the number of its parts that are decoded one by one is limited."""

from __future__ import annotations

import pytest
from topicstore.server.codec import frames as bounds
from topicstore.server.codec.frames import FrameReader, FramingError
from topicstore.server.codec.reason import ReasonCode
from topicstore_conformance.mqtt import wire

from .conftest import read, refused

BOTH = pytest.mark.parametrize("version", [4, 5])
SUBSCRIBE, UNSUBSCRIBE = 0x82, 0xA2
USER_PROPERTY = b"\x26\0\0\0\0"


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + wire.variable(len(body)) + body


def filters(version: int, first: int, count: int, text: bytes = b"a", properties: bytes = b"\0") -> bytes:
    option = b"\1" if first == SUBSCRIBE else b""
    head = b"\0\1" + (properties if version == 5 else b"")
    return packet(first, head + (len(text).to_bytes(2) + text + option) * count)


def user_properties(count: int) -> bytes:
    return wire.variable(len(USER_PROPERTY) * count) + USER_PROPERTY * count


@BOTH
@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_the_filters_of_a_packet_are_bounded(version: int, first: int) -> None:
    """The number of filters in a packet is limited, but not their length.

    A long packet that ends too early is malformed.
    """
    assert len(read(version, filters(version, first, bounds.MOST_FILTERS)).filters) == bounds.MOST_FILTERS
    refused(version, filters(version, first, bounds.MOST_FILTERS + 1), ReasonCode.QUOTA_EXCEEDED)
    assert len(read(version, filters(version, first, 50, b"a" * 65_535)).filters) == 50
    cut_off = packet(first, filters(version, first, 5, b"a" * 65_535)[4:-3])
    refused(version, cut_off, ReasonCode.MALFORMED_PACKET)


@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_the_properties_of_a_subscription_are_bounded(first: int) -> None:
    read(5, filters(5, first, 1, properties=user_properties(50_000)))
    refused(5, filters(5, first, 1, properties=user_properties(60_000)), ReasonCode.PACKET_TOO_LARGE)


@pytest.mark.parametrize(("first", "head"), [(0x40, b"\0\1\0"), (0x62, b"\0\1\0"), (0xE0, b"\0"), (0xF0, b"\x18")])
def test_other_packets_are_bounded(first: int, head: bytes) -> None:
    refused(5, packet(first, head + user_properties(60_000)), ReasonCode.PACKET_TOO_LARGE)


def test_the_user_properties_of_a_publish_are_bounded() -> None:
    for count, text in ((bounds.MOST_USER_PROPERTIES, b"x"), (0, b"x" * (1 << 20))):
        message, _, _ = read(5, packet(0x30, b"\0\1t" + user_properties(count) + text))
        assert message.payload == text
        assert len(message.properties.user_properties if message.properties else ()) == count
    more = packet(0x30, b"\0\1t" + user_properties(bounds.MOST_USER_PROPERTIES + 1))
    refused(5, more, ReasonCode.QUOTA_EXCEEDED)


def test_a_connect_is_bounded_and_what_follows_it_is_not() -> None:
    large = b"\x30" + wire.variable(bounds.LARGEST_CONNECT + 1) + bytes(bounds.LARGEST_CONNECT + 1)
    assert len(FrameReader(1 << 24).feed(wire.connect("me") + large)) == 2
    with pytest.raises(FramingError) as error:
        FrameReader(1 << 24).feed(b"\x10" + large[1:10])
    assert error.value.reason is ReasonCode.PACKET_TOO_LARGE
