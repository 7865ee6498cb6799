"""The properties of messages: decoding and encoding for PUBLISH, and conversion of ohmqtt's will properties.

Source: MQTT Version 5.0 (OASIS Standard), sections 2.2.2, 3.1.3.2 and 3.3.2.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ohmqtt.property import MQTTWillProps
from ohmqtt.serialization import encode_varint

from topicstore.contract.model import Properties
from topicstore.runtime.bounded_cache import BoundedCache

from .frames import MOST_USER_PROPERTIES
from .reason import PacketError, ReasonCode

__all__ = ["decode_publish_properties", "encode_publish_properties", "pairs", "will_properties"]

_FORMAT, _EXPIRY, _CONTENT_TYPE, _RESPONSE, _CORRELATION = 0x01, 0x02, 0x03, 0x08, 0x09
_IDENTIFIER, _ALIAS, _USER = 0x0B, 0x23, 0x26
"""Identifiers of properties (section 2.2.2.2)."""

_KNOWN: BoundedCache[bytes, tuple[Properties | None, int]] = BoundedCache(entries=4_096, size=2 << 20)
"""A cache of decoded properties, because a client often repeats the same properties."""


def _malformed(text: str) -> NoReturn:
    raise PacketError(ReasonCode.MALFORMED_PACKET, text)


def pairs(user_properties: Sequence[tuple[str, str]] | None) -> tuple[tuple[str, str], ...]:
    """Return user properties as a tuple, in their order."""
    return tuple(user_properties) if user_properties else ()


def will_properties(given: MQTTWillProps) -> Properties | None:
    """Return the message properties of a will, or None if there are none. Raises `PacketError`."""
    if given.ResponseTopic is not None:
        _check_response_topic(given.ResponseTopic)
    properties = Properties(
        given.PayloadFormatIndicator,
        given.MessageExpiryInterval,
        given.ContentType,
        given.ResponseTopic,
        given.CorrelationData,
        pairs(given.UserProperty),
    )
    return None if properties == _NOTHING else properties


_NOTHING = Properties()


def decode_publish_properties(data: bytes) -> tuple[Properties | None, int]:
    """Decode the properties of a client's PUBLISH: the message's properties, or None, and the topic alias, or 0.

    ``data`` are the properties without their length. Raises `PacketError`: `ReasonCode.MALFORMED_PACKET` for invalid
    bytes and for properties that a PUBLISH can't have, `ReasonCode.PROTOCOL_ERROR` for a value out of range, a
    duplicate property or a subscription identifier, `ReasonCode.TOPIC_ALIAS_INVALID` for an alias of 0, and
    `ReasonCode.QUOTA_EXCEEDED` for more than `MOST_USER_PROPERTIES` user properties.
    """
    known = _KNOWN.get(data)
    if known is not None:
        return known
    found, user_properties = _read(data)
    if found.get(_FORMAT, 0) > 1:
        raise PacketError(ReasonCode.PROTOCOL_ERROR, "a payload format indicator is 0 or 1")
    if _RESPONSE in found:
        _check_response_topic(found[_RESPONSE])
    alias = found.pop(_ALIAS, None)
    if alias == 0:
        raise PacketError(ReasonCode.TOPIC_ALIAS_INVALID, "a topic alias is not 0 [MQTT-3.3.2-8]")
    properties = None
    if found or user_properties:
        properties = Properties(
            found.get(_FORMAT),
            found.get(_EXPIRY),
            found.get(_CONTENT_TYPE),
            found.get(_RESPONSE),
            found.get(_CORRELATION),
            tuple(user_properties),
        )
    return _KNOWN.keep(data, (properties, alias or 0), 4 * len(data))


def _check_response_topic(topic: str) -> None:
    if not topic or "+" in topic or "#" in topic:
        text = "a response topic is empty or has a wildcard [MQTT-3.3.2-14] [MQTT-4.7.3-1]"
        raise PacketError(ReasonCode.PROTOCOL_ERROR, text)


def _read(data: bytes) -> tuple[dict[int, Any], list[tuple[str, str]]]:
    """Return the values of properties by identifier, and the user properties, which may be repeated."""
    found: dict[int, Any] = {}
    user_properties: list[tuple[str, str]] = []
    at, size = 0, len(data)
    try:
        while at < size:
            identifier = data[at]
            reader = _READERS.get(identifier)
            if reader is None:
                _refuse(identifier)
            value, at = reader(data, at + 1)
            if identifier == _USER:
                user_properties.append(value)
                if len(user_properties) > MOST_USER_PROPERTIES:
                    text = f"a PUBLISH has more than {MOST_USER_PROPERTIES:,} user properties"
                    raise PacketError(ReasonCode.QUOTA_EXCEEDED, text)
            elif identifier in found:
                raise PacketError(ReasonCode.PROTOCOL_ERROR, f"a PUBLISH has the property {identifier:#04x} twice")
            else:
                found[identifier] = value
    except (IndexError, struct.error):
        _malformed("a PUBLISH ends in one of its properties")
    return found, user_properties


def _refuse(identifier: int) -> NoReturn:
    if identifier == _IDENTIFIER:
        text = "a client's PUBLISH can't have a subscription identifier [MQTT-3.3.4-6]"
        raise PacketError(ReasonCode.PROTOCOL_ERROR, text)
    _malformed(f"a PUBLISH can't have the property {identifier:#04x} (MQTT 5, section 2.2.2.2)")


_TWO, _FOUR = struct.Struct(">H").unpack_from, struct.Struct(">I").unpack_from


def _byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _two(data: bytes, at: int) -> tuple[int, int]:
    return _TWO(data, at)[0], at + 2


def _four(data: bytes, at: int) -> tuple[int, int]:
    return _FOUR(data, at)[0], at + 4


def _binary(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + (data[at] << 8 | data[at + 1])
    if end > len(data):
        raise IndexError
    return data[at + 2 : end], end


def _text(data: bytes, at: int) -> tuple[str, int]:
    raw, end = _binary(data, at)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        _malformed("a property is not UTF-8 [MQTT-1.5.4-1]")
    if "\0" in text:
        _malformed("a property has a NUL [MQTT-1.5.4-2]")
    return text, end


def _pair(data: bytes, at: int) -> tuple[tuple[str, str], int]:
    name, at = _text(data, at)
    value, at = _text(data, at)
    return (name, value), at


_READERS: dict[int, Callable[[bytes, int], tuple[Any, int]]] = {
    _FORMAT: _byte,
    _EXPIRY: _four,
    _CONTENT_TYPE: _text,
    _RESPONSE: _text,
    _CORRELATION: _binary,
    _ALIAS: _two,
    _USER: _pair,
}


def encode_publish_properties(
    properties: Properties | None, expiry: int | None, subscription_identifiers: tuple[int, ...], alias: int
) -> bytes:
    """Encode the properties of a PUBLISH to a client, with their length.

    ``expiry`` replaces the message's own expiry interval. Duplicate subscription identifiers are kept, because a client
    may use one identifier for several subscriptions (section 3.3.4). An alias of 0 is no alias.
    """
    parts = []
    if alias:
        parts.append(struct.pack(">BH", _ALIAS, alias))
    if expiry is not None:
        parts.append(struct.pack(">BI", _EXPIRY, expiry))
    for identifier in subscription_identifiers:
        parts += b"\x0b", encode_varint(identifier)
    if properties is not None:
        _append_properties(parts, properties)
    body = b"".join(parts)
    return encode_varint(len(body)) + body


def _append_properties(parts: list[bytes], properties: Properties) -> None:
    if properties.payload_format_indicator is not None:
        parts.append(bytes((_FORMAT, properties.payload_format_indicator)))
    if properties.content_type is not None:
        parts += b"\x03", _counted(properties.content_type.encode())
    if properties.response_topic is not None:
        parts += b"\x08", _counted(properties.response_topic.encode())
    if properties.correlation_data is not None:
        parts += b"\x09", _counted(properties.correlation_data)
    for name, value in properties.user_properties:
        parts += b"\x26", _counted(name.encode()), _counted(value.encode())


def _counted(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
