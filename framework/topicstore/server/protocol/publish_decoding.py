"""Decoding of PUBLISH, without ohmqtt for speed, because most packets are PUBLISHes.

Source: MQTT Version 5.0 and MQTT Version 3.1.1 (OASIS Standards), section 3.3.
"""

from __future__ import annotations

from typing import NoReturn

from topicstore.contract.model import Message
from topicstore.runtime.bounded_cache import BoundedCache

from .properties import decode_publish_properties
from .reason import PacketError, ReasonCode

__all__ = ["decode_publish"]

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


def _malformed(text: str) -> NoReturn:
    raise PacketError(ReasonCode.MALFORMED_PACKET, text)


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
