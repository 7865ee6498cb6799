"""Encoding of the packets that one client receives: topic aliases, and its maximum packet size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topicstore.contract.model import Message
from topicstore.server.codec.encode import publish_parts
from topicstore.sessions import DeliveryBatch, Publish, PubRel

__all__ = ["Outbound", "Shared", "allowance"]

_Parts = tuple[bytes, bytes]
"""The bytes of a PUBLISH before its packet id, and the bytes after it."""


class Shared:
    """A cache of encoded packets for several clients that receive the same messages.

    Its keys are identities (`id`) of messages and batches, so it must not outlive the packets that it was made for.
    """

    __slots__ = ("bodies", "messages")

    def __init__(self) -> None:
        self.messages: dict[tuple[object, ...], _Parts] = {}
        self.bodies: dict[tuple[int, int], list[_Parts]] = {}


_PUBREL = b"\x62\x02"
_FIXED = 4
"""Fewest bytes of a PUBLISH besides its payload: its first byte, a length, and the length of its topic."""


class Outbound:
    """Encodes the packets for one connection. Used in the event loop only."""

    __slots__ = ("_aliases", "_largest", "_most_aliases", "_version")

    def __init__(self, version: int, largest: int | None, most_aliases: int) -> None:
        """``largest``: the client's maximum packet size; ``most_aliases``: its topic alias maximum."""
        self._version = version
        self._largest = largest
        self._most_aliases = most_aliases
        self._aliases: dict[str, int] = {}

    def encode(
        self, packets: Sequence[Publish | PubRel | DeliveryBatch], shared: Shared | None
    ) -> tuple[list[bytes], int, list[Publish]]:
        """Return the bytes to send in pieces, the number of publishes in them, and publishes too large for the client.

        shared: a cache of packets encoded for other clients; None if there are no other clients.
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
        """Append the pieces of a packet, unless it is too large; return whether they were appended."""
        known, largest = len(self._aliases), self._largest
        try:
            before, after = self._parts(packet) if shared is None else _shared_parts(self._version, packet, shared)
            fits = largest is None or len(before) + len(after) + (2 if packet.qos else 0) <= largest
        except ValueError:  # with topic and properties, the packet is larger than MQTT allows
            fits = False
        if not fits:
            too_large.append(packet)
            if len(self._aliases) > known:  # the client does not learn the new alias
                del self._aliases[packet.message.topic]
        elif packet.qos:
            pieces += (before, packet.packet_id.to_bytes(2), after)
        else:
            pieces += (before, after)
        return fits

    def _add_all(self, batch: DeliveryBatch, shared: Shared, pieces: list[bytes]) -> bool:
        """Append the pieces of a batch, encoded once for all its clients; return False if a packet is too large."""
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
    """Return the function that decides which messages a client may receive; None if the client may receive all.

    The function is the argument ``allow`` of `topicstore.sessions.Sessions.open`.

    largest:     the client's maximum packet size in bytes. A message with a larger payload is refused. Whether a packet
                 with topic and properties fits is known only after encoding [MQTT-3.1.2-24].
    may_receive: decides for each topic whether the client may receive its messages; None: not known yet.
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
