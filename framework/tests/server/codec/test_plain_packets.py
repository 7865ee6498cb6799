"""CONNECTs and SUBSCRIBEs without properties, which the server decodes itself, are decoded as by ohmqtt."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from ohmqtt.error import MQTTError
from ohmqtt.packet import MQTTConnectPacket, MQTTSubscribePacket
from topicstore.server.codec import decode as codec
from topicstore.server.codec.reason import PacketError
from topicstore_conformance.mqtt import wire

VERSIONS = st.sampled_from((4, 5))
TEXTS = st.text(max_size=5) | st.sampled_from(("", "a", "device/1/#", "\0", "\x80"))
CHANGES = st.none() | st.tuples(st.integers(0, 40), st.integers(0, 255)) | st.integers(0, 40)
"""No change; an offset and the byte there; or the length at which the packet is cut."""


def body_of(packet: bytes, change: Any) -> bytes:
    """Return the body of an encoded packet of less than 128 bytes.

    ``change`` replaces a byte, cuts the end off, or is None.
    """
    body = bytearray(packet[2:])
    if isinstance(change, int):
        del body[change:]
    elif change is not None and change[0] < len(body):
        body[change[0]] = change[1]
    return bytes(body)


@given(VERSIONS, TEXTS, st.none() | TEXTS, st.none() | st.binary(max_size=5), st.booleans(), CHANGES)
@example(5, "one", None, None, True, (10, 1))
def test_a_connect_is_decoded_as_by_the_library(
    version: int, client_id: str, user: str | None, password: bytes | None, clean: bool, change: Any
) -> None:
    """The server decodes a CONNECT as ohmqtt does, and refuses every CONNECT that ohmqtt refuses."""
    packet = wire.connect(client_id, version=version, user_name=user, password=password, clean=clean)
    body = body_of(packet, change)
    try:
        found = codec.decode_connect(0x10, body)
    except PacketError:
        found = None
    if found is not None:
        given_body = codec._as_version_5(body) if found.version == 4 else memoryview(body)
        assert codec._packet(found.version, body[7], MQTTConnectPacket.decode(0, given_body)) == found
    elif change is None and "\0" not in client_id + (user or ""):
        assert version == 4
        assert not client_id or (password is not None and user is None)


@given(VERSIONS, st.integers(0, 65_535), st.lists(st.tuples(TEXTS, st.integers(0, 63)), max_size=4), CHANGES)
def test_a_subscribe_is_decoded_as_by_the_library(
    version: int, packet_id: int, filters: list[tuple[str, int]], change: Any
) -> None:
    """The server reads the filters and the packet id of a SUBSCRIBE as ohmqtt does, and refuses what ohmqtt refuses.

    The server also refuses options that the version doesn't have.
    """
    body = body_of(wire.subscribe(packet_id, filters, version=version), change)
    try:
        theirs = MQTTSubscribePacket.decode(2, codec._with_properties(version, body))
    except MQTTError:
        theirs = None
    plain = codec._plain_subscribe(version, body)
    if plain is not None:
        assert theirs is not None
        assert (theirs.packet_id, list(theirs.topics)) == (plain.packet_id, plain.filters)
    elif change is None:
        assert theirs is None
