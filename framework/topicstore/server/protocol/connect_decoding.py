"""Decoding of CONNECT by ohmqtt, which reads MQTT 3.1.1 after empty properties were inserted.

Source: MQTT Version 5.0 and MQTT Version 3.1.1 (OASIS Standards), section 3.1.
"""

from __future__ import annotations

from typing import NoReturn

from ohmqtt.error import MQTTError
from ohmqtt.packet import MQTTConnectPacket

from .packets import NEVER, ConnectPacket, WillPacket
from .properties import pairs, will_properties
from .reason import PacketError, ReasonCode

__all__ = ["decode_connect"]

_BRIDGE = 0x80
"""The version bit that mosquitto's bridges set at first. After a refusal in their own version's format, they connect
again without it (https://mosquitto.org/man/mosquitto-conf-5.html, ``try_private``)."""


def _malformed(text: str) -> NoReturn:
    raise PacketError(ReasonCode.MALFORMED_PACKET, text)


def decode_connect(first: int, body: bytes) -> ConnectPacket:
    """Decode a CONNECT of MQTT 5 or MQTT 3.1.1.

    Raises `PacketError`, whose ``version`` says whether a CONNACK may be sent: in MQTT 5 always, in MQTT 3.1.1 if one
    of its return codes describes the error. An unknown protocol name or version is
    `ReasonCode.UNSUPPORTED_PROTOCOL_VERSION`, a missing client id `ReasonCode.CLIENT_IDENTIFIER_NOT_VALID`.
    """
    if first != 0x10:
        _malformed(f"a CONNECT has the flags {first & 15:#06b}, not 0b0000 [MQTT-2.1.3-1]")
    version = _version(body)
    try:
        _check_flags(version, body[7])
        packet = MQTTConnectPacket.decode(0, _as_version_5(body) if version == 4 else memoryview(body))
        return _packet(version, body[7], packet)
    except MQTTError as bad:
        text = f"a CONNECT can't be read: {bad.args[0]}"
        raise PacketError(ReasonCode(bad.reason_code), text, version if version == 5 else 0) from bad
    except PacketError as bad:
        if version == 5 or bad.reason is ReasonCode.CLIENT_IDENTIFIER_NOT_VALID:
            bad.version = version
        raise


def _version(body: bytes) -> int:
    unsupported = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
    if body[:9] == b"\0\6MQIsdp\3":
        raise PacketError(unsupported, "MQTT 3.1 is not served; MQTT 3.1.1 and MQTT 5 are [MQTT-3.1.2-2]", 4)
    if len(body) < 10:
        _malformed("a CONNECT ends before its keep-alive")
    if body[:6] != b"\0\4MQTT":
        raise PacketError(unsupported, "the name of the protocol is MQTT [MQTT-3.1.2-1]")
    version = body[6]
    if version not in (4, 5):
        text = f"protocol version {version} is not served; 4 (MQTT 3.1.1) and 5 are [MQTT-3.1.2-2]"
        raise PacketError(unsupported, text, 4 if version & ~_BRIDGE < 5 else 5)
    return version


def _check_flags(version: int, flags: int) -> None:
    if flags & 1:
        _malformed("the reserved flag of a CONNECT is set [MQTT-3.1.2-3]")
    if not flags & 4 and flags & 0x38:
        _malformed("a CONNECT without a will has a QoS or RETAIN for it [MQTT-3.1.2-11] [MQTT-3.1.2-13]")
    if flags & 0x18 == 0x18:
        _malformed("a will has QoS 3 [MQTT-3.1.2-12]")
    if version == 4 and flags & 0xC0 == 0x40:
        _malformed("a CONNECT has a password but no user name (MQTT 3.1.1, section 3.1.2.9)")


def _as_version_5(body: bytes) -> memoryview:
    """Convert the body of a CONNECT of MQTT 3.1.1 to MQTT 5, with empty properties of connection and will."""
    payload = body[10:]
    will = b""
    if body[7] & 4:
        if len(payload) < 2:
            _malformed("a CONNECT ends in its client id")
        at = 2 + (payload[0] << 8 | payload[1])
        payload, will = payload[:at], b"\0" + payload[at:]
    return memoryview(b"".join((body[:6], b"\5", body[7:10], b"\0", payload, will)))


def _packet(version: int, flags: int, packet: MQTTConnectPacket) -> ConnectPacket:
    given = packet.properties
    expiry = given.SessionExpiryInterval or 0
    if version == 4:
        expiry = 0 if packet.clean_start else NEVER
        if not packet.client_id and not packet.clean_start:
            text = "a client without a client id asks for a clean session (MQTT 3.1.1, section 3.1.3.1)"
            raise PacketError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text)
    if given.AuthenticationData is not None and given.AuthenticationMethod is None:
        text = "a CONNECT has authentication data but no method (MQTT 5, section 3.1.2.11.10)"
        raise PacketError(ReasonCode.PROTOCOL_ERROR, text)
    return ConnectPacket(
        version=version,
        client_id=packet.client_id,
        clean_start=packet.clean_start,
        keep_alive=packet.keep_alive,
        user_name=packet.username,
        password=packet.password,
        will=_will(packet) if flags & 4 else None,
        session_expiry=expiry,
        receive_maximum=given.ReceiveMaximum or 65_535,
        maximum_packet_size=given.MaximumPacketSize,
        topic_alias_maximum=given.TopicAliasMaximum or 0,
        request_response_information=given.RequestResponseInformation is True,
        request_problem_information=given.RequestProblemInformation is not False,
        user_properties=pairs(given.UserProperty),
        authentication_method=given.AuthenticationMethod,
        authentication_data=given.AuthenticationData,
    )


def _will(packet: MQTTConnectPacket) -> WillPacket:
    topic = packet.will_topic
    if not topic or "+" in topic or "#" in topic:
        text = "the topic of a will is empty or has a wildcard [MQTT-4.7.0-1] [MQTT-4.7.3-1]"
        raise PacketError(ReasonCode.TOPIC_NAME_INVALID, text)
    return WillPacket(
        topic=topic,
        payload=packet.will_payload,
        qos=packet.will_qos,
        retain=packet.will_retain,
        delay=packet.will_props.WillDelayInterval or 0,
        properties=will_properties(packet.will_props),
    )
