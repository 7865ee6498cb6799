"""From a CONNECT to a session: what the client asks for, and what it is granted."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from topicstore.contract.errors import InvalidTopicError
from topicstore.contract.model import Message
from topicstore.contract.topics import check_topic
from topicstore.sessions import Connect, Will

from .limits import Limits
from .outbound import allowance
from .protocol import encoding
from .protocol.packets import NEVER, ConnectPacket
from .protocol.reason import PacketError, ReasonCode
from .reserved_topics import may_be_published
from .settings import ProtocolSettings, ServerSettings

__all__ = ["Terms", "sendable"]

_LONGEST_TEXT = 65_535
"""Bytes of a text (MQTT 5, section 1.5.4)."""

_AROUND = 16
"""Bytes that a packet with a reason string has around it, or a few fewer."""


@attrs.frozen
class Terms:
    """What a client and the server agree on."""

    packet: ConnectPacket
    client_id: str
    """The client's own, or the one that it is given."""
    keep_alive: float
    """Seconds; 0: none."""
    expiry: float | None
    """Seconds that the session lasts after the connection; None: for ever."""
    longest: float | None
    """Seconds that the server keeps any session; None: there is no limit."""
    receive_maximum: int
    """How many messages of QoS 1 and 2 the client is sent before it acknowledges them."""
    aliases: int
    """How many topic aliases it is sent."""
    batch_size: int
    """How many packets its session takes at once."""

    @classmethod
    def of(cls, packet: ConnectPacket, settings: ServerSettings, zone: str | None) -> Terms:
        """Return what is granted to a client of a zone, if it isn't refused."""
        protocol, limits, sessions = settings.protocol, settings.limits, settings.sessions_of(zone)
        longest: float | None = protocol.max_session_expiry
        if not sessions.enable:  # nothing that was kept is taken up, and nothing is kept
            packet, longest = msgspec.structs.replace(packet, clean_start=True), 0.0
        return cls(
            packet,
            packet.client_id or f"auto-{uuid.uuid4().hex}",
            _keep_alive(packet, protocol.max_keep_alive),
            _least(packet.session_expiry, longest),
            longest,
            min(packet.receive_maximum, limits.in_flight_out),
            min(packet.topic_alias_maximum, limits.topic_aliases),
            sessions.batch_size,
        )

    def refusal(self, limits: Limits) -> tuple[ReasonCode, str] | None:
        """Return why the server doesn't take such a CONNECT; None: it does."""
        packet = self.packet
        if packet.authentication_method is not None:
            return ReasonCode.BAD_AUTHENTICATION_METHOD, "there is no enhanced authentication"
        if packet.will is not None:
            topic = packet.will.topic
            try:
                check_topic(topic)
            except InvalidTopicError as bad:
                return ReasonCode.TOPIC_NAME_INVALID, f"the will's topic: {bad}"
            if not may_be_published(topic, limits.topic_levels):
                return ReasonCode.TOPIC_NAME_INVALID, "the will's topic can't be published to"
        return None

    @property
    def assigned(self) -> bool:
        """Whether the client was given its client id."""
        return not self.packet.client_id

    def connect(self, may_receive: Callable[[str], bool] | None) -> Connect:
        """Return how the session is opened."""
        packet = self.packet
        will = None
        if packet.will is not None:
            asked = packet.will
            message = Message(
                asked.topic, asked.payload, self.client_id, asked.qos, asked.retain, None, asked.properties
            )
            will = Will(message, asked.delay)
        return Connect(
            client_id=self.client_id,
            clean_start=packet.clean_start,
            expiry_interval=self.expiry,
            receive_maximum=self.receive_maximum,
            keep_alive=self.keep_alive,
            will=will,
            allow=allowance(packet.maximum_packet_size, may_receive),
            overlapping="once",
            in_memory=packet.clean_start and self.expiry == 0 and will is None,
            batch_size=self.batch_size,
        )

    def told(self, text: str, others: int) -> str | None:
        """Return a reason string, if the client wants to be told [MQTT-3.1.2-29] and the packet stays small enough.

        ``others``: the bytes that the packet has besides.
        """
        packet, told = self.packet, sendable(text)
        most = packet.maximum_packet_size
        fits = most is None or len(told.encode()) + others + _AROUND <= most  # [MQTT-3.2.2-19] [MQTT-3.14.2-3]
        return told if packet.request_problem_information and fits else None

    def settled(self) -> Terms:
        """Return the terms without what only the CONNECT needs: nobody's password is kept while it is connected."""
        packet = msgspec.structs.replace(self.packet, will=None, user_name=None, password=None, user_properties=())
        return attrs.evolve(self, packet=packet)

    def changed_expiry(self, seconds: int) -> float | None:
        """Return how long the session lasts if a DISCONNECT asks for it, as `expiry`. Raises `PacketError`."""
        if seconds and self.packet.session_expiry == 0:
            text = "a session that ends with its connection can't be kept (MQTT 5, section 3.14.2.2.2)"
            raise PacketError(ReasonCode.PROTOCOL_ERROR, text)
        return _least(seconds, self.longest)

    def connack(
        self, settings: ServerSettings, user: str | None, present: bool = False, told: str | None = None
    ) -> bytes:
        """Return the CONNACK of a client that is let in; ``told``: its reason string."""
        properties = self._properties(settings.protocol, settings.limits, user) if self.packet.version == 5 else {}
        return encoding.connack(self.packet.version, ReasonCode.SUCCESS, present, reason_string=told, **properties)

    def _properties(self, protocol: ProtocolSettings, limits: Limits, user: str | None) -> dict[str, Any]:
        """Return the properties of the CONNACK (MQTT 5, section 3.2.2.3)."""
        packet = self.packet
        found: dict[str, Any] = {
            "receive_maximum": limits.in_flight,
            "maximum_packet_size": int(limits.packet_size),
            "topic_alias_maximum": limits.topic_aliases,
        }
        if self.assigned:
            found["assigned_client_id"] = self.client_id
        if self.keep_alive != packet.keep_alive:
            found["server_keep_alive"] = int(self.keep_alive)
        if self.expiry is not None and self.expiry != packet.session_expiry:
            found["session_expiry"] = int(self.expiry)
        if packet.request_response_information and protocol.response_information:
            names = {"%c": self.client_id, "%u": user or ""}
            text = _filled(protocol.response_information, names)
            if len(text.encode()) <= _LONGEST_TEXT:  # with a client id of 64 KiB in it, it can't be sent
                found["response_information"] = text
        return found


def sendable(text: str) -> str:
    """Return a reason string that fits into any packet."""
    return text[:200].replace("\0", "")


def _filled(text: str, names: dict[str, str]) -> str:
    """Return a text with names in it; what stands in a name is not looked at again."""
    parts: list[str] = []
    while text:
        name = names.get(text[:2])
        parts.append(text[:1] if name is None else name)
        text = text[1 if name is None else 2 :]
    return "".join(parts)


def _least(seconds: int, longest: float | None) -> float | None:
    """Return how long a session lasts; None: for ever."""
    if seconds == NEVER:
        return longest
    return float(seconds) if longest is None else min(float(seconds), longest)


def _keep_alive(packet: ConnectPacket, most: float | None) -> float:
    """Return the keep-alive that holds. A client of MQTT 3.1.1 can't be told another one than its own."""
    asked = packet.keep_alive
    if packet.version == 4 or most is None or 0 < asked <= most:
        return float(asked)
    return float(max(int(most), 1))
