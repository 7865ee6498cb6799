"""Acknowledgements in both directions.

A client's publishes are acknowledged with PUBACK and PUBREC, with reason codes where the protocol version has them.
The acknowledgements that a client sends are gathered over consecutive packets, and passed on together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs

from topicstore.contract.errors import SessionEndedError
from topicstore.server.codec.encode import pubacks
from topicstore.server.codec.packets import PUBACK, PUBCOMP, PUBREC, PUBREL, AckPacket
from topicstore.server.codec.reason import ReasonCode, is_passing, reason_of, reason_of_message
from topicstore.sessions import Publish, Session

from .channel import Channel, Counted
from .publish import Pending
from .store_thread import Client, PublishedPart, RequestBatch

__all__ = [
    "PublishAnswer",
    "ReceivedAcks",
    "answer_publishes",
    "answer_pubrels",
    "complete",
]

_REFUSED = -PUBREC
"""The kind under which PUBRECs with a failure code are gathered."""


class ReceivedAcks:
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
            with_reason = sum([of == kind for of, _ in self._reasons]) if self._reasons else 0
            if len(ids) > with_reason:
                channel.came(kind, packets=len(ids) - with_reason)
        for kind, reason in self._reasons:
            channel.came(abs(kind), reason)

    def pass_on(self, client: Client, session: Session, requests: RequestBatch) -> bool:
        """Pass the acknowledgements to the session and the next batch; return whether the batch will answer any.

        Raises an error of `OVER`.
        """
        for kind, ids in self._ids.items():
            if kind == PUBACK:
                session.puback(*ids)
            elif kind == PUBCOMP:
                session.pubcomp(*ids)
            elif kind == PUBREL:
                requests.pubrels.append((client, session, ids))
            else:
                requests.pubrecs.append((client, session, ids, kind != _REFUSED))
        return not self._ids.keys() <= {PUBACK, PUBCOMP}


def complete(session: Session, packets: Sequence[Publish]) -> None:
    """Acknowledge messages that are not sent to the client, on the client's behalf. Raises an error of `OVER`."""
    for packet in packets:
        if packet.qos == 1:
            session.puback(packet.packet_id)
        elif packet.qos:
            session.pubrec(packet.packet_id, accepted=False)


_FIRST = {PUBACK: 0x40020000, PUBREC: 0x50020000, PUBCOMP: 0x70020000}
"""By type, an acknowledgement without a reason code as a 32-bit integer; its low 16 bits take the packet id."""
_DROPPED = frozenset((ReasonCode.NOT_AUTHORIZED, ReasonCode.TOPIC_NAME_INVALID))
"""Reasons for which a publish of MQTT 3.1.1 is acknowledged and dropped [MQTT-3.3.5-2]: a retry would fail, too."""


@attrs.frozen
class PublishAnswer:
    """The acknowledgements of a client's publishes."""

    data: bytes
    packets: Sequence[Counted] = ()
    """The packets in ``data``, counted by type and reason code."""
    over: Sequence[int] = ()
    """The packet ids of QoS 2 exchanges that ended because the publish was refused."""
    refused: int = 0
    """Number of refused publishes."""
    end: str | None = None
    """Why the connection must end, if the protocol version cannot report that a publish failed, or if the client must
    send the publish again; else None."""
    reason: ReasonCode = ReasonCode.QUOTA_EXCEEDED
    """The reason code of that end."""


def answer_publishes(version: int, part: PublishedPart) -> PublishAnswer:
    """Return the acknowledgements of a client's publishes, for each QoS in the order of arrival [MQTT-4.6.0-2]."""
    pending: Pending = part.what
    if part.refused or pending.refused or (version == 5 and not all(part.matched)):
        return _each(version, part, pending)
    if not pending.ids2:
        return PublishAnswer(_plain(PUBACK, pending.ids1), ((PUBACK, 0, len(pending.ids1)),))
    data = _plain(PUBACK, pending.ids1) + _plain(PUBREC, pending.ids2)
    return PublishAnswer(data, ((PUBACK, 0, len(pending.ids1)), (PUBREC, 0, len(pending.ids2))))


def _each(version: int, part: PublishedPart, pending: Pending) -> PublishAnswer:
    reasons: dict[tuple[int, int], int] = dict(pending.refused)
    text = "a publish was refused"
    for number, (_, message, packet_id) in enumerate(part.rows):
        error = part.refused.get(number)
        if error is not None:
            reasons[message.qos, packet_id] = reason_of_message(error, message.topic)
            text = str(error)
        elif version == 5 and not part.matched[number]:
            reasons.setdefault((message.qos, packet_id), ReasonCode.NO_MATCHING_SUBSCRIBERS)
    refused = sum(reason >= 0x80 for reason in reasons.values())
    passing = next((error for error in part.refused.values() if is_passing(error)), None)
    if passing is not None:  # a shard of other clients may have moved, which doesn't end this client's session
        return PublishAnswer(b"", refused=refused, end=str(passing), reason=reason_of(passing))
    if any(isinstance(error, SessionEndedError) for error in part.refused.values()):
        return PublishAnswer(b"", refused=refused)  # the connection ends; the client resends after the next one
    if version == 4 and any(reason >= 0x80 and reason not in _DROPPED for reason in reasons.values()):
        return PublishAnswer(b"", refused=refused, end=text)
    acks = [(one, reasons.get((1, one), 0)) for one in pending.ids1]
    pubrecs = [(one, reasons.get((2, one), 0)) for one in pending.ids2]
    return PublishAnswer(
        pubacks(version, PUBACK, acks) + pubacks(version, PUBREC, pubrecs),
        [*_counted(PUBACK, acks), *_counted(PUBREC, pubrecs)],
        [one for one, reason in pubrecs if reason >= 0x80 and version == 5],
        refused,
    )


def answer_pubrels(version: int, ids: Sequence[int], known: Sequence[bool]) -> tuple[bytes, Sequence[Counted]]:
    """Return the PUBCOMPs of PUBRELs, and their counts; ``known``: whether each packet id was in use."""
    if all(known) or version == 4:
        return _plain(PUBCOMP, ids), ((PUBCOMP, 0, len(ids)),)
    unknown, good = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND, ReasonCode.SUCCESS
    rows = [(one, int(good if due else unknown)) for one, due in zip(ids, known, strict=True)]
    return pubacks(version, PUBCOMP, rows), _counted(PUBCOMP, rows)


def _counted(kind: int, rows: Sequence[tuple[int, int]]) -> list[Counted]:
    """Count acknowledgements by reason code."""
    counted, left = [], [reason for _, reason in rows]
    while left:  # a pass for each reason code: there are few, and comparing is faster than hashing
        first = left[0]
        number = left.count(first)
        counted.append((kind, int(first), number))
        left = [] if number == len(left) else [reason for reason in left if reason != first]
    return counted


def _plain(kind: int, ids: Sequence[int]) -> bytes:
    """Encode acknowledgements without a reason code."""
    first = _FIRST[kind]
    return struct.pack(f">{len(ids)}I", *[first | packet_id for packet_id in ids])
