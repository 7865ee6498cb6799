"""`Outbox`: the packets of a session that are committed but not handed out yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from topicstore.pubsub.message_expiry import seconds_left

from .delivery_batch import Packet, Permit, cut, single
from .in_flight import InFlight
from .model import Publish, PubRel

__all__ = ["Outbox"]


class Outbox:
    """The queue of committed packets of one session. Used under the sessions' mutex.

    Packets that an earlier call left are single packets, not batches.
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
            if packet.dup:  # the client may have received the packet id
                self._in_flight.vanished(packet.packet_id)
            elif packet.packet_id:
                self._in_flight.cancel(packet.packet_id)
        self._permit.refused += len(gone)
        self.packets = [packet for packet in packets if id(packet) not in gone]
        self.revised = False
        return bool(gone)
