"""The acknowledgements that one client sends, gathered over consecutive packets and handed on together."""

from __future__ import annotations

from collections.abc import Sequence

from topicstore.sessions import Publish, Session

from .asked import Asked, Client
from .channel import Channel
from .packet_types import PUBACK, PUBCOMP, PUBREC, PUBREL
from .protocol.packets import AckPacket

__all__ = ["Receipts", "complete"]

_REFUSED = -PUBREC
"""The kind under which PUBRECs with a failure code are gathered."""


class Receipts:
    """The acknowledgements in consecutive packets of one client, by kind."""

    __slots__ = ("_ids", "_reasons")

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._reasons: list[tuple[int, int]] = []
        """Kind and reason code of the acknowledgements that have a reason code other than 0."""

    def add(self, kind: int, packet_id: int) -> None:
        """Add an acknowledgement without a reason code."""
        ids = self._ids.get(kind)
        if ids is None:
            ids = self._ids[kind] = []
        ids.append(packet_id)

    def add_packet(self, packet: AckPacket) -> None:
        """Add a decoded acknowledgement, with its reason code."""
        kind = _REFUSED if packet.kind == PUBREC and packet.reason >= 0x80 else packet.kind
        self.add(kind, packet.packet_id)
        if packet.reason:
            self._reasons.append((kind, packet.reason))

    def count(self, channel: Channel) -> None:
        """Count the acknowledgements as received packets."""
        for kind, ids in self._ids.items():
            told = sum([of == kind for of, _ in self._reasons]) if self._reasons else 0
            if len(ids) > told:
                channel.came(kind, packets=len(ids) - told)
        for kind, reason in self._reasons:
            channel.came(abs(kind), reason)

    def hand_on(self, client: Client, session: Session, asked: Asked) -> bool:
        """Pass the acknowledgements to the session and the next batch; return whether the batch has an answer for them.

        Raises `SessionEndedError`.
        """
        for kind, ids in self._ids.items():
            if kind == PUBACK:
                session.puback(*ids)
            elif kind == PUBCOMP:
                session.pubcomp(*ids)
            elif kind == PUBREL:
                asked.pubrels.append((client, session, ids))
            else:
                asked.pubrecs.append((client, session, ids, kind != _REFUSED))
        return not self._ids.keys() <= {PUBACK, PUBCOMP}


def complete(session: Session, packets: Sequence[Publish]) -> None:
    """Acknowledge messages that are not sent to the client, in its place. Raises `SessionEndedError`."""
    for packet in packets:
        if packet.qos == 1:
            session.puback(packet.packet_id)
        elif packet.qos:
            session.pubrec(packet.packet_id, accepted=False)
