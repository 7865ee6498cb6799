"""Encoding of the packets that a server sends, in MQTT 5 and MQTT 3.1.1.

The first argument of each function is the version, 4 or 5. Fields that MQTT 3.1.1 doesn't have are omitted, and a
packet that it doesn't have is ``b""``. A reason code that the standard doesn't permit for a packet becomes
`ReasonCode.UNSPECIFIED_ERROR`, so that callers can use the same code for any packet. PUBLISH and the acknowledgements
are encoded by this module, the other packets by ohmqtt.

Source: MQTT Version 5.0 and MQTT Version 3.1.1 (OASIS Standards), chapters 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from ohmqtt.mqtt_spec import MQTTReasonCode
from ohmqtt.packet import MQTTConnAckPacket, MQTTDisconnectPacket, MQTTSubAckPacket, MQTTUnsubAckPacket
from ohmqtt.property import (
    MQTTConnAckProps,
    MQTTDisconnectProps,
    MQTTProperties,
    MQTTSubAckProps,
    MQTTUnsubAckProps,
)
from ohmqtt.serialization import encode_varint

from topicstore.runtime.bounded_cache import BoundedCache
from topicstore.sessions import Publish

from .properties import encode_publish_properties
from .reason import (
    ACK_REASONS,
    CONNACK_REASONS,
    SERVER_DISCONNECT_REASONS,
    SUBACK_REASONS,
    UNSUBACK_REASONS,
    ReasonCode,
    permitted,
)

__all__ = [
    "PINGRESP",
    "answer_size",
    "connack",
    "disconnect",
    "puback",
    "pubacks",
    "publish",
    "publish_parts",
    "suback",
    "unsuback",
]

_Props = TypeVar("_Props", bound=MQTTProperties)

PINGRESP = b"\xd0\0"

_LENGTHS = tuple(map(encode_varint, range(16_384)))
"""The encodings of remaining lengths of one and two bytes."""
_FIRST = tuple(bytes((0x30 | flags,)) for flags in range(16))

_ACKS = {4: 0x40, 5: 0x50, 6: 0x62, 7: 0x70}
"""The first bytes of acknowledgements, by packet type."""
_PLAIN_ACK = struct.Struct(">BBH").pack

_TOPICS: BoundedCache[str, bytes] = BoundedCache(entries=32_768, size=8 << 20)
"""A cache of encoded topics, with their lengths."""


def publish(version: int, publish: Publish, topic: str, alias: int) -> bytes:
    """Encode a PUBLISH.

    ``topic`` is the message's topic, or "" if ``alias``, a topic alias of the connection, replaces it; 0 is no alias.
    In MQTT 3.1.1 there are neither aliases nor properties. Raises ValueError for a remaining length of more than
    268,435,455 bytes.
    """
    before, after = publish_parts(version, publish, topic, alias)
    if publish.qos:
        return before + publish.packet_id.to_bytes(2, "big") + after
    return before + after


def publish_parts(version: int, publish: Publish, topic: str, alias: int) -> tuple[bytes, bytes]:
    """Encode a PUBLISH as the bytes before and after its packet id, which many clients can share.

    At QoS 0 there is no packet id: the packet is the concatenation of both parts.
    """
    message = publish.message
    named = _TOPICS.get(topic) or _new_topic(topic)
    if version == 4:
        after = message.payload
    elif message.properties is None and not alias and not publish.subscription_identifiers and publish.expiry is None:
        after = b"\0" + message.payload
    else:
        properties = encode_publish_properties(
            message.properties, publish.expiry, publish.subscription_identifiers, alias
        )
        after = properties + message.payload
    qos = publish.qos
    size = len(named) + len(after) + (2 if qos else 0)
    length = _LENGTHS[size] if size < 16_384 else encode_varint(size)
    return _FIRST[publish.dup << 3 | qos << 1 | publish.retain] + length + named, after


def _new_topic(topic: str) -> bytes:
    raw = topic.encode()
    return _TOPICS.keep(topic, len(raw).to_bytes(2, "big") + raw, len(raw))


def puback(version: int, kind: int, packet_id: int, reason: int = 0) -> bytes:
    """Encode an acknowledgement: 4 PUBACK, 5 PUBREC, 6 PUBREL, 7 PUBCOMP. In MQTT 3.1.1 the reason is omitted."""
    if reason and version == 5:
        return struct.pack(">BBHB", _ACKS[kind], 3, packet_id, _ack_reason(kind, reason))
    return _PLAIN_ACK(_ACKS[kind], 2, packet_id)


def _ack_reason(kind: int, reason: int) -> int:
    if kind in (6, 7):
        return ReasonCode.PACKET_IDENTIFIER_NOT_FOUND  # the only failure code of PUBREL and PUBCOMP
    return permitted(reason, ACK_REASONS[kind])


def pubacks(version: int, kind: int, rows: Iterable[tuple[int, int]]) -> bytes:
    """Encode many acknowledgements of one kind, from pairs of packet id and reason code, as `puback` does."""
    first = _ACKS[kind]
    return b"".join(
        [
            puback(version, kind, packet_id, reason) if reason else _PLAIN_ACK(first, 2, packet_id)
            for packet_id, reason in rows
        ]
    )


_RETURN_CODES: dict[int, int] = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: 2,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
    ReasonCode.BAD_AUTHENTICATION_METHOD: 5,
}
"""The CONNACK return codes of MQTT 3.1.1 (section 3.2.2.3); all other refusals are 3, server unavailable."""


def connack(
    version: int,
    reason: int,
    session_present: bool = False,
    *,
    session_expiry: int | None = None,
    receive_maximum: int | None = None,
    maximum_qos: int | None = None,
    retain_available: bool | None = None,
    maximum_packet_size: int | None = None,
    assigned_client_id: str | None = None,
    topic_alias_maximum: int | None = None,
    reason_string: str | None = None,
    user_properties: Sequence[tuple[str, str]] = (),
    wildcard_subscription_available: bool | None = None,
    subscription_identifiers_available: bool | None = None,
    shared_subscription_available: bool | None = None,
    server_keep_alive: int | None = None,
    response_information: str | None = None,
    server_reference: str | None = None,
    authentication_method: str | None = None,
    authentication_data: bytes | None = None,
) -> bytes:
    """Encode a CONNACK (section 3.2). Properties that are None are omitted.

    In MQTT 3.1.1 the reason is mapped to a return code. A malformed CONNECT of MQTT 3.1.1 has no CONNACK
    [MQTT-3.1.4-1]: the result is ``b""``.
    """
    present = session_present and reason == 0
    if version == 4:
        if reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR):
            return b""
        return bytes((0x20, 2, present, _RETURN_CODES.get(reason, 3)))
    properties = _given(
        MQTTConnAckProps(),
        SessionExpiryInterval=session_expiry,
        ReceiveMaximum=receive_maximum,
        MaximumQoS=maximum_qos,
        RetainAvailable=retain_available,
        MaximumPacketSize=maximum_packet_size,
        AssignedClientIdentifier=assigned_client_id,
        TopicAliasMaximum=topic_alias_maximum,
        ReasonString=reason_string,
        UserProperty=user_properties or None,
        WildcardSubscriptionAvailable=wildcard_subscription_available,
        SubscriptionIdentifierAvailable=subscription_identifiers_available,
        SharedSubscriptionAvailable=shared_subscription_available,
        ServerKeepAlive=server_keep_alive,
        ResponseInformation=response_information,
        ServerReference=server_reference,
        AuthenticationMethod=authentication_method,
        AuthenticationData=authentication_data,
    )
    return MQTTConnAckPacket(MQTTReasonCode(permitted(reason, CONNACK_REASONS)), present, properties).encode()


def _given(properties: _Props, **values: Any) -> _Props:
    for name, value in values.items():
        if value is not None:
            setattr(properties, name, value)
    return properties


def _reasons(codes: Sequence[int], reasons: frozenset[int]) -> list[MQTTReasonCode]:
    return [MQTTReasonCode(permitted(code, reasons)) for code in codes]


def suback(version: int, packet_id: int, codes: Sequence[int], reason_string: str | None = None) -> bytes:
    """Encode a SUBACK with a granted QoS or a reason code for each filter; in MQTT 3.1.1 every refusal is 0x80."""
    if version == 4:
        body = packet_id.to_bytes(2, "big") + bytes(min(code, 0x80) for code in codes)
        return b"\x90" + encode_varint(len(body)) + body
    properties = _given(MQTTSubAckProps(), ReasonString=reason_string)
    return MQTTSubAckPacket(packet_id, _reasons(codes, SUBACK_REASONS), properties).encode()


def answer_size(filters: int) -> int:
    """Return the size in bytes of a SUBACK or an UNSUBACK of MQTT 5 for ``filters`` filters, without properties."""
    return 1 + len(encode_varint(filters + 3)) + filters + 3


def unsuback(version: int, packet_id: int, codes: Sequence[int], reason_string: str | None = None) -> bytes:
    """Encode an UNSUBACK with a reason code for each filter; in MQTT 3.1.1 without reason codes."""
    if version == 4:
        return b"\xb0\2" + packet_id.to_bytes(2, "big")
    properties = _given(MQTTUnsubAckProps(), ReasonString=reason_string)
    return MQTTUnsubAckPacket(packet_id, _reasons(codes, UNSUBACK_REASONS), properties).encode()


def disconnect(
    version: int, reason: int, reason_string: str | None = None, server_reference: str | None = None
) -> bytes:
    """Encode a DISCONNECT (section 3.14); ``b""`` in MQTT 3.1.1, where servers don't send it."""
    if version == 4:
        return b""
    properties = _given(MQTTDisconnectProps(), ReasonString=reason_string, ServerReference=server_reference)
    return MQTTDisconnectPacket(MQTTReasonCode(permitted(reason, SERVER_DISCONNECT_REASONS)), properties).encode()
