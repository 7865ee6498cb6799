"""`Outbox`: the packets of a session that are committed but not handed out yet.

After a resumption, messages in flight are read again (`read_again`), to be sent again (MQTT 5, section 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.message_expiry import left_of, seconds_left
from topicstore.pubsub.retained_lookup import RetainedMessages

from .delivery_batch import Packet, Permit, cut, single
from .in_flight import InFlight, InFlightBatch
from .model import Publish, PubRel, read_filter

__all__ = ["Outbox", "delivery_again", "read_again"]


class Outbox:
    """The queue of committed packets of one session. Used under the sessions' mutex.

    Packets that a call of `take` has left in the queue are single packets, not batches.
    """

    __slots__ = ("_clock", "_in_flight", "_permit", "packets", "read_at", "revised", "waited")

    def __init__(self, in_flight: InFlight, permit: Permit, clock: Callable[[], int]) -> None:
        self._in_flight, self._permit, self._clock = in_flight, permit, clock
        self.packets: list[Packet] = []
        self.read_at = 0
        """The time at which the messages were read and their remaining expiry intervals were computed."""
        self.waited = False
        """Whether the packets were left by an earlier call."""
        self.revised = False
        """Whether ``allow`` was replaced after the packets were added, so that `revise` must be called."""

    def add(self, packets: Sequence[Packet]) -> None:
        """Add packets that were just committed, or need no commit."""
        self.packets += packets
        self.waited = False

    def take(self, limit: int, max_bytes: int | None) -> tuple[list[Packet], bool]:
        """Remove and return the packets to hand out; also return whether expired packets freed packet ids."""
        taken, rest = cut(self.packets, limit, max_bytes)
        self.packets, freed = [*rest], False
        if self.waited:
            unexpired, freed = self._unexpired(taken, self._clock())
            taken = [*unexpired]
        self.waited = True
        return taken, freed

    def put_back(self, packets: Sequence[Packet]) -> bool:
        """Take back packets that were not handed out; return whether expired packets freed packet ids."""
        now = self._clock()
        unexpired, freed = self._unexpired(self.packets, now)
        self.packets = [*single(packets), *unexpired]
        self.read_at = now
        return freed

    def _unexpired(self, packets: Sequence[Packet], now: int) -> tuple[list[Publish | PubRel], bool]:
        """Return the packets that have not expired, with their remaining expiry; and whether packet ids became free.

        Packets that may have been sent on an earlier connection don't expire [MQTT-4.3.3-7].
        """
        left: list[Publish | PubRel] = []
        freed = False
        for packet in single(packets):
            if isinstance(packet, PubRel) or packet.expiry is None:
                left.append(packet)
                continue
            expiry = seconds_left(packet.expiry, self.read_at, now)
            if expiry > 0 or packet.dup:
                left.append(msgspec.structs.replace(packet, expiry=expiry))
            elif packet.packet_id:
                self._in_flight.cancel(packet.packet_id)
                freed = True
        return left, freed

    def revise(self) -> bool | None:
        """Remove the packets that ``allow`` refuses; return whether there were any.

        Returns None, and removes nothing, if ``allow`` doesn't know an answer yet.
        """
        packets = list(single(self.packets))
        sent = [packet for packet in packets if isinstance(packet, Publish)]
        answers = self._permit.answers([packet.message for packet in sent])
        if answers is None:
            return None
        gone = {id(packet): packet for packet, answer in zip(sent, answers, strict=True) if not answer}
        for packet in gone.values():
            if packet.dup:  # the client may know the packet id already
                self._in_flight.vanished(packet.packet_id)
            elif packet.packet_id:
                self._in_flight.cancel(packet.packet_id)
        self._permit.refused += len(gone)
        self.packets = [packet for packet in packets if id(packet) not in gone]
        self.revised = False
        return bool(gone)


def read_again(
    batch: InFlightBatch, rows: list[int], hub: Hub, retained: RetainedMessages
) -> dict[int, Message | None]:
    """Return the messages of these rows of an in-flight batch; None for messages that were deleted.

    Messages in flight don't expire [MQTT-4.3.3-7].
    """
    if batch.copies:
        return {row: batch.copies[row] for row in rows}
    if batch.topics:  # retained messages in a record of an old release, without copies
        return dict(zip(rows, retained.of([batch.topics[row] for row in rows]), strict=True))
    found: dict[int, Message | None] = {}
    for topic_filter, some in _by_filter(batch, rows).items():
        positions = [int(batch.positions[row]) for row in some]
        fetched = hub.feed(read_filter(topic_filter)).fetch(batch.shard, positions)
        found.update((row, fetched.get(position)) for row, position in zip(some, positions, strict=True))
    return found


def _by_filter(batch: InFlightBatch, rows: list[int]) -> dict[str, list[int]]:
    """Group rows by the topic filter with which their messages are read."""
    if not batch.matched:
        return {batch.topic_filter: rows}
    by_filter: dict[str, list[int]] = {}
    for row in rows:
        by_filter.setdefault(batch.matched[batch.which[row]].topic_filter, []).append(row)
    return by_filter


def delivery_again(batch: InFlightBatch, packet_id: int, row: int, message: Message, now: int) -> Publish:
    """Return the PUBLISH that sends a row of an in-flight batch again, with DUP and the same packet id."""
    options, retained, matched = batch.options, bool(batch.topics), batch.matched_of(row)
    as_published = options.retain_as_published
    identifiers: tuple[int, ...] = (options.identifier,) if options.identifier else ()
    if matched is not None:
        as_published, identifiers = matched.retain_as_published, matched.identifiers
    since = (batch.since or now) if retained else time_of(int(batch.positions[row]))
    return Publish(
        packet_id,
        message,
        batch.qos_of(row),
        dup=True,
        retain=retained or (as_published and message.retain),
        subscription_identifiers=identifiers,
        expiry=left_of(message, since, now),
    )
