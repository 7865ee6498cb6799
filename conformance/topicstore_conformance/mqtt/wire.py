"""A client-side MQTT codec: it encodes the packets that a client sends, and decodes those that a server sends.

It is independent of the server's codec, so that tests find that codec's faults. It doesn't validate the packets that it
encodes, because tests also send invalid packets. Section numbers are those of the MQTT 5 standard. Version 4 is MQTT
3.1.1, which has no properties and fewer reason codes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

import attrs

__all__ = [
    "PINGREQ",
    "Packet",
    "Value",
    "Will",
    "acknowledgement",
    "auth",
    "binary",
    "connect",
    "disconnect",
    "frame",
    "parse",
    "properties",
    "publish",
    "split",
    "subscribe",
    "unsubscribe",
    "variable",
]

Value: TypeAlias = int | str | bytes | list[int] | list[tuple[str, str]]
"""The value of a property. Properties that may be repeated in a packet have a list."""

_PROPERTIES = {
    "payload_format_indicator": (0x01, "B"),
    "message_expiry_interval": (0x02, "I"),
    "content_type": (0x03, "text"),
    "response_topic": (0x08, "text"),
    "correlation_data": (0x09, "binary"),
    "subscription_identifier": (0x0B, "variable"),
    "session_expiry_interval": (0x11, "I"),
    "assigned_client_identifier": (0x12, "text"),
    "server_keep_alive": (0x13, "H"),
    "authentication_method": (0x15, "text"),
    "authentication_data": (0x16, "binary"),
    "request_problem_information": (0x17, "B"),
    "will_delay_interval": (0x18, "I"),
    "request_response_information": (0x19, "B"),
    "response_information": (0x1A, "text"),
    "server_reference": (0x1C, "text"),
    "reason_string": (0x1F, "text"),
    "receive_maximum": (0x21, "H"),
    "topic_alias_maximum": (0x22, "H"),
    "topic_alias": (0x23, "H"),
    "maximum_qos": (0x24, "B"),
    "retain_available": (0x25, "B"),
    "user_property": (0x26, "pair"),
    "maximum_packet_size": (0x27, "I"),
    "wildcard_subscription_available": (0x28, "B"),
    "subscription_identifier_available": (0x29, "B"),
    "shared_subscription_available": (0x2A, "B"),
}
"""The identifiers and types of properties (table 2-4)."""
_NAMES = {number: (name, kind) for name, (number, kind) in _PROPERTIES.items()}
_REPEATED = ("subscription_identifier", "user_property")
_KINDS = "RESERVED CONNECT CONNACK PUBLISH PUBACK PUBREC PUBREL PUBCOMP SUBSCRIBE SUBACK UNSUBSCRIBE UNSUBACK"
KINDS = [*_KINDS.split(), "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH"]
"""Packet types by number (table 2-1)."""
PINGREQ = b"\xc0\x00"


def variable(number: int) -> bytes:
    """Encode a variable byte integer (section 1.5.5)."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def binary(data: bytes | str) -> bytes:
    """Encode binary data or a string, prefixed with its length (sections 1.5.4 and 1.5.6)."""
    raw = data.encode() if isinstance(data, str) else data
    return struct.pack(">H", len(raw)) + raw


def frame(kind: str, flags: int, *parts: bytes) -> bytes:
    """Encode a packet from its type, the flags of its first byte, and the parts after the fixed header."""
    body = b"".join(parts)
    return bytes((KINDS.index(kind) << 4 | flags,)) + variable(len(body)) + body


def properties(**values: Value) -> bytes:
    """Encode properties in the order given, prefixed with their length (section 2.2.2)."""
    out = []
    for name, value in values.items():
        number, kind = _PROPERTIES[name]
        out += [bytes((number,)) + _property(kind, one) for one in (value if isinstance(value, list) else [value])]
    body = b"".join(out)
    return variable(len(body)) + body


def _property(kind: str, value: object) -> bytes:
    if isinstance(value, tuple):
        return binary(value[0]) + binary(value[1])
    if isinstance(value, str | bytes):
        return binary(value)
    assert isinstance(value, int)
    return variable(value) if kind == "variable" else struct.pack(f">{kind}", value)


def _some(version: int, values: dict[str, Value]) -> bytes:
    return properties(**values) if version == 5 else b""


@attrs.frozen(kw_only=True)
class Will:
    """The will of a CONNECT packet."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: dict[str, Value] = attrs.Factory(dict)


def connect(
    client_id: str = "",
    *,
    version: int = 5,
    clean: bool = True,
    keep_alive: int = 0,
    will: Will | None = None,
    user_name: str | None = None,
    password: bytes | None = None,
    **values: Value,
) -> bytes:
    """Encode a CONNECT packet (section 3.1)."""
    flags = clean << 1 | (user_name is not None) << 7 | (password is not None) << 6
    parts = [binary(client_id)]
    if will is not None:
        flags |= 4 | will.qos << 3 | will.retain << 5
        parts += [_some(version, will.properties), binary(will.topic), binary(will.payload)]
    parts += [binary(one) for one in (user_name, password) if one is not None]
    head = binary("MQTT") + bytes((version, flags)) + struct.pack(">H", keep_alive)
    return frame("CONNECT", 0, head, _some(version, values), *parts)


def publish(
    topic: str,
    payload: bytes = b"",
    *,
    qos: int = 0,
    packet_id: int = 0,
    retain: bool = False,
    dup: bool = False,
    version: int = 5,
    **values: Value,
) -> bytes:
    """Encode a PUBLISH packet (section 3.3)."""
    number = struct.pack(">H", packet_id) if qos else b""
    flags = dup << 3 | qos << 1 | retain
    return frame("PUBLISH", flags, binary(topic), number, _some(version, values), payload)


def acknowledgement(kind: str, packet_id: int, reason: int = 0) -> bytes:
    """Encode a PUBACK, PUBREC, PUBREL or PUBCOMP packet (sections 3.4 to 3.7)."""
    return frame(
        kind,
        2 if kind == "PUBREL" else 0,
        struct.pack(">H", packet_id),
        bytes((reason,)) if reason else b"",
    )


def subscribe(packet_id: int, filters: Iterable[tuple[str, int]], *, version: int = 5, **values: Value) -> bytes:
    """Encode a SUBSCRIBE packet (section 3.8). A filter's options are one byte, whose lowest two bits are the QoS."""
    each = [binary(text) + bytes((options,)) for text, options in filters]
    return frame("SUBSCRIBE", 2, struct.pack(">H", packet_id), _some(version, values), *each)


def unsubscribe(packet_id: int, filters: Iterable[str], *, version: int = 5, **values: Value) -> bytes:
    """Encode an UNSUBSCRIBE packet (section 3.10)."""
    return frame("UNSUBSCRIBE", 2, struct.pack(">H", packet_id), _some(version, values), *map(binary, filters))


def disconnect(reason: int = 0, *, version: int = 5, **values: Value) -> bytes:
    """Encode a DISCONNECT packet (section 3.14)."""
    if version < 5 or not (reason or values):
        return frame("DISCONNECT", 0)
    return frame("DISCONNECT", 0, bytes((reason,)), properties(**values))


def auth(reason: int, **values: Value) -> bytes:
    """Encode an AUTH packet (section 3.15)."""
    return frame("AUTH", 0, bytes((reason,)), properties(**values))


@attrs.frozen(kw_only=True)
class Packet:
    """A decoded packet from a server."""

    kind: str
    flags: int
    packet_id: int = 0
    reason: int = 0
    """The reason code, or 0 if the packet has none."""
    reasons: tuple[int, ...] = ()
    """The reason codes of a SUBACK or UNSUBACK."""
    present: bool = False
    """The flag Session Present of a CONNACK."""
    topic: str = ""
    payload: bytes = b""
    properties: dict[str, Value] = attrs.Factory(dict)
    size: int = 0
    """The size of the whole packet in bytes."""

    @property
    def qos(self) -> int:
        """Return the QoS of a PUBLISH."""
        return self.flags >> 1 & 3

    @property
    def retain(self) -> bool:
        """Whether a PUBLISH has the flag RETAIN."""
        return bool(self.flags & 1)

    @property
    def dup(self) -> bool:
        """Whether a PUBLISH has the flag DUP."""
        return bool(self.flags & 8)


def split(data: bytes | bytearray) -> tuple[int, int, int] | None:
    """Return the first packet's first byte, and the start and end offsets of the part after its fixed header.

    Returns None if the packet is incomplete.
    """
    length = 0
    for place in range(1, min(len(data), 5)):
        length |= (data[place] & 127) << 7 * (place - 1)
        if not data[place] & 128:
            end = place + 1 + length
            return (data[0], place + 1, end) if end <= len(data) else None
    return None


class _Reader:
    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def take(self, count: int) -> bytes:
        found = self.body[self.at : self.at + count]
        assert len(found) == count, "the packet ends within a field"
        self.at += count
        return found

    def number(self, form: str) -> int:
        value: int = struct.unpack(f">{form}", self.take(struct.calcsize(f">{form}")))[0]
        return value

    def data(self) -> bytes:
        return self.take(self.number("H"))

    def variable(self) -> int:
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 127) << shift
            if not byte & 128:
                return value
            shift += 7

    @property
    def left(self) -> int:
        return len(self.body) - self.at

    def properties(self) -> dict[str, Value]:
        if not self.left:
            return {}
        inner = _Reader(self.take(self.variable()))
        found: dict[str, Value] = {}
        while inner.left:
            name, kind = _NAMES[inner.number("B")]
            value = inner.property(kind)
            if name in _REPEATED:
                found.setdefault(name, []).append(value)  # type: ignore[union-attr, arg-type]
            else:
                assert name not in found, f"{name} stands twice in a packet"
                found[name] = value  # type: ignore[assignment]
        return found

    def property(self, kind: str) -> object:
        if kind == "pair":
            return self.data().decode(), self.data().decode()
        if kind == "variable":
            return self.variable()
        if kind in ("text", "binary"):
            data = self.data()
            return data.decode() if kind == "text" else data
        return self.number(kind)


def parse(version: int, first: int, body: bytes, size: int = 0) -> Packet:
    """Decode a packet that a server sent. Raises AssertionError or KeyError if it is malformed."""
    kind, flags, read = KINDS[first >> 4], first & 15, _Reader(body)
    if kind == "PUBLISH":
        topic = read.data().decode()
        packet_id = read.number("H") if flags & 6 else 0
        values = read.properties() if version == 5 else {}
        return Packet(
            kind=kind,
            flags=flags,
            topic=topic,
            packet_id=packet_id,
            properties=values,
            payload=read.take(read.left),
            size=size,
        )
    fields: dict[str, object] = {}
    if kind == "CONNACK":
        acknowledge_flags = read.number("B")
        assert acknowledge_flags in (0, 1), "reserved bits of a CONNACK are set"  # [MQTT-3.2.2-1]
        fields = {"present": bool(acknowledge_flags), "reason": read.number("B")}
        assert version < 5 or read.left, "a CONNACK has properties"
    elif kind in ("SUBACK", "UNSUBACK"):
        fields["packet_id"] = read.number("H")
    elif kind in ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP"):
        fields["packet_id"] = read.number("H")
        fields["reason"] = read.number("B") if version == 5 and read.left else 0
    elif kind in ("DISCONNECT", "AUTH"):
        fields["reason"] = read.number("B") if read.left else 0
    values = read.properties() if version == 5 else {}
    if kind in ("SUBACK", "UNSUBACK"):
        fields["reasons"] = tuple(read.take(read.left))
    assert not read.left, f"a {kind} has {read.left} bytes too many"
    return Packet(kind=kind, flags=flags, properties=values, size=size, **fields)  # type: ignore[arg-type]
