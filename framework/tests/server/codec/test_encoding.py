"""The encoding of the server's packets, where it differs between versions, and their reason codes."""

from __future__ import annotations

import pytest
import topicstore as ts
from ohmqtt import mqtt_spec
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.decode import decode
from topicstore.server.codec.reason import ReasonCode
from topicstore.sessions import Publish
from topicstore_conformance.mqtt import wire

RETURN_CODES = {
    0: ["SUCCESS"],
    1: ["UNSUPPORTED_PROTOCOL_VERSION"],
    2: ["CLIENT_IDENTIFIER_NOT_VALID"],
    3: ["SERVER_UNAVAILABLE", "SERVER_BUSY", "QUOTA_EXCEEDED", "CONNECTION_RATE_EXCEEDED"],
    4: ["BAD_USER_NAME_OR_PASSWORD"],
    5: ["NOT_AUTHORIZED", "BANNED", "BAD_AUTHENTICATION_METHOD"],
}


@pytest.mark.parametrize("present", [False, True])
def test_connack_of_mqtt_311_has_a_return_code(present: bool) -> None:
    """In MQTT 3.1.1 a CONNACK has a return code, and a malformed CONNECT gets no CONNACK.

    The server sends no DISCONNECT either.
    """
    for code, names in RETURN_CODES.items():
        for reason in (ReasonCode[name] for name in names):
            packet = encoding.connack(4, reason, present, receive_maximum=5, reason_string="no")
            assert packet == bytes((0x20, 2, present and not reason, code))
    for reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR):
        assert encoding.connack(4, reason) == b""
    assert encoding.disconnect(4, ReasonCode.SERVER_SHUTTING_DOWN, "bye") == b""


def test_reason_codes_have_the_names_of_another_codec() -> None:
    theirs = {code.name.lower(): int(code) for code in mqtt_spec.MQTTReasonCode}
    assert {code.name.replace("_", "").lower(): int(code) for code in ReasonCode} == theirs


def test_a_packet_larger_than_any_may_be_is_refused() -> None:
    largest = 268_435_455 - len(b"\0\1a\0\7\0")
    publish = Publish(7, ts.Message("a", bytes(largest), qos=1), 1)
    before, after = encoding.publish_parts(5, publish, "a", 0)
    assert before == b"\x32\xff\xff\xff\x7f\0\1a"
    assert len(after) == largest + 1
    with pytest.raises(ValueError, match="exceeds maximum 268435455"):
        encoding.publish_parts(5, publish, "a", 1)


def test_a_connect_shows_no_secret() -> None:
    will = wire.Will(topic="will", payload=b"hidden will")
    packet = wire.connect("me", user_name="hidden user", password=b"hidden password", will=will)
    found = decode(5, packet[0], packet[2:])
    assert repr(found) == "ConnectPacket(version=5, client_id='me', …)"
