"""`DeliveryBatch`: messages for one session's client as columns, which sessions with the same messages share.

The packets of a session wait in sending order, as batches and as single packets. The functions of this module count
them, split them, and convert batches to single packets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import msgspec

from topicstore.contract.model import Message

from .credit import fitting
from .model import Publish, PubRel
from .portions import Portion

__all__ = ["DeliveryBatch", "Packet", "count_of", "cut", "single"]


class DeliveryBatch(msgspec.Struct, frozen=True, eq=False):
    """Messages to send to a session's client for the first time, one PUBLISH each, as columns of equal length.

    A column whose values are all equal may be that one value.
    """

    packet_ids: Sequence[int]
    """The packet ids, 1 to 65,535; 0 for messages of QoS 0."""
    body: Portion
    """The columns other than the packet ids. Sessions that receive the same messages with the same options at the same
    time share one object, unless the messages can expire. A server can cache encoded packets by this object, as long as
    it holds the batch. The attributes of the object are not public."""

    def __len__(self) -> int:
        return len(self.body.messages)

    @property
    def messages(self) -> Sequence[Message]:
        """The messages."""
        return self.body.messages

    @property
    def qos(self) -> int | Sequence[int]:
        """The QoS of delivery; see `Publish.qos`."""
        return self.body.qos

    @property
    def retain(self) -> bool | Sequence[bool]:
        """The RETAIN flags to send; see `Publish.retain`."""
        return self.body.retain

    @property
    def subscription_identifiers(self) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        """The subscription identifiers: one tuple if they are equal for all messages, otherwise a list of tuples."""
        return self.body.identifiers()

    @property
    def expiry(self) -> Sequence[int | None] | None:
        """The messages' remaining expiry intervals in seconds; None if no message has one."""
        return self.body.expiry

    def packets(self) -> list[Publish]:
        """Return the messages as `Publish` objects."""
        body = self.body
        qos = repeat(body.qos) if isinstance(body.qos, int) else body.qos
        retain = repeat(body.retain) if isinstance(body.retain, bool) else body.retain
        found = body.identifiers()
        identifiers = repeat(found) if isinstance(found, tuple) else found
        if not (found or body.retain or body.expiry):
            return list(map(Publish, self.packet_ids, body.messages, qos))
        expiry = body.expiry or repeat(None)
        return list(map(Publish, self.packet_ids, body.messages, qos, repeat(False), retain, identifiers, expiry))


Packet = Publish | PubRel | DeliveryBatch
"""One packet, or several of them as a batch."""


def count_of(packets: Iterable[Packet]) -> int:
    """Return the number of packets, including those in batches."""
    return sum(len(one) if isinstance(one, DeliveryBatch) else 1 for one in packets)


def single(packets: Sequence[Packet]) -> list[Publish | PubRel]:
    """Return packets with batches converted to `Publish` objects."""
    found: list[Publish | PubRel] = []
    for one in packets:
        if isinstance(one, DeliveryBatch):
            found += one.packets()
        else:
            found.append(one)
    return found


def cut(packets: list[Packet], limit: int, max_bytes: int | None) -> tuple[list[Packet], list[Publish | PubRel]]:
    """Split packets into at most ``limit`` first ones, and the rest as single packets.

    max_bytes: the most bytes of payload of the first packets, of which there is at least one; None: no limit.
    """
    taken: list[Packet] = []
    for at, one in enumerate(packets):
        size = 0
        if max_bytes is not None:
            size = 0 if isinstance(one, PubRel) else _size(one)
        count = len(one) if isinstance(one, DeliveryBatch) else 1
        if count <= limit and (max_bytes is None or size <= max_bytes):
            taken.append(one)
            limit -= count
            max_bytes = None if max_bytes is None else max_bytes - size
            continue
        others = single(packets[at:])
        if max_bytes is not None:
            limit = min(limit, fitting(others, max_bytes, least=0 if taken else 1))
        return taken + others[:limit], others[limit:]
    return taken, []


def _size(one: Publish | DeliveryBatch) -> int:
    if isinstance(one, Publish):
        return len(one.message.payload)
    return sum(len(message.payload) for message in one.body.messages)
