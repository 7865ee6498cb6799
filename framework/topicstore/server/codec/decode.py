"""Decoding of the packets that clients send, in MQTT 5 and MQTT 3.1.1.

All rules of the two standards about a single packet are checked here, but no rules that depend on earlier packets. The
rules for topic filters (section 4.7) are checked when subscribing, because an invalid filter is refused in the SUBACK.
PUBLISH and the acknowledgements, which are most of a server's traffic, are decoded by this package, and so are valid
CONNECTs and SUBSCRIBEs without properties, with which every client begins. Other packets are decoded by ohmqtt; for
MQTT 3.1.1 after empty properties were inserted.

Source: MQTT Version 5.0 and MQTT Version 3.1.1 (OASIS Standards), chapters 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ohmqtt.error import MQTTError
from ohmqtt.packet import (
    MQTTAuthPacket,
    MQTTConnectPacket,
    MQTTDisconnectPacket,
    MQTTSubscribePacket,
    MQTTUnsubscribePacket,
)
from ohmqtt.property import MQTTPubAckProps

from topicstore.contract.model import Message
from topicstore.runtime.bounded_cache import BoundedCache

from .frames import check_bounds
from .packets import (
    NEVER,
    AckPacket,
    AuthPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PingPacket,
    SubscribePacket,
    UnsubscribePacket,
    WillPacket,
)
from .properties import decode_publish_properties, pairs, will_properties
from .reason import ACK_REASONS, CLIENT_AUTH_REASONS, CLIENT_DISCONNECT_REASONS, PacketError, ReasonCode

__all__ = [
    "decode",
    "decode_connect",
    "decode_publish",
]

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
        _check_connect_flags(version, body[7])
        if (plain := _plain_connect(version, body)) is not None:
            return plain
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


def _plain_connect(version: int, body: bytes) -> ConnectPacket | None:
    """Decode a CONNECT without properties and will, as most are; None if it is another, or may be invalid."""
    flags, size = body[7], len(body)
    at = 10 if version == 4 else 11
    if flags & 4 or (version == 5 and body[10:11] != b"\0"):
        return None
    fields = []
    for _ in range(1 + (flags >> 7) + (flags >> 6 & 1)):
        if at + 2 > size:
            return None
        begin, at = at + 2, at + 2 + (body[at] << 8 | body[at + 1])
        fields.append(body[begin:at])
    password = fields.pop() if flags & 0x40 else None
    texts = [_plain_text(field) for field in fields]
    clean_start = flags & 2 == 2
    if at != size or None in texts or not (texts[0] or clean_start or version == 5):
        return None
    return ConnectPacket(
        version=version,
        client_id=texts[0] or "",
        clean_start=clean_start,
        keep_alive=body[8] << 8 | body[9],
        user_name=texts[1] if flags & 0x80 else None,
        password=password,
        will=None,
        session_expiry=0 if clean_start or version == 5 else NEVER,
    )


def _plain_text(field: bytes) -> str | None:
    """Decode a text; None if it is invalid."""
    try:
        text = field.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _check_connect_flags(version: int, flags: int) -> None:
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


_FLAGS = {
    0x30 | dup << 3 | qos << 1 | retain: (qos, retain == 1)
    for dup in (0, 1)
    for qos in (0, 1, 2)
    for retain in (0, 1)
    if qos or not dup
}
"""QoS and RETAIN by the first byte of a PUBLISH, for all valid first bytes."""

_TOPICS: BoundedCache[bytes, str] = BoundedCache(entries=32_768, size=8 << 20)
"""A cache of decoded and checked topics."""


def decode_publish(version: int, first: int, body: bytes, client_id: str) -> tuple[Message, int, int]:
    """Decode a PUBLISH: the message, the packet id (0 at QoS 0) and the topic alias (0 if there is none).

    The message has no timestamp. Its topic is empty only with a topic alias, which the caller must resolve. The DUP
    flag is bit 3 of ``first``. Raises `PacketError`: `ReasonCode.TOPIC_NAME_INVALID` for a topic with wildcards,
    `ReasonCode.PROTOCOL_ERROR` for a packet id of 0 and a missing topic, the reasons of `decode_publish_properties` for
    properties, and `ReasonCode.MALFORMED_PACKET` for all other errors.
    """
    try:
        qos, retain = _FLAGS[first]
        at = 2 + (body[0] << 8 | body[1])
        raw = body[2:at]
        topic = _TOPICS.get(raw)
        if topic is None:
            topic = _new_topic(raw)
        packet_id = 0
        if qos:
            packet_id = body[at] << 8 | body[at + 1]
            at += 2
            if packet_id == 0:
                raise PacketError(ReasonCode.PROTOCOL_ERROR, "the packet id of a PUBLISH is not 0 [MQTT-2.2.1-3]")
        if version == 5 and body[at] == 0 and topic:
            return Message(topic, body[at + 1 :], client_id, qos, retain), packet_id, 0
    except KeyError:
        _malformed(f"a PUBLISH can't have the flags {first & 15:#06b} [MQTT-3.3.1-2] [MQTT-3.3.1-4]")
    except IndexError:
        _malformed("a PUBLISH ends before its payload")
    if at > len(body):
        _malformed("a PUBLISH ends in its topic")
    properties, alias = None, 0
    if version == 5:
        begin, at = _properties_of(body, at)
        properties, alias = decode_publish_properties(body[begin:at])
    if not topic and not alias:
        raise PacketError(ReasonCode.PROTOCOL_ERROR, "a PUBLISH has neither a topic nor an alias [MQTT-4.7.3-1]")
    return Message(topic, body[at:], client_id, qos, retain, None, properties), packet_id, alias


def _new_topic(raw: bytes) -> str:
    """Decode and check a topic that is not in the cache; it may be empty. Raises `PacketError` if it is invalid."""
    try:
        topic = raw.decode()
    except UnicodeDecodeError:
        _malformed("the topic of a PUBLISH is not UTF-8 [MQTT-1.5.4-1]")
    if "\0" in topic:
        _malformed("the topic of a PUBLISH has a NUL [MQTT-1.5.4-2]")
    if "+" in topic or "#" in topic:
        raise PacketError(ReasonCode.TOPIC_NAME_INVALID, "the topic of a PUBLISH has a wildcard [MQTT-3.3.2-2]")
    return _TOPICS.keep(raw, topic, len(raw)) if topic else ""


def _properties_of(body: bytes, at: int) -> tuple[int, int]:
    """Return the begin and the end of the properties whose length is at the offset ``at``."""
    length = 0
    for index in range(at, min(at + 4, len(body))):
        byte = body[index]
        length |= (byte & 127) << 7 * (index - at)
        if byte < 128:
            if byte == 0 and index > at:
                _malformed("the length of properties has more bytes than it needs [MQTT-1.5.5-1]")
            begin = index + 1
            if begin + length > len(body):
                _malformed("a PUBLISH ends in its properties")
            return begin, begin + length
    _malformed("the length of properties has no end [MQTT-1.5.5-1]")


_CONNECT = 1


def _protocol_error(text: str) -> NoReturn:
    raise PacketError(ReasonCode.PROTOCOL_ERROR, text)


def decode(version: int, first: int, body: bytes) -> Packet:
    """Decode any packet but a PUBLISH. For a CONNECT, ``version`` is ignored, because the packet contains it.

    Raises `PacketError` for an invalid packet, and for one that a client of this version may not send.
    """
    kind = first >> 4
    decoder = _DECODERS.get(kind)
    if decoder is None:
        if kind == 0:
            _malformed("a packet has the type 0, which doesn't exist")
        _protocol_error(f"a client doesn't send packets of type {kind} where one came")
    if kind != _CONNECT:
        check_bounds(version, kind, body)
    try:
        return decoder(version, first, body)
    except MQTTError as bad:
        text = f"a packet of type {kind} can't be read: {bad.args[0]}"
        raise PacketError(ReasonCode(bad.reason_code), text) from bad


def _check_flags(first: int, flags: int) -> None:
    if first & 15 != flags:
        _malformed(f"a packet of type {first >> 4} has the flags {first & 15:#06b}, not {flags:#06b} [MQTT-2.1.3-1]")


def _with_properties(version: int, body: bytes) -> memoryview:
    """Return a body with properties after the packet id; for MQTT 3.1.1, their length 0 is inserted."""
    return memoryview(body if version == 5 else b"%b\0%b" % (body[:2], body[2:]))


def _connect(_version: int, first: int, body: bytes) -> Packet:
    return decode_connect(first, body)


def _ack(version: int, first: int, body: bytes) -> AckPacket:
    kind = first >> 4
    _check_flags(first, 2 if kind == 6 else 0)
    size = len(body)
    if size < 2 or (version == 4 and size > 2):
        _malformed("an acknowledgement has a packet id and, in MQTT 3.1.1, nothing else")
    packet_id = body[0] << 8 | body[1]
    if packet_id == 0:
        _protocol_error("the packet id of an acknowledgement is not 0 [MQTT-2.2.1-5]")
    if size == 2:
        return AckPacket(kind, packet_id, 0)
    if body[2] not in ACK_REASONS[kind]:
        _protocol_error(f"a packet of type {kind} can't have the reason code {body[2]:#04x}")
    if size > 3:
        _, length = MQTTPubAckProps.decode(memoryview(body)[3:])
        if 3 + length != size:
            _malformed("there are bytes behind the properties of an acknowledgement")
    return AckPacket(kind, packet_id, body[2])


def _subscribe(version: int, first: int, body: bytes) -> SubscribePacket:
    _check_flags(first, 2)
    if (plain := _plain_subscribe(version, body)) is not None:
        for text, options in plain.filters:
            _check_options(version, text, options)
        return plain
    packet = MQTTSubscribePacket.decode(2, _with_properties(version, body))
    for text, options in packet.topics:
        _check_options(version, text, options)
    identifier = 0
    if packet.properties.SubscriptionIdentifier is not None:
        # ohmqtt keeps a set without duplicates: with a duplicate, the packet is longer than its decoded values.
        (identifier, *more) = packet.properties.SubscriptionIdentifier
        size = 2 + len(packet.properties.encode()) + sum(3 + len(text.encode()) for text, _ in packet.topics)
        if more or size != len(body):
            _protocol_error("a SUBSCRIBE has more than one subscription identifier (MQTT 5, section 3.8.2.1.2)")
    return SubscribePacket(packet.packet_id, list(packet.topics), identifier, pairs(packet.properties.UserProperty))


def _plain_subscribe(version: int, body: bytes) -> SubscribePacket | None:
    """Decode a SUBSCRIBE without properties; None if it is another, or may be invalid but for its options."""
    at, size = 2 if version == 4 else 3, len(body)
    if version == 5 and body[2:3] != b"\0":
        return None
    filters = []
    while at + 2 < size:
        end = at + 2 + (body[at] << 8 | body[at + 1])
        text = _plain_text(body[at + 2 : end])
        if end >= size or text is None or body[end] & 0xC0:
            return None
        filters.append((text, body[end]))
        at = end + 1
    if at != size or not filters or body[:2] == b"\0\0":
        return None
    return SubscribePacket(body[0] << 8 | body[1], filters)


def _check_options(version: int, text: str, options: int) -> None:
    if version == 4:
        if options > 2:
            _malformed(f"a SUBSCRIBE has {options:#04x} for a QoS (MQTT 3.1.1, section 3.8.3)")
        return
    if options & 3 == 3:
        _protocol_error("a subscription has QoS 3 (MQTT 5, section 3.8.3.1)")
    if options & 0x30 == 0x30:
        _protocol_error("a subscription has retain handling 3 (MQTT 5, section 3.8.3.1)")
    if options & 4 and text.startswith("$share/"):
        _protocol_error("a shared subscription has No Local [MQTT-3.8.3-4]")


def _unsubscribe(version: int, first: int, body: bytes) -> UnsubscribePacket:
    _check_flags(first, 2)
    packet = MQTTUnsubscribePacket.decode(2, _with_properties(version, body))
    return UnsubscribePacket(packet.packet_id, list(packet.topics), pairs(packet.properties.UserProperty))


def _ping(_version: int, first: int, body: bytes) -> PingPacket:
    _check_flags(first, 0)
    if body:
        _malformed("a PINGREQ has a body")
    return PingPacket()


def _disconnect(version: int, first: int, body: bytes) -> DisconnectPacket:
    _check_flags(first, 0)
    if version == 4 and body:
        _malformed("a DISCONNECT of MQTT 3.1.1 has a body")
    if body and body[0] not in CLIENT_DISCONNECT_REASONS:
        _protocol_error(f"a client doesn't send a DISCONNECT with the reason code {body[0]:#04x} [MQTT-3.14.2-1]")
    packet = MQTTDisconnectPacket.decode(0, memoryview(body))
    given = packet.properties
    return DisconnectPacket(int(packet.reason_code), given.SessionExpiryInterval, given.ReasonString)


def _auth(version: int, first: int, body: bytes) -> AuthPacket:
    if version == 4:
        _malformed("a packet has the type 15, which doesn't exist in MQTT 3.1.1")
    _check_flags(first, 0)
    if not body or body[0] not in CLIENT_AUTH_REASONS:
        _protocol_error("a client's AUTH continues an authentication or starts it again [MQTT-3.15.2-1]")
    packet = MQTTAuthPacket.decode(0, memoryview(body))
    given = packet.properties
    if given.AuthenticationMethod is None:
        _protocol_error("an AUTH names its authentication method (MQTT 5, section 3.15.2.2.2)")
    return AuthPacket(int(packet.reason_code), given.AuthenticationMethod, given.AuthenticationData)


_DECODERS: dict[int, Callable[[int, int, bytes], Packet]] = {
    1: _connect,
    4: _ack,
    5: _ack,
    6: _ack,
    7: _ack,
    8: _subscribe,
    10: _unsubscribe,
    12: _ping,
    14: _disconnect,
    15: _auth,
}
