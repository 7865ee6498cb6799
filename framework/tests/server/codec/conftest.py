"""Helpers that read packets as the server does."""

from __future__ import annotations

from typing import Any

import pytest
from topicstore.server.codec.decode import decode, decode_publish
from topicstore.server.codec.frames import FrameReader
from topicstore.server.codec.reason import PacketError, ReasonCode
from topicstore_conformance.mqtt import wire


def read(version: int, packet: bytes) -> Any:
    """Return the decoded packet; for a PUBLISH, the message, its packet id and its topic alias."""
    reader = FrameReader(1 << 24)
    reader.version = version
    (frame,) = reader.feed(packet)
    return decode_publish(version, *frame, "me") if frame[0] >> 4 == 3 else decode(version, *frame)


def refused(version: int, packet: bytes, reason: ReasonCode) -> PacketError:
    """Check that a packet is refused with this reason code, and return the error."""
    with pytest.raises(PacketError) as error:
        read(version, packet)
    assert error.value.reason is reason, error.value.text
    return error.value


def reason_of(version: int, packet: bytes) -> ReasonCode | None:
    """Return the reason code with which a packet is refused, or None if it is accepted."""
    try:
        read(version, packet)
    except PacketError as bad:
        return bad.reason
    return None


def sent(version: int, packet: bytes) -> wire.Packet:
    """Return a packet of the server, decoded as a client would."""
    first, begin, end = wire.split(packet) or (0, 0, 0)
    assert end == len(packet)
    return wire.parse(version, first, packet[begin:end])
