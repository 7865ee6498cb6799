"""Decoding of the packets that clients send, in MQTT 5 and MQTT 3.1.1.

All rules of the two standards about a single packet are checked here, but no rules that depend on earlier packets. The
rules for topic filters (section 4.7) are checked when subscribing, because an invalid filter is refused in the SUBACK.
PUBLISH and the acknowledgements, which are most of a server's traffic, are decoded by this package. Other packets are
decoded by ohmqtt; for MQTT 3.1.1 after empty properties were inserted.

Source: MQTT Version 5.0 and MQTT Version 3.1.1 (OASIS Standards), chapters 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ohmqtt.error import MQTTError
from ohmqtt.packet import MQTTAuthPacket, MQTTDisconnectPacket, MQTTSubscribePacket, MQTTUnsubscribePacket
from ohmqtt.property import MQTTPubAckProps

from .bounds import check_bounds
from .connect_decoding import decode_connect
from .packets import (
    AckPacket,
    AuthPacket,
    DisconnectPacket,
    Packet,
    PingPacket,
    SubscribePacket,
    UnsubscribePacket,
)
from .properties import pairs
from .publish_decoding import decode_publish
from .reason import PacketError, ReasonCode
from .reason_tables import ACK_REASONS, CLIENT_AUTH_REASONS, CLIENT_DISCONNECT_REASONS

__all__ = ["decode", "decode_publish"]

_CONNECT = 1


def _malformed(text: str) -> NoReturn:
    raise PacketError(ReasonCode.MALFORMED_PACKET, text)


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
