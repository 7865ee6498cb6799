"""What a session has in flight: packet ids, what each waits for, and how that is stored.

Messages that are delivered together are a *flight*: one record. It is written when they are sent,
and removed by the next write after all of them were acknowledged, so that a commit costs what
was delivered since the last one, however much is in flight. PUBRECs are written the same way, as
a record of the packet ids whose PUBREL goes out next.

An id is used while it waits for anything: a PUBACK, a PUBREC, the commit of its PUBREC, or a
PUBCOMP. Each of these is a dictionary here, and an id is in one at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat

import attrs
import numpy as np

from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite

from .model import SubscribeOptions
from .records import (
    VERSION,
    FlightRecord,
    Keys,
    PackedPositions,
    decode,
    pack_ids,
    pack_positions,
    put,
    unpack_ids,
    unpack_positions,
)

__all__ = ["MAX_PACKET_ID", "Flight", "InflightWindow", "Released", "Staged"]

MAX_PACKET_ID = 65_535
_FEW = 8
"""Acknowledgements that are dealt with one by one more quickly than together."""


class Flight:
    """Messages that one subscription delivered together, from one shard, in the order of their packet ids."""

    __slots__ = (
        "ids",
        "left",
        "number",
        "options",
        "packed",
        "positions",
        "qos",
        "shard",
        "topic_filter",
        "topics",
        "unsent",
        "written",
    )

    def __init__(
        self,
        number: int,
        topic_filter: str,
        shard: int,
        options: SubscribeOptions,
        ids: Sequence[int],
        qos: int | Sequence[int],
        positions: Positions,
        topics: Sequence[str] = (),
        packed: PackedPositions | None = None,
    ) -> None:
        self.number = number
        self.topic_filter = topic_filter
        self.shard = shard
        self.options = options
        self.ids = ids
        self.qos = qos
        self.positions = positions
        self.topics = topics
        """Of retained messages, in place of positions."""
        self.packed = packed
        """The positions as they are stored, if somebody packed them already."""
        self.left = len(ids)
        """How many wait for their PUBACK or PUBREC."""
        self.written = self.left
        """How many did when it was last written."""
        self.unsent: dict[int, int] | None = None
        """After a resumption: ids, with their rows, that were not sent on this connection yet."""

    def qos_of(self, row: int) -> int:
        """Return the QoS of a row."""
        return self.qos if isinstance(self.qos, int) else self.qos[row]

    def sent(self, packet_id: int) -> None:
        """A message was sent again, or needs it no more."""
        if self.unsent:
            self.unsent.pop(packet_id, None)

    def rows(self, rows: Sequence[int]) -> Flight:
        """Return a flight of these rows alone, under the same number."""
        qos = self.qos if isinstance(self.qos, int) else [self.qos[row] for row in rows]
        ids = [self.ids[row] for row in rows]
        positions, topics = self.positions, self.topics
        if topics:
            topics = [topics[row] for row in rows]
        else:
            positions = positions[np.fromiter(rows, np.intp, len(rows))]
        return Flight(self.number, self.topic_filter, self.shard, self.options, ids, qos, positions, topics)

    def record(self) -> FlightRecord:
        """Return what is stored of it."""
        first, steps, width = self.packed or pack_positions(self.positions)
        qos = self.qos if isinstance(self.qos, int) else bytes(self.qos)
        ids = pack_ids(self.ids)
        return FlightRecord(
            VERSION, self.topic_filter, self.shard, self.options, ids, qos, first, steps, width, tuple(self.topics)
        )

    @classmethod
    def of(cls, number: int, record: FlightRecord) -> Flight:
        """Return the flight of a record."""
        positions = unpack_positions(record.first, record.steps, record.width)
        ids = unpack_ids(record.ids, len(record.topics) or len(positions))
        qos = record.qos if isinstance(record.qos, int) else list(record.qos)
        return cls(number, record.topic_filter, record.shard, record.options, ids, qos, positions, record.topics)


class Released:
    """Packet ids whose PUBRECs were committed together: their PUBRELs may be sent, their PUBCOMPs are due."""

    __slots__ = ("ids", "left", "number", "written")

    def __init__(self, number: int, ids: list[int]) -> None:
        self.number = number
        self.ids = ids
        self.left = len(ids)
        self.written = self.left


@attrs.define
class Staged:
    """Changes of a window that are to be committed together."""

    writes: list[StateWrite]
    flights: list[Flight]
    """New ones."""
    released: Released | None
    rewritten: list[Flight | Released]
    finished: int
    """How many finished ones it removes."""


class InflightWindow:
    """The packet ids of one session. Not for several threads at once."""

    __slots__ = (
        "_again",
        "_finished",
        "_received",
        "_stored",
        "awaiting_puback",
        "awaiting_pubcomp",
        "awaiting_pubrec",
        "keys",
        "next_id",
        "next_number",
        "resend",
    )

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.next_id = 1
        self.next_number = 1
        self.awaiting_puback: dict[int, Flight] = {}
        self.awaiting_pubrec: dict[int, Flight] = {}
        self._received: dict[int, Flight] = {}
        """PUBRECs that are not committed, in the order they came."""
        self.awaiting_pubcomp: dict[int, Released] = {}
        self._stored: dict[int, Flight | Released] = {}
        """By number, what the store holds of flights and ids to release."""
        self._finished: list[Flight | Released] = []
        """Those of which nothing is left."""
        self._again: list[int] = []
        """Ids whose PUBREL goes out once more."""
        self.resend: list[Flight] = []  # a deque takes 760 bytes, also in an idle session
        """Flights of earlier connections, oldest first, with ids that were not sent again yet."""

    # --- packet ids ---

    def __len__(self) -> int:
        """Return how many packet ids are in use."""
        return len(self.awaiting_puback) + len(self.awaiting_pubrec) + len(self._received) + len(self.awaiting_pubcomp)

    def unsent(self) -> int:
        """Return how many ids in use were not sent on this connection yet."""
        return sum(len(flight.unsent or ()) for flight in self.resend)

    def free_ids(self, count: int) -> Sequence[int]:
        """Return ``count`` ids that are not in use, in the order they come by. Nobody has them yet.

        There must be as many: `len` plus ``count`` is at most `MAX_PACKET_ID`.
        """
        first = self.next_id
        all_: tuple[Mapping[int, object], ...]
        all_ = (self.awaiting_puback, self.awaiting_pubrec, self._received, self.awaiting_pubcomp)
        used = [some for some in all_ if some]
        straight = range(first, first + count)
        if straight.stop <= MAX_PACKET_ID + 1 and all(some.keys().isdisjoint(straight) for some in used):
            return straight
        following = chain(range(first, MAX_PACKET_ID + 1), range(1, first))
        free = (packet_id for packet_id in following if not any(packet_id in some for some in used))
        return list(islice(free, count))

    # --- acknowledgements ---

    def puback(self, packet_id: int) -> bool:
        """A message was received; return whether its PUBACK was due."""
        flight = self.awaiting_puback.pop(packet_id, None)
        if flight is None:
            return False
        self._over(flight, packet_id)
        return True

    def puback_many(self, packet_ids: Iterable[int]) -> int:
        """Messages were received; return of how many the PUBACK was due."""
        ids = packet_ids if isinstance(packet_ids, (list, tuple, range)) else list(packet_ids)
        if len(ids) < _FEW:
            return sum(map(self.puback, ids))
        flights = Counter(filter(None, map(self.awaiting_puback.pop, ids, repeat(None))))
        for flight, count in flights.items():
            for packet_id in ids if flight.unsent else ():
                flight.sent(packet_id)
            flight.left -= count
            if not flight.left:
                self._finished.append(flight)
        return flights.total()

    def pubrec(self, packet_id: int, *, accepted: bool = True) -> bool:
        """A QoS 2 message was received, or refused; return whether the id was in an exchange of QoS 2.

        After a refusal the exchange is over. The PUBREC of an id whose PUBREL was sent has it sent again.
        """
        flight = self.awaiting_pubrec.pop(packet_id, None)
        if flight is None:
            if packet_id in self.awaiting_pubcomp:
                self._again.append(packet_id)
                return True
            return packet_id in self._received
        if accepted:
            self._received[packet_id] = flight
        self._over(flight, packet_id)
        return True

    def pubcomp(self, packet_id: int) -> bool:
        """An exchange of QoS 2 is over; return whether its PUBCOMP was due."""
        released = self.awaiting_pubcomp.pop(packet_id, None)
        if released is None:
            return False
        released.left -= 1
        if not released.left:
            self._finished.append(released)
        return True

    def _over(self, flight: Flight, packet_id: int) -> None:
        """An id leaves its flight."""
        flight.sent(packet_id)
        flight.left -= 1
        if not flight.left:
            self._finished.append(flight)

    # --- committing ---

    @property
    def received(self) -> int:
        """How many PUBRECs wait to be committed, so that their PUBRELs can be sent."""
        return len(self._received) + len(self._again)

    def stage(self, flights: Sequence[Flight], *, whole: bool) -> Staged:
        """Return the changes to commit with these new flights.

        PUBRECs are among them always; PUBACKs and PUBCOMPs that leave their record something only
        with ``whole``. Nothing changes before `settle`.
        """
        keys, stored = self.keys, self._stored
        number = self.next_number
        writes = []
        released = None
        if self._received:
            released = Released(number, list(self._received))
            writes.append(put(keys.released(number), (VERSION, pack_ids(released.ids))))
            number += 1
        for new in flights:
            new.number = number
            writes.append(put(keys.flight(number), new.record()))
            number += 1
        rewritten = self._to_rewrite(whole=whole)
        writes += map(self._rewrite, rewritten)
        writes += [FrameworkWrite(self._key(gone), None) for gone in self._finished if gone.number in stored]
        return Staged(writes, list(flights), released, rewritten, len(self._finished))

    def settle(self, staged: Staged) -> list[int]:
        """What was staged is committed; return the packet ids to send PUBRELs for."""
        for gone in self._finished[: staged.finished]:
            self._stored.pop(gone.number, None)
        del self._finished[: staged.finished]
        for changed in staged.rewritten:
            changed.written = changed.left
        again, self._again = self._again, []
        if staged.released is not None:
            self._received.clear()
            self._adopt_released(staged.released)
            again += staged.released.ids
        for flight in staged.flights:
            self.adopt(flight)
        if not self._stored:  # dictionaries keep the room they once needed
            self.awaiting_puback, self.awaiting_pubrec, self.awaiting_pubcomp = {}, {}, {}
        return again

    def adopt(self, flight: Flight) -> None:
        """Take a flight that is stored: its ids are in use now."""
        self._stored[flight.number] = flight
        self.next_number = flight.number + 1
        ids = flight.ids
        self.next_id = ids[-1] % MAX_PACKET_ID + 1
        if flight.qos == 1:
            self.awaiting_puback.update(zip(ids, repeat(flight)))
        elif flight.qos == 2:
            self.awaiting_pubrec.update(zip(ids, repeat(flight)))
        else:
            for row, packet_id in enumerate(ids):
                waiting = self.awaiting_puback if flight.qos_of(row) == 1 else self.awaiting_pubrec
                waiting[packet_id] = flight

    def _adopt_released(self, released: Released) -> None:
        self._stored[released.number] = released
        self.next_number = released.number + 1
        self.awaiting_pubcomp.update(zip(released.ids, repeat(released)))

    def _to_rewrite(self, *, whole: bool) -> list[Flight | Released]:
        if not whole:
            shrunk = dict.fromkeys(self._received.values())  # these ids are released now, and no part of them
            return [flight for flight in shrunk if flight.left]
        return [kept for kept in self._stored.values() if 0 < kept.left < kept.written]

    def _rewrite(self, kept: Flight | Released) -> StateWrite:
        key = self._key(kept)
        if isinstance(kept, Released):
            return put(key, (VERSION, pack_ids([i for i in kept.ids if self.awaiting_pubcomp.get(i) is kept])))
        return put(key, kept.rows(self._waiting(kept)).record())

    def _waiting(self, flight: Flight) -> list[int]:
        """Return the rows of a flight that wait for their PUBACK or PUBREC."""
        puback, pubrec = self.awaiting_puback, self.awaiting_pubrec
        return [row for row, i in enumerate(flight.ids) if puback.get(i) is flight or pubrec.get(i) is flight]

    def _key(self, kept: Flight | Released) -> bytes:
        keys = self.keys
        return keys.flight(kept.number) if isinstance(kept, Flight) else keys.released(kept.number)

    # --- resuming ---

    def load(self, flights: Iterator[tuple[bytes, bytes]], released: Iterator[tuple[bytes, bytes]]) -> None:
        """Take up what is stored, into an empty window: all is to be sent again."""
        found: list[Flight | Released] = [
            Flight.of(_number_of(key), decode(key, value, FlightRecord)) for key, value in flights
        ]
        for key, value in released:
            _, ids = decode(key, value, tuple[int, bytes])
            found.append(Released(_number_of(key), list(unpack_ids(ids, len(ids) // 2))))
        found.sort(key=lambda kept: kept.number)
        for kept in found:
            self._supersede(kept.ids)
            if isinstance(kept, Flight):
                self.adopt(kept)
            else:
                self._adopt_released(kept)
        self._again = list(self.awaiting_pubcomp)
        for kept in found:
            if isinstance(kept, Flight) and kept.left:
                kept.unsent = {kept.ids[row]: row for row in self._waiting(kept)}
                self.resend.append(kept)

    def _supersede(self, ids: Iterable[int]) -> None:
        """Take ids from whatever had them: they were free when they were written anew."""
        for packet_id in ids:
            holders = (self.awaiting_puback, self.awaiting_pubrec, self.awaiting_pubcomp)
            for holder in holders:
                kept: Flight | Released | None = holder.pop(packet_id, None)
                if kept is not None:
                    kept.left -= 1
                    if not kept.left:
                        self._finished.append(kept)

    def vanished(self, packet_id: int) -> None:
        """A message that was to be sent again can't be read any more.

        At QoS 1 its exchange is over. At QoS 2 the client may have received it and keep its id from
        being used: it is told to forget it, as if its PUBREC had come.
        """
        if not self.puback(packet_id):
            self.pubrec(packet_id)


def _number_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
