"""MQTT's packet types (MQTT 5, section 2.1.2), also used by `protocol.packets.AckPacket.kind`."""

from __future__ import annotations

__all__ = [
    "CONNACK",
    "DISCONNECT",
    "INVALID",
    "NAMES",
    "PINGRESP",
    "PUBACK",
    "PUBCOMP",
    "PUBLISH",
    "PUBREC",
    "PUBREL",
    "SHORT",
    "SUBACK",
    "UNSUBACK",
]

INVALID = 0
"""Not a type of the standard: invalid packets are counted under it."""
CONNACK, PUBLISH = 2, 3
PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7
SUBACK, UNSUBACK, PINGRESP, DISCONNECT = 9, 11, 13, 14
NAMES = (
    *("invalid", "connect", "connack", "publish", "puback", "pubrec", "pubrel", "pubcomp"),
    *("subscribe", "suback", "unsubscribe", "unsuback", "pingreq", "pingresp", "disconnect", "auth"),
)
"""The names of packet types in metrics, by type."""
SHORT = {0x40: PUBACK, 0x50: PUBREC, 0x62: PUBREL, 0x70: PUBCOMP}
"""The types of acknowledgements by their first byte."""
