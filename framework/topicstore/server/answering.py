"""The answers to a client's publishes: PUBACK and PUBREC, with reason codes where the protocol version has them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs

from topicstore.contract.errors import SessionEndedError

from .asked import PublishedPart
from .channel import Counted
from .inbound import Pending
from .packet_types import PUBACK, PUBCOMP, PUBREC
from .protocol.encoding import pubacks
from .protocol.reason import ReasonCode
from .refusals import reason_of_message

__all__ = ["Verdict", "answer_publishes", "answer_pubrels"]

_FIRST = {PUBACK: 0x40020000, PUBREC: 0x50020000, PUBCOMP: 0x70020000}
"""By type, an acknowledgement without a reason code as a 32-bit integer; its low 16 bits take the packet id."""
_DROPPED = frozenset((ReasonCode.NOT_AUTHORIZED, ReasonCode.TOPIC_NAME_INVALID))
"""Reasons for which a publish of MQTT 3.1.1 is acknowledged and dropped [MQTT-3.3.5-2]: a retry would fail, too."""


@attrs.frozen
class Verdict:
    """The acknowledgements of a client's publishes."""

    data: bytes
    packets: Sequence[Counted] = ()
    """The packets in ``data``, counted by type and reason code."""
    over: Sequence[int] = ()
    """The packet ids of QoS 2 exchanges that ended because the publish was refused."""
    refused: int = 0
    """Number of refused publishes."""
    end: str | None = None
    """Why the connection must end, if the protocol version cannot report that a publish failed; else None."""


def answer_publishes(version: int, part: PublishedPart) -> Verdict:
    """Return the acknowledgements of a client's publishes, for each QoS in the order of arrival [MQTT-4.6.0-2]."""
    pending: Pending = part.what
    if part.refused or pending.refused or (version == 5 and not all(part.matched)):
        return _each(version, part, pending)
    if not pending.ids2:
        return Verdict(_plain(PUBACK, pending.ids1), ((PUBACK, 0, len(pending.ids1)),))
    data = _plain(PUBACK, pending.ids1) + _plain(PUBREC, pending.ids2)
    return Verdict(data, ((PUBACK, 0, len(pending.ids1)), (PUBREC, 0, len(pending.ids2))))


def _each(version: int, part: PublishedPart, pending: Pending) -> Verdict:
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
    if any(isinstance(error, SessionEndedError) for error in part.refused.values()):
        return Verdict(b"", refused=refused)  # the connection ends, and the client resends unacknowledged messages
    if version == 4 and any(reason >= 0x80 and reason not in _DROPPED for reason in reasons.values()):
        return Verdict(b"", refused=refused, end=text)
    acks = [(one, reasons.get((1, one), 0)) for one in pending.ids1]
    receipts = [(one, reasons.get((2, one), 0)) for one in pending.ids2]
    return Verdict(
        pubacks(version, PUBACK, acks) + pubacks(version, PUBREC, receipts),
        [*_counted(PUBACK, acks), *_counted(PUBREC, receipts)],
        [one for one, reason in receipts if reason >= 0x80 and version == 5],
        refused,
    )


def answer_pubrels(version: int, ids: Sequence[int], known: Sequence[bool]) -> tuple[bytes, Sequence[Counted]]:
    """Return the PUBCOMPs of PUBRELs, as bytes and counted; ``known``: whether each packet id was in use."""
    if all(known) or version == 4:
        return _plain(PUBCOMP, ids), ((PUBCOMP, 0, len(ids)),)
    unknown, good = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND, ReasonCode.SUCCESS
    rows = [(one, int(good if due else unknown)) for one, due in zip(ids, known, strict=True)]
    return pubacks(version, PUBCOMP, rows), _counted(PUBCOMP, rows)


def _counted(kind: int, rows: Sequence[tuple[int, int]]) -> list[Counted]:
    """Count acknowledgements by reason code."""
    counted, left = [], [reason for _, reason in rows]
    while left:  # one pass for each code: with one or two codes, comparing is faster than hashing
        first = left[0]
        number = left.count(first)
        counted.append((kind, int(first), number))
        left = [] if number == len(left) else [reason for reason in left if reason != first]
    return counted


def _plain(kind: int, ids: Sequence[int]) -> bytes:
    """Encode acknowledgements without a reason code."""
    first = _FIRST[kind]
    return struct.pack(f">{len(ids)}I", *[first | packet_id for packet_id in ids])
