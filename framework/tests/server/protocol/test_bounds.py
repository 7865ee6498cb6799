"""One packet, however large it may be, has a bounded number of parts that are read one by one."""

from __future__ import annotations

import pytest
from topicstore.server.protocol import bounds
from topicstore.server.protocol.decoding import decode, decode_publish
from topicstore.server.protocol.frames import FrameReader, FramingError
from topicstore.server.protocol.reason import PacketError, ReasonCode
from topicstore_conformance.mqtt import wire

BOTH = pytest.mark.parametrize("version", [4, 5])
SUBSCRIBE, UNSUBSCRIBE = 0x82, 0xA2
USER_PROPERTY = b"\x26\0\0\0\0"


def filters(version: int, first: int, count: int, text: bytes = b"a") -> bytes:
    option = b"\1" if first == SUBSCRIBE else b""
    return b"\0\1" + (b"\0" if version == 5 else b"") + (len(text).to_bytes(2) + text + option) * count


def user_properties(count: int) -> bytes:
    return wire.variable(len(USER_PROPERTY) * count) + USER_PROPERTY * count


def refusal(version: int, first: int, body: bytes) -> ReasonCode | None:
    """Return why a packet is refused."""
    try:
        decode(version, first, body)
    except PacketError as bad:
        return bad.reason
    return None


@BOTH
@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_the_filters_of_a_packet_are_bounded(version: int, first: int) -> None:
    assert len(decode(version, first, filters(version, first, bounds.MOST_FILTERS)).filters) == bounds.MOST_FILTERS
    assert refusal(version, first, filters(version, first, bounds.MOST_FILTERS + 1)) is ReasonCode.QUOTA_EXCEEDED


@BOTH
@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_a_few_long_filters_are_read(version: int, first: int) -> None:
    assert len(decode(version, first, filters(version, first, 50, b"a" * 65_535)).filters) == 50


@BOTH
@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_a_long_packet_that_ends_too_early_is_malformed(version: int, first: int) -> None:
    assert refusal(version, first, filters(version, first, 5, b"a" * 65_535)[:-3]) is ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("first", [SUBSCRIBE, UNSUBSCRIBE])
def test_the_properties_of_a_subscription_are_bounded(first: int) -> None:
    body = filters(5, first, 1)
    decode(5, first, body[:2] + user_properties(50_000) + body[3:])
    assert refusal(5, first, body[:2] + user_properties(60_000) + body[3:]) is ReasonCode.PACKET_TOO_LARGE


@pytest.mark.parametrize(("first", "head"), [(0x40, b"\0\1\0"), (0x62, b"\0\1\0"), (0xE0, b"\0"), (0xF0, b"\x18")])
def test_other_packets_are_bounded(first: int, head: bytes) -> None:
    assert refusal(5, first, head + user_properties(60_000)) is ReasonCode.PACKET_TOO_LARGE


def test_the_user_properties_of_a_publish_are_bounded() -> None:
    for count, text in ((bounds.MOST_USER_PROPERTIES, b"x"), (0, b"x" * (1 << 20))):
        message, _, _ = decode_publish(5, 0x30, b"\0\1t" + user_properties(count) + text, "me")
        assert message.payload == text
        assert len(message.properties.user_properties if message.properties else ()) == count
    with pytest.raises(PacketError) as refused:
        decode_publish(5, 0x30, b"\0\1t" + user_properties(bounds.MOST_USER_PROPERTIES + 1), "me")
    assert refused.value.reason is ReasonCode.QUOTA_EXCEEDED


def test_a_connect_is_bounded_and_what_follows_it_is_not() -> None:
    large = b"\x30" + wire.variable(bounds.LARGEST_CONNECT + 1) + bytes(bounds.LARGEST_CONNECT + 1)
    assert len(FrameReader(1 << 24).feed(wire.connect("me") + large)) == 2
    with pytest.raises(FramingError) as refused:
        FrameReader(1 << 24).feed(b"\x10" + large[1:10])
    assert refused.value.reason is ReasonCode.PACKET_TOO_LARGE
