"""Valid packets of all types that a client sends, and random mutations of them for fuzzing."""

from __future__ import annotations

import random
from typing import Any

from . import wire

__all__ = ["Changes", "samples"]

_MESSAGE: dict[str, Any] = {
    "payload_format_indicator": 1,
    "message_expiry_interval": 60,
    "content_type": "text/plain",
    "response_topic": "back/here",
    "correlation_data": b"\0\1\2",
    "user_property": [("a", "1"), ("a", "2"), ("水", "é")],
}
_WILL = wire.Will(
    topic="last/will", payload=b"gone", qos=1, retain=True, properties={"will_delay_interval": 5, **_MESSAGE}
)


def samples(version: int) -> list[bytes]:
    """Return valid packets of all types that a client sends in this protocol version, 4 or 5."""
    plain = [
        wire.connect("me", version=version, keep_alive=60),
        wire.connect("me", version=version, clean=False, will=_WILL, user_name="user", password=b"secret"),
        wire.publish("a/b", b"x" * 20, version=version),
        wire.publish("fleet/eu/bus-7/speed", b"41.5", qos=1, packet_id=7, version=version),
        wire.publish("é/水", b"", qos=2, packet_id=65_535, retain=True, dup=True, version=version),
        *(wire.acknowledgement(kind, 7) for kind in ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP")),
        wire.subscribe(7, [("a/+/b", 1), ("$share/group/#", 2)], version=version),
        wire.unsubscribe(7, ["a/+/b", "#"], version=version),
        wire.PINGREQ,
        wire.disconnect(version=version),
    ]
    if version == 4:
        return plain
    return [
        *plain,
        wire.connect(
            "", session_expiry_interval=60, receive_maximum=10, maximum_packet_size=1000, user_property=[("a", "b")]
        ),
        wire.connect("me", topic_alias_maximum=9, request_response_information=1, request_problem_information=0),
        wire.connect("me", authentication_method="plain", authentication_data=b"\0me\0secret"),
        wire.publish("a/b", b"x" * 20, qos=1, packet_id=7, **_MESSAGE),
        wire.publish("", b"x" * 20, qos=1, packet_id=7, topic_alias=3),
        *(wire.acknowledgement(kind, 7, 0x92) for kind in ("PUBREL", "PUBCOMP")),
        wire.frame("PUBACK", 0, b"\0\7\x87", wire.properties(reason_string="no", user_property=[("a", "b")])),
        wire.subscribe(7, [("a/+/b", 0x2D)], subscription_identifier=200, user_property=[("a", "b")]),
        wire.unsubscribe(7, ["a"], user_property=[("a", "b")]),
        wire.disconnect(4, session_expiry_interval=60, reason_string="bye"),
        wire.auth(0x18, authentication_method="plain", authentication_data=b"x"),
    ]


class Changes:
    """A generator of packets with one to four random mutations; the same seed yields the same packets."""

    def __init__(self, packets: list[bytes], seed: int) -> None:
        self._packets, self._chance = packets, random.Random(seed)
        self._ways = [self._flip, self._put, self._insert, self._remove, self._repeat, self._graft]

    def _flip(self, data: bytearray, at: int) -> None:
        data[at] ^= 1 << self._chance.randrange(8)

    def _put(self, data: bytearray, at: int) -> None:
        data[at] = self._chance.choice((0, 1, 0x7F, 0x80, 0xFF, self._chance.randrange(256)))

    def _insert(self, data: bytearray, at: int) -> None:
        data[at:at] = self._chance.randbytes(self._chance.randint(1, 4))

    def _remove(self, data: bytearray, at: int) -> None:
        del data[at : at + self._chance.randint(1, 4)]

    def _repeat(self, data: bytearray, at: int) -> None:
        data[at:at] = data[at : self._chance.randint(at, len(data))]

    def _graft(self, data: bytearray, at: int) -> None:
        other = self._chance.choice(self._packets)
        data[at:] = other[min(at, len(other)) :]

    def packet(self) -> bytes:
        """Return a mutated packet. Most get a correct length field, so that the server parses the rest."""
        data = bytearray(self._chance.choice(self._packets))
        for _ in range(self._chance.randint(1, 4)):
            if data:
                self._chance.choice(self._ways)(data, self._chance.randrange(len(data)))
        if self._chance.random() < 0.8 and len(data) > 2:
            return bytes(data[:1]) + wire.variable(len(data) - 2) + bytes(data[2:])
        return bytes(data)
