"""A client's CONNECT: authentication and authorization, and the terms of the connection, limited by settings."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from topicstore.contract.errors import InvalidTopicError
from topicstore.contract.model import Message
from topicstore.contract.topics import check_topic
from topicstore.server.access.access import Access, Identity, Login, Refusal
from topicstore.server.access.bans import Ban
from topicstore.server.access.permissions import Permissions
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.packets import NEVER, ConnectPacket
from topicstore.server.codec.reason import PacketError, ReasonCode, sendable
from topicstore.server.config.model import Limits, ProtocolSettings, ServerSettings
from topicstore.server.listeners.peer import Peer
from topicstore.sessions import Connect, Will
from topicstore.sessions.delivery_batch import Allow

from .connections import Serving
from .reserved_topics import SHARE, may_be_published

__all__ = [
    "Admission",
    "Refused",
    "Terms",
    "admit",
]

_AROUND = 16
"""Upper bound of the bytes that a packet has besides its reason string."""
_LONGEST_TEXT = 65_535
"""Most bytes of a UTF-8 encoded string (MQTT 5, section 1.5.4)."""


@attrs.frozen
class Terms:
    """The terms of one connection: the requests of the client's CONNECT, limited by the server's settings."""

    packet: ConnectPacket
    client_id: str
    """The client id of the CONNECT, or the one that the server assigns."""
    keep_alive: float
    """Keep alive in seconds; 0: none."""
    expiry: float | None
    """Session expiry: seconds that the session lasts after the connection; None: for ever."""
    longest: float | None
    """The server's limit of session expiry, in seconds; None: no limit."""
    receive_maximum: int
    """Most messages of QoS 1 and 2 that are in flight to the client."""
    aliases: int
    """Most topic aliases that the server uses towards the client."""
    batch_size: int
    """Most packets that the client's session takes from the store at once."""

    @classmethod
    def of(cls, packet: ConnectPacket, settings: ServerSettings, zone: str | None) -> Terms:
        """Return the terms for a CONNECT under the settings of a zone; `refusal` checks whether it is accepted."""
        protocol, limits, sessions = settings.protocol, settings.limits, settings.sessions_of(zone)
        longest: float | None = protocol.max_session_expiry
        if not sessions.enable:  # no stored session is resumed, and none is stored
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
        """Return the reason code and text with which the server refuses the CONNECT; None: it is accepted."""
        packet = self.packet
        if _longer(packet.client_id, limits.client_id_length):
            text = f"the client id has more than {limits.client_id_length:,} bytes"
            return ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text
        if packet.user_name is not None and _longer(packet.user_name, limits.user_name_length):
            text = f"the user name has more than {limits.user_name_length:,} bytes"
            return ReasonCode.BAD_USER_NAME_OR_PASSWORD, text
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
        """Whether the server assigned the client id."""
        return not self.packet.client_id

    def connect(self, allow: Allow | None, user: str | None) -> Connect:
        """Return the request that opens the session; ``allow`` decides which messages the client may receive."""
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
            allow=allow,
            overlapping="once",
            in_memory=packet.clean_start and self.expiry == 0 and will is None,
            batch_size=self.batch_size,
            user=user or "",
        )

    def without_secrets(self) -> Terms:
        """Return the terms without fields that only the CONNECT needs, so that no password stays in memory."""
        packet = self.packet
        if not any((packet.will, packet.user_name, packet.password, packet.user_properties)):
            return self
        packet = msgspec.structs.replace(packet, will=None, user_name=None, password=None, user_properties=())
        return attrs.evolve(self, packet=packet)

    def reason_string(self, text: str, others: int = 0) -> str | None:
        """Return a reason string for a packet with ``others`` bytes besides; None if the client must not get one.

        A client may refuse reason strings [MQTT-3.1.2-29], and the packet must not exceed its maximum packet size.
        """
        packet, reason = self.packet, sendable(text)
        most = packet.maximum_packet_size
        fits = most is None or len(reason.encode()) + others + _AROUND <= most  # [MQTT-3.2.2-19] [MQTT-3.14.2-3]
        return reason if packet.request_problem_information and fits else None

    def changed_expiry(self, seconds: int) -> float | None:
        """Return the session expiry that a DISCONNECT sets, in seconds; None: never. Raises `PacketError`."""
        if seconds and self.packet.session_expiry == 0:
            text = "a session that ends with its connection can't be kept (MQTT 5, section 3.14.2.2.2)"
            raise PacketError(ReasonCode.PROTOCOL_ERROR, text)
        return _least(seconds, self.longest)

    def connack(
        self, settings: ServerSettings, user: str | None, present: bool = False, reason_string: str | None = None
    ) -> bytes:
        """Return the CONNACK that accepts the client; ``reason_string`` explains it."""
        properties = self._properties(settings.protocol, settings.limits, user) if self.packet.version == 5 else {}
        return encoding.connack(
            self.packet.version, ReasonCode.SUCCESS, present, reason_string=reason_string, **properties
        )

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
            if len(text.encode()) <= _LONGEST_TEXT:  # a client id of 64 KiB makes it too long
                found["response_information"] = text
        return found


def _filled(text: str, names: dict[str, str]) -> str:
    """Replace placeholders in a text; placeholders within the inserted names are not replaced."""
    return re.sub("|".join(names), lambda found: names[found[0]], text)


def _longer(text: str, most: int) -> bool:
    return len(text) > most or len(text.encode()) > most


def _least(seconds: int, longest: float | None) -> float | None:
    """Return the session expiry in seconds, at most ``longest``; None: for ever."""
    if seconds == NEVER:
        return longest
    return float(seconds) if longest is None else min(float(seconds), longest)


def _keep_alive(packet: ConnectPacket, most: float | None) -> float:
    """Return the keep alive in seconds. In MQTT 3.1.1 the server can't change the client's value."""
    asked = packet.keep_alive
    if packet.version == 4 or most is None or 0 < asked <= most:
        return float(asked)
    return float(max(int(most), 1))


_WHY = {
    "credentials": ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    "forbidden": ReasonCode.NOT_AUTHORIZED,
    "client id": ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    "unavailable": ReasonCode.SERVER_UNAVAILABLE,
}


_BANNED = {"client": "client id", "user": "user", "address": "client's address"}


@attrs.frozen
class Refused:
    """The refusal of a client's CONNECT."""

    reason: ReasonCode
    text: str


_UNDECIDED = Refused(ReasonCode.SERVER_UNAVAILABLE, "it can't be found out now what the client may do")


@attrs.frozen
class Admission:
    """The identity and the permissions of a client whose CONNECT was accepted."""

    access: Access
    """The access rules that decided."""
    identity: Identity
    permissions: Permissions
    forbidden: list[str]
    """The filters of the client's stored session that the client may no longer subscribe to."""


async def admit(serving: Serving, terms: Terms, peer: Peer) -> Admission | Refused:
    """Authenticate a client and check its permissions. Waits only for plugins, passwords and stored sessions."""
    packet, access = terms.packet, serving.access
    identity = await _identified(serving, access, terms, peer)
    if isinstance(identity, Refused):
        return identity
    permissions = access.permissions(identity)
    if permissions.unrestricted:
        return Admission(access, identity, permissions, [])
    if packet.will is not None:
        [allowed] = await permissions.decide("publish", [packet.will.topic])
        if allowed is None:
            return _UNDECIDED
        if not allowed:
            return Refused(ReasonCode.NOT_AUTHORIZED, "the client may not publish its will")
    forbidden: list[str] = []
    if not packet.clean_start:
        filters = await serving.filters_of(terms.client_id)
        if filters is None:
            return _UNDECIDED
        decided = await permissions.decide("subscribe", _plain(filters))
        if None in decided:
            return _UNDECIDED  # to unsubscribe an undecided filter would drop its waiting messages
        forbidden = [text for text, good in zip(filters, decided, strict=True) if not good]
    return Admission(access, identity, permissions, forbidden)


async def _identified(serving: Serving, access: Access, terms: Terms, peer: Peer) -> Identity | Refused:
    """Authenticate a client that is not banned, neither by the name that it gives nor by the one that it gets."""
    packet = terms.packet
    names = [packet.user_name, peer.certificate_name]
    ban = await serving.bans.find(terms.client_id, names, peer.host)
    if ban is not None:
        return _banned(ban)
    identity = await access.authenticate(
        Login(
            client_id=terms.client_id,
            assigned=terms.assigned,
            user_name=packet.user_name,
            password=packet.password,
            peer=peer,
        )
    )
    if isinstance(identity, Refusal):
        return Refused(_WHY[identity.why], identity.text)
    if identity.user is not None and identity.user not in names:  # a plugin has returned another user name
        ban = await serving.bans.find(terms.client_id, [identity.user], peer.host)
    return identity if ban is None else _banned(ban)


def _banned(ban: Ban) -> Refused:
    return Refused(ReasonCode.BANNED, f"the {_BANNED[ban.kind]} is banned")


def _plain(filters: Sequence[str]) -> list[str]:
    """Return topic filters without the ``$share/<group>/`` prefix of shared subscriptions."""
    return [text.split("/", 2)[2] if text.startswith(SHARE) else text for text in filters]
