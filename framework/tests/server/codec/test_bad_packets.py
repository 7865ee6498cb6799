"""Packets with random changes, truncated packets and random bytes: each is accepted, or refused with a reason code."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.topics import check_topic, check_utf8
from topicstore.contract.validation import CHECKS
from topicstore.server.codec.decode import decode, decode_publish
from topicstore.server.codec.frames import Frame, FrameReader, FramingError
from topicstore.server.codec.packets import ConnectPacket, Packet
from topicstore.server.codec.reason import PacketError, ReasonCode
from topicstore_conformance.conditions.profiles import PROFILE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.changed_packets import Changes, samples

CHANGED = tries(40_000, 100_000)
"""The number of changed packets that a test reads for each version."""


def read(version: int, frame: Frame) -> Packet | ts.Message:
    """Decode a packet as the server does, and check that the result is fit for use."""
    if frame[0] >> 4 == 3:
        message, packet_id, alias = decode_publish(version, *frame, "me")
        assert (packet_id > 0) == (message.qos > 0)
        assert message.topic or alias
        return message
    packet = decode(version, *frame)
    assert isinstance(packet, get_args(Packet))
    if isinstance(packet, ConnectPacket):
        check_utf8(packet.client_id, "client id", InvalidArgumentError)
        if packet.will is not None:
            check_topic(packet.will.topic)
            check_storable([ts.Message(packet.will.topic, packet.will.payload, properties=packet.will.properties)])
    return packet


def check_storable(messages: list[ts.Message]) -> None:
    """Check messages as the store does; raise the same errors."""
    for name, field in (("topics", "topic"), ("payloads", "payload"), ("qos", "qos"), ("properties", "properties")):
        CHECKS[name]([getattr(message, field) for message in messages])


def attempt(version: int, frame: Frame) -> Packet | ts.Message | PacketError:
    """Return the decoded packet, or the `PacketError` that refuses it; any other error is raised."""
    try:
        return read(version, frame)
    except PacketError as bad:
        return bad


def cut(reader: FrameReader, data: bytes) -> tuple[list[Frame], FramingError | None]:
    """Return the complete frames of these bytes, and the error at which splitting stops, or None."""
    try:
        return reader.feed(data), None
    except FramingError as bad:
        return bad.frames, bad


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("known", [False, True], ids=["as the first packet", "as a later packet"])
def test_a_changed_packet_is_read_or_refused(version: int, known: bool) -> None:
    outcomes: Counter[str] = Counter()
    messages = []
    changes = Changes(samples(version), version)
    for _ in range(CHANGED // 2):
        reader = FrameReader(10_000)
        reader.version = version if known else 0
        frames, error = cut(reader, changes.packet())
        for found in [*(attempt(version, frame) for frame in frames), *([error] if error else [])]:
            outcomes[found.reason.name if isinstance(found, PacketError) else type(found).__name__] += 1
            if isinstance(found, PacketError):
                assert found.reason >= 0x80
                assert found.version in (0, 4, 5)
                assert str(found) == found.text == found.text.encode().decode()
            elif isinstance(found, ts.Message) and found.topic:
                messages.append(found)
    check_storable(messages)
    for expected in ("MALFORMED_PACKET", "PROTOCOL_ERROR", "Message", "ConnectPacket", "SubscribePacket", "AckPacket"):
        assert outcomes[expected] > 50, outcomes


@pytest.mark.parametrize("version", [4, 5])
def test_a_packet_that_is_cut_off_is_refused(version: int) -> None:
    """A truncated packet with a matching length is malformed, unless the standard lets the missing part be absent."""
    for packet in samples(version):
        first, begin, end = wire.split(packet) or (0, 0, 0)
        for size in range(end - begin):
            found = attempt(version, (first, packet[begin : begin + size]))
            if isinstance(found, PacketError):
                assert found.reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR), (packet, size)
            else:
                check_may_be_short(version, packet, size, found)


def check_may_be_short(version: int, packet: bytes, size: int, found: Packet | ts.Message) -> None:
    """Check that the first ``size`` bytes of a packet's body are a valid packet, too."""
    kind = wire.KINDS[packet[0] >> 4]
    if isinstance(found, ts.Message):  # a payload may have any size
        whole = read(version, (packet[0], packet[2:]))
        assert isinstance(whole, ts.Message)
        assert whole.payload.startswith(found.payload)
        assert (whole.topic, whole.qos, whole.properties) == (found.topic, found.qos, found.properties)
    elif kind in ("SUBSCRIBE", "UNSUBSCRIBE"):  # there may be fewer filters, but at least one
        assert len(found.filters) == 1  # type: ignore[union-attr]
    else:  # the reason code and the properties may be absent
        assert version == 5
        assert kind in ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "DISCONNECT")
        assert size in ((0, 1) if kind == "DISCONNECT" else (2, 3))


@PROFILE
@given(st.sampled_from([4, 5]), st.integers(0, 255), st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(version: int, first: int, body: bytes) -> None:
    found = attempt(version, (first, body))
    assert not isinstance(found, PacketError) or found.reason >= 0x80


@pytest.mark.parametrize("version", [4, 5])
def test_any_bytes_are_cut_into_frames_or_refused(version: int) -> None:
    chance = random.Random(version)
    for _ in range(CHANGED // 20):
        reader = FrameReader(1_000)
        reader.version = version
        stream = chance.randbytes(chance.randrange(200))
        found = []
        for at in range(0, len(stream), 7):
            frames, error = cut(reader, stream[at : at + 7])
            found += frames
            if error is not None:
                assert error.reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PACKET_TOO_LARGE)
                break
        at = 0
        for frame in found:  # these frames follow each other in one stream
            first, begin, end = wire.split(stream[at:]) or (0, 0, 0)
            assert frame == (first, stream[at + begin : at + end])
            at += end
