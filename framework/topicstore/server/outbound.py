"""What one client is sent: packets as bytes, topic aliases, and what is too large for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topicstore.contract.model import Message
from topicstore.sessions import DeliveryBatch, Publish, PubRel

from .protocol.encoding import publish_parts

__all__ = ["Outbound", "Shared", "allowance"]

_Parts = tuple[bytes, bytes]
"""What stands before the packet id of a PUBLISH, and what behind it."""


class Shared:
    """What was encoded for several clients that are sent the same messages.

    It is kept by the identity of messages and batches, so it is to live no longer than the packets it was made for.
    """

    __slots__ = ("bodies", "messages")

    def __init__(self) -> None:
        self.messages: dict[tuple[object, ...], _Parts] = {}
        self.bodies: dict[tuple[int, int], list[_Parts]] = {}


_PUBREL = b"\x62\x02"
_FIXED = 4
"""Bytes that a PUBLISH has at least, besides its payload: its first byte, a length, and the length of its topic."""


class Outbound:
    """Makes the packets of one connection. Used in the event loop only."""

    __slots__ = ("_aliases", "_largest", "_most_aliases", "_version")

    def __init__(self, version: int, largest: int | None, most_aliases: int) -> None:
        """``largest``: the client's maximum packet size; ``most_aliases``: how many topic aliases it may be sent."""
        self._version = version
        self._largest = largest
        self._most_aliases = most_aliases
        self._aliases: dict[str, int] = {}

    def encode(
        self, packets: Sequence[Publish | PubRel | DeliveryBatch], shared: Shared | None
    ) -> tuple[list[bytes], int, list[Publish]]:
        """Return the pieces of bytes to send, how many publishes are in them, and those too large for the client.

        shared: what was encoded for others that are sent the same messages; None if there are no others.
        """
        pieces: list[bytes] = []
        too_large: list[Publish] = []
        published = 0
        if self._most_aliases:
            shared = None
        for packet in packets:
            if isinstance(packet, PubRel):
                pieces.append(_PUBREL + packet.packet_id.to_bytes(2))
            elif isinstance(packet, Publish):
                published += self._add(packet, shared, pieces, too_large)
            elif shared is not None and self._largest is None and self._add_all(packet, shared, pieces):
                published += len(packet)
            else:
                published += sum([self._add(one, shared, pieces, too_large) for one in packet.packets()])
        return pieces, published, too_large

    def _add(self, packet: Publish, shared: Shared | None, pieces: list[bytes], too_large: list[Publish]) -> bool:
        """Add the pieces of a packet, unless it is too large; return whether they were added."""
        known, largest = len(self._aliases), self._largest
        try:
            before, after = self._parts(packet) if shared is None else _shared_parts(self._version, packet, shared)
            fits = largest is None or len(before) + len(after) + (2 if packet.qos else 0) <= largest
        except ValueError:  # with its topic and properties it is larger than any packet can be
            fits = False
        if not fits:
            too_large.append(packet)
            if len(self._aliases) > known:  # the client won't be told what the new one stands for
                del self._aliases[packet.message.topic]
        elif packet.qos:
            pieces += (before, packet.packet_id.to_bytes(2), after)
        else:
            pieces += (before, after)
        return fits

    def _add_all(self, batch: DeliveryBatch, shared: Shared, pieces: list[bytes]) -> bool:
        """Add the pieces of a batch, encoded once for all that are sent it; return False if one packet is too large."""
        key = id(batch.body), self._version
        parts = shared.bodies.get(key)
        if parts is None:
            try:
                parts = [_shared_parts(self._version, packet, shared) for packet in batch.packets()]
            except ValueError:
                return False
            shared.bodies[key] = parts
        for (before, after), packet_id in zip(parts, batch.packet_ids, strict=True):
            if packet_id:
                pieces += (before, packet_id.to_bytes(2), after)
            else:
                pieces += (before, after)
        return True

    def _parts(self, packet: Publish) -> _Parts:
        topic = packet.message.topic
        if not self._most_aliases:
            return publish_parts(self._version, packet, topic, 0)
        alias = self._aliases.get(topic)
        if alias is not None:
            return publish_parts(self._version, packet, "", alias)
        if len(self._aliases) < self._most_aliases:
            alias = self._aliases[topic] = len(self._aliases) + 1
        return publish_parts(self._version, packet, topic, alias or 0)


def _shared_parts(version: int, packet: Publish, shared: Shared) -> _Parts:
    key = (
        id(packet.message),
        version,
        packet.qos << 2 | packet.dup << 1 | packet.retain,
        packet.subscription_identifiers,
        packet.expiry,
    )
    parts = shared.messages.get(key)
    if parts is None:
        parts = shared.messages[key] = publish_parts(version, packet, packet.message.topic, 0)
    return parts


def allowance(
    largest: int | None, may_receive: Callable[[Sequence[str]], list[bool | None]] | None
) -> Callable[[Sequence[Message]], list[bool | None]] | None:
    """Return what says which messages a client may be sent (`topicstore.sessions.Sessions.open`); None: all.

    largest:     the client's maximum packet size. Refused is what is larger in any case; whether a packet really fits
                 is known only with its topic alias and its subscription identifiers [MQTT-3.1.2-24].
    may_receive: says for each of some topics whether it may be sent their messages; None: that isn't known yet.
    """
    if largest is None and may_receive is None:
        return None
    most = None if largest is None else largest - _FIXED

    def allowed(messages: Sequence[Message]) -> list[bool | None]:
        if may_receive is None:
            return [most is None or len(message.payload) <= most for message in messages]
        answers = may_receive([message.topic for message in messages])
        if most is None:
            return answers
        return [
            answer if len(message.payload) <= most else False for message, answer in zip(messages, answers, strict=True)
        ]

    return allowed
