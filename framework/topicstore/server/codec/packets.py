"""The packet types, and the decoded packets that clients send. PUBLISH has no class: it becomes a `topicstore.Message`.

Source: MQTT Version 5.0 (OASIS Standard), section 2.1.2 and chapter 3. A packet of MQTT 3.1.1 has the default values of
MQTT 5's absent properties, so that users of this package need not check the version.
"""

from __future__ import annotations

import msgspec

from topicstore.contract.model import Properties

__all__ = [
    "CONNACK",
    "CONNECT",
    "DISCONNECT",
    "INVALID",
    "NAMES",
    "NEVER",
    "PINGRESP",
    "PUBACK",
    "PUBCOMP",
    "PUBLISH",
    "PUBREC",
    "PUBREL",
    "SHORT",
    "SUBACK",
    "UNSUBACK",
    "AckPacket",
    "AuthPacket",
    "ConnectPacket",
    "DisconnectPacket",
    "Packet",
    "PingPacket",
    "SubscribePacket",
    "UnsubscribePacket",
    "WillPacket",
]

INVALID = 0
"""Not a type of the standard: invalid packets are counted under it."""
CONNECT, CONNACK, PUBLISH = 1, 2, 3
PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7
SUBACK, UNSUBACK, PINGRESP, DISCONNECT = 9, 11, 13, 14
NAMES = (
    *("invalid", "connect", "connack", "publish", "puback", "pubrec", "pubrel", "pubcomp"),
    *("subscribe", "suback", "unsubscribe", "unsuback", "pingreq", "pingresp", "disconnect", "auth"),
)
"""The names of packet types in metrics, by type."""
SHORT = {0x40: PUBACK, 0x50: PUBREC, 0x62: PUBREL, 0x70: PUBCOMP}
"""The types of acknowledgements by their first byte."""


NEVER = 0xFFFF_FFFF
"""The session expiry interval of a session that never ends (section 3.1.2.11.2)."""


class WillPacket(msgspec.Struct, gc=False, frozen=True):
    """The will in a CONNECT (section 3.1.2.5)."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    delay: int
    """Seconds from the loss of the connection to the publication of the will."""
    properties: Properties | None


class ConnectPacket(msgspec.Struct, gc=False, frozen=True):
    """A CONNECT (section 3.1)."""

    version: int
    """The protocol's version: 4 is MQTT 3.1.1, 5 is MQTT 5."""
    client_id: str
    """The client id. If it is empty, the server assigns one; in MQTT 3.1.1 only with ``clean_start``."""
    clean_start: bool
    keep_alive: int
    """The keep alive in seconds; 0: none."""
    user_name: str | None
    password: bytes | None
    will: WillPacket | None
    session_expiry: int
    """Session expiry in seconds. 0: the session ends with the connection, as with MQTT 3.1.1's Clean Session. `NEVER`:
    the session doesn't expire."""
    receive_maximum: int = 65_535
    maximum_packet_size: int | None = None
    topic_alias_maximum: int = 0
    request_response_information: bool = False
    request_problem_information: bool = True
    user_properties: tuple[tuple[str, str], ...] = ()
    authentication_method: str | None = None
    authentication_data: bytes | None = None

    def __repr__(self) -> str:
        return f"ConnectPacket(version={self.version}, client_id={self.client_id!r}, …)"  # omits the secrets


class SubscribePacket(msgspec.Struct, gc=False, frozen=True):
    """A SUBSCRIBE (section 3.8). Its filters are not checked by the rules of section 4.7."""

    packet_id: int
    filters: list[tuple[str, int]]
    """Filters with their valid subscription options, the byte of section 3.8.3.1; in MQTT 3.1.1 the QoS."""
    identifier: int = 0
    """The subscription identifier; 0: none."""
    user_properties: tuple[tuple[str, str], ...] = ()


class UnsubscribePacket(msgspec.Struct, gc=False, frozen=True):
    """An UNSUBSCRIBE (section 3.10)."""

    packet_id: int
    filters: list[str]
    user_properties: tuple[tuple[str, str], ...] = ()


class AckPacket(msgspec.Struct, gc=False, frozen=True):
    """A PUBACK, PUBREC, PUBREL or PUBCOMP (sections 3.4 to 3.7)."""

    kind: int
    """The type of the packet: 4 PUBACK, 5 PUBREC, 6 PUBREL, 7 PUBCOMP."""
    packet_id: int
    reason: int


class DisconnectPacket(msgspec.Struct, gc=False, frozen=True):
    """A DISCONNECT (section 3.14)."""

    reason: int
    session_expiry: int | None = None
    """Session expiry in seconds, `NEVER`, or None: as in the CONNECT."""
    reason_string: str | None = None


class PingPacket(msgspec.Struct, gc=False, frozen=True):
    """A PINGREQ (section 3.12)."""


class AuthPacket(msgspec.Struct, gc=False, frozen=True):
    """An AUTH (section 3.15)."""

    reason: int
    method: str
    data: bytes | None


Packet = ConnectPacket | SubscribePacket | UnsubscribePacket | AckPacket | DisconnectPacket | PingPacket | AuthPacket
"""Any packet that `decoding.decode` returns."""
