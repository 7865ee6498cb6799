"""What a server sends where the versions differ, and which reason codes it may send."""

from __future__ import annotations

import pytest
import topicstore as ts
from ohmqtt import mqtt_spec
from topicstore.server.protocol import encoding, reason_tables
from topicstore.server.protocol.decoding import decode
from topicstore.server.protocol.reason import ReasonCode
from topicstore.sessions import Publish
from topicstore_conformance.mqtt import wire


def parsed(version: int, packet: bytes) -> wire.Packet:
    first, begin, end = wire.split(packet) or (0, 0, 0)
    assert end == len(packet)
    return wire.parse(version, first, packet[begin:end])


RETURN_CODES = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: 2,
    ReasonCode.SERVER_UNAVAILABLE: 3,
    ReasonCode.SERVER_BUSY: 3,
    ReasonCode.QUOTA_EXCEEDED: 3,
    ReasonCode.CONNECTION_RATE_EXCEEDED: 3,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
    ReasonCode.BAD_AUTHENTICATION_METHOD: 5,
}


@pytest.mark.parametrize(("reason", "code"), RETURN_CODES.items())
@pytest.mark.parametrize("present", [False, True])
def test_connack_of_mqtt_311_has_a_return_code(reason: ReasonCode, code: int, present: bool) -> None:
    packet = encoding.connack(4, reason, present, receive_maximum=5, reason_string="no")
    assert packet == bytes((0x20, 2, present and not reason, code))


@pytest.mark.parametrize("reason", [ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR])
def test_mqtt_311_has_no_connack_for_a_connect_that_breaks_its_rules(reason: ReasonCode) -> None:
    assert encoding.connack(4, reason) == b""
    assert parsed(5, encoding.connack(5, reason)).reason == reason


def test_mqtt_311_has_no_packet_by_which_a_server_says_why() -> None:
    assert encoding.disconnect(4, ReasonCode.SERVER_SHUTTING_DOWN, "bye") == b""


def test_reason_codes_are_those_of_another_codec() -> None:
    theirs = {
        "ACK": mqtt_spec.PUBACK_REASON_CODES,
        "RELEASE": mqtt_spec.PUBREL_REASON_CODES,
        "CONNACK": mqtt_spec.CONNACK_REASON_CODES,
        "SUBACK": mqtt_spec.SUBACK_REASON_CODES,
        "UNSUBACK": mqtt_spec.UNSUBACK_REASON_CODES,
        "DISCONNECT": mqtt_spec.DISCONNECT_REASON_CODES,
    }
    ours = {
        "ACK": reason_tables.ACK_REASONS[4],
        "RELEASE": reason_tables.ACK_REASONS[6],
        "CONNACK": reason_tables.CONNACK_REASONS,
        "SUBACK": reason_tables.SUBACK_REASONS,
        "UNSUBACK": reason_tables.UNSUBACK_REASONS,
        "DISCONNECT": reason_tables.CLIENT_DISCONNECT_REASONS | reason_tables.SERVER_DISCONNECT_REASONS,
    }
    assert ours == {name: {int(code) for code in codes} for name, codes in theirs.items()}
    assert {code.name.replace("_", "").lower(): int(code) for code in ReasonCode} == {
        code.name.lower(): int(code) for code in mqtt_spec.MQTTReasonCode
    }


@pytest.mark.parametrize("reason", list(ReasonCode))
def test_a_reason_that_a_packet_cannot_have_is_an_unspecified_error(reason: ReasonCode) -> None:
    other = ReasonCode.UNSPECIFIED_ERROR
    tables = reason_tables
    expected = reason if reason in tables.CONNACK_REASONS else other
    assert parsed(5, encoding.connack(5, reason)).reason == expected
    expected = reason if reason in tables.SERVER_DISCONNECT_REASONS else other
    assert parsed(5, encoding.disconnect(5, reason)).reason == expected
    expected = reason if reason in tables.SUBACK_REASONS else other
    assert parsed(5, encoding.suback(5, 7, [0, reason])).reasons == (0, expected)
    expected = reason if reason in tables.UNSUBACK_REASONS else other
    assert parsed(5, encoding.unsuback(5, 7, [reason, 0])).reasons == (expected, 0)
    for kind in (4, 5):
        expected = reason if reason in tables.ACK_REASONS[kind] else other
        assert parsed(5, encoding.puback(5, kind, 7, reason)).reason == expected
    for kind in (6, 7):
        expected = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if reason else ReasonCode.SUCCESS
        assert parsed(5, encoding.puback(5, kind, 7, reason)).reason == expected


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
