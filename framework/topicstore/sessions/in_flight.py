"""The messages that a session has in flight: their packet ids, the packet that each waits for, and their records.

Messages that are delivered together are an *in-flight batch*, stored as one record. The record is written when the
messages are sent, and removed by the next write after all of them were acknowledged. So the cost of a commit depends on
the number of deliveries since the last commit, not on the number of messages in flight. PUBRECs are stored likewise, as
a record of the packet ids whose PUBREL is sent next.

An id is in use while it waits for a PUBACK, a PUBREC, the commit of its PUBREC, or a PUBCOMP (MQTT 5, sections 2.2.1
and 4.3). `InFlight` has a dictionary for each of these four states; an id is in at most one dictionary.

Acknowledgements may come in any thread, at any time, also between `InFlight.stage` and `apply`, while the staged
changes are being committed. So a window has a lock of its own, which is held for a few microseconds and never while
anything is read or written.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat

import attrs
import numpy as np

from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.runtime.empty import EMPTY_DICT, EMPTY_LIST
from topicstore.shard.state import FrameworkWrite

from .model import SubscribeOptions
from .records import (
    MERGED,
    VERSION,
    InFlightRecord,
    Keys,
    Matched,
    MergedInFlightRecord,
    PackedPositions,
    StoredInFlight,
    copy_of,
    decode,
    pack_ids,
    pack_positions,
    put,
    unpack_ids,
    unpack_positions,
)

__all__ = ["MAX_PACKET_ID", "InFlight", "InFlightBatch", "Released", "StagedChanges"]

MAX_PACKET_ID = 65_535
_NO_IDS: frozenset[int] = frozenset()  # shared: each `frozenset()` would take 216 bytes
_FEW = 8
"""Number of acknowledgements up to which handling them one by one is faster than together."""


class InFlightBatch:
    """Messages that were delivered together, from one shard, in the order of their packet ids.

    They belong to one subscription or, if the session delivers each message once, to several that overlap.
    """

    __slots__ = (
        "copies",
        "ids",
        "left",
        "matched",
        "number",
        "options",
        "packed",
        "positions",
        "qos",
        "shard",
        "since",
        "topic_filter",
        "topics",
        "unsent",
        "which",
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
        matched: tuple[Matched, ...] = (),
        which: Sequence[int] = (),
        copies: Sequence[Message] = (),
        since: int = 0,
    ) -> None:
        self.number = number
        self.topic_filter = topic_filter
        self.shard = shard
        self.options = options
        self.ids = ids
        self.qos = qos
        self.positions = positions
        self.topics = topics
        """The topics of retained messages, in place of positions."""
        self.copies = copies
        """Copies of the retained messages, which may be replaced while in flight; empty in in-flight batches
        of old releases."""
        self.since = since
        """The time at which the remaining expiry intervals of `copies` were computed."""
        self.packed = packed
        """The positions as they are stored, if they are packed already."""
        self.matched = matched
        """The sets of overlapping subscriptions that its messages matched; empty if it is of one subscription."""
        self.which = which
        """By row, the index of the row's set in `matched`, if that isn't empty."""
        self.left = len(ids)
        """The number of messages that wait for their PUBACK or PUBREC."""
        self.written = self.left
        """The value of `left` when the record was last written."""
        self.unsent: dict[int, int] | None = None
        """After a resumption, the ids that were not sent on this connection yet, mapped to their rows."""

    def qos_of(self, row: int) -> int:
        """Return the QoS at which the message of a row is delivered."""
        return self.qos if isinstance(self.qos, int) else self.qos[row]

    def matched_of(self, row: int) -> Matched | None:
        """Return the overlapping subscriptions that a row matched; None if its batch is of one subscription."""
        return self.matched[self.which[row]] if self.matched else None

    def sent(self, packet_id: int) -> None:
        """Record that a message was sent again, or need not be sent again."""
        if self.unsent:
            self.unsent.pop(packet_id, None)

    def rows(self, rows: Sequence[int]) -> InFlightBatch:
        """Return an in-flight batch with only these rows, under the same number."""
        qos = self.qos if isinstance(self.qos, int) else [self.qos[row] for row in rows]
        ids = [self.ids[row] for row in rows]
        positions, topics, copies = self.positions, self.topics, self.copies
        if topics:
            topics = [topics[row] for row in rows]
            copies = [copies[row] for row in rows] if copies else ()
        else:
            positions = positions[np.fromiter(rows, np.intp, len(rows))]
        which = [self.which[row] for row in rows] if self.matched else ()
        return InFlightBatch(
            self.number,
            self.topic_filter,
            self.shard,
            self.options,
            ids,
            qos,
            positions,
            topics,
            matched=self.matched,
            which=which,
            copies=copies,
            since=self.since,
        )

    def record(self) -> InFlightRecord:
        """Return the record by which the in-flight batch is stored."""
        first, steps, width = self.packed or pack_positions(self.positions)
        qos = self.qos if isinstance(self.qos, int) else bytes(self.qos)
        ids = pack_ids(self.ids)
        shard, options, topics = self.shard, self.options, tuple(self.topics)
        if self.copies:
            copies = tuple(map(copy_of, self.copies))
            return StoredInFlight(
                VERSION,
                self.topic_filter,
                shard,
                options,
                ids,
                qos,
                first,
                steps,
                width,
                topics,
                copies=copies,
                since=self.since,
            )
        if not self.matched:
            return InFlightRecord(VERSION, self.topic_filter, shard, options, ids, qos, first, steps, width, topics)
        which = np.fromiter(self.which, "<u2", len(self.which)).tobytes()
        return MergedInFlightRecord(
            MERGED, self.topic_filter, shard, options, ids, qos, first, steps, width, topics, self.matched, which
        )

    @classmethod
    def of(cls, number: int, record: StoredInFlight) -> InFlightBatch:
        """Return the in-flight batch of a record."""
        positions = unpack_positions(record.first, record.steps, record.width)
        ids = unpack_ids(record.ids, len(record.topics) or len(positions))
        qos = record.qos if isinstance(record.qos, int) else list(record.qos)
        return cls(
            number,
            record.topic_filter,
            record.shard,
            record.options,
            ids,
            qos,
            positions,
            record.topics,
            matched=record.matched,
            which=np.frombuffer(record.which, "<u2").tolist(),
            copies=[copy.message(topic) for topic, copy in zip(record.topics, record.copies, strict=False)],
            since=record.since,
        )


class Released:
    """Packet ids whose PUBRECs were committed together: their PUBRELs may be sent, and they wait for PUBCOMPs."""

    __slots__ = ("ids", "left", "number", "written")

    def __init__(self, number: int, ids: list[int]) -> None:
        self.number = number
        self.ids = ids
        self.left = len(ids)
        self.written = self.left


@attrs.define
class StagedChanges:
    """Changes of a window that are to be committed together."""

    writes: list[StateWrite]
    batches: list[InFlightBatch]
    """The new in-flight batches."""
    released: Released | None
    rewritten: list[InFlightBatch | Released]
    left: list[int]
    """By record of `rewritten`, the number of ids that were left when it was staged."""
    finished: int
    """The number of finished records that are removed."""
    again: int
    """The number of PUBRELs to send again."""


class InFlight:
    """The packet ids of one session.

    Acknowledgements are thread-safe. All other methods are for one thread at a time.
    """

    __slots__ = (
        "_again",
        "_finished",
        "_received",
        "_stored",
        "_vanished",
        "awaiting_puback",
        "awaiting_pubcomp",
        "awaiting_pubrec",
        "keys",
        "lock",
        "next_id",
        "next_number",
        "resend",
        "stored",
    )

    def __init__(self, keys: Keys, *, stored: bool = True) -> None:
        self.keys = keys
        self.stored = stored
        """Whether changes are stored; a session that is kept in memory has nothing to write."""
        self.lock = threading.RLock()  # reentrant: a signal handler may acknowledge, too
        """Guards the attributes below, and the in-flight batches. Its holder takes no other lock."""
        self.next_id = 1
        self.next_number = 1
        self.awaiting_puback: dict[int, InFlightBatch] = EMPTY_DICT
        self.awaiting_pubrec: dict[int, InFlightBatch] = EMPTY_DICT
        self._received: dict[int, InFlightBatch] = EMPTY_DICT
        """The PUBRECs that are not committed, in the order they were received."""
        self.awaiting_pubcomp: dict[int, Released] = EMPTY_DICT
        self._stored: dict[int, InFlightBatch | Released] = EMPTY_DICT
        """By number, the in-flight batches and released ids that have records."""
        self._finished: list[InFlightBatch | Released] = []
        """The in-flight batches and released ids with no id left, whose records can be removed."""
        self._again: list[int] = EMPTY_LIST
        """The ids whose PUBREL is to be sent again."""
        self.resend: list[InFlightBatch] = EMPTY_LIST  # no deque, which takes 760 bytes in each idle session
        """The in-flight batches of earlier connections with ids that were not sent again yet, oldest first."""
        self._vanished: frozenset[int] = _NO_IDS
        """The ids of QoS 2 whose messages couldn't be sent again on this connection."""

    # --- packet ids ---

    def __len__(self) -> int:
        """Return the number of packet ids in use."""
        with self.lock:
            batches = len(self.awaiting_puback) + len(self.awaiting_pubrec) + len(self._received)
            return batches + len(self.awaiting_pubcomp)

    def unsent(self) -> int:
        """Return the number of ids in use that were not sent on this connection yet."""
        return sum(len(batch.unsent or ()) for batch in list(self.resend))

    def room(self, receive_maximum: int) -> int:
        """Return the number of messages that may be sent until ``receive_maximum`` are in flight on this connection.

        See MQTT 5, section 4.9.
        """
        with self.lock:
            used = len(self.awaiting_puback) + len(self.awaiting_pubrec) + len(self._received)
            vanished = len(self._vanished)
            sent = used + len(self.awaiting_pubcomp) - vanished - (self.unsent() if self.resend else 0)
            return max(0, min(receive_maximum, MAX_PACKET_ID - vanished) - sent)

    def free_ids(self, count: int) -> Sequence[int]:
        """Return ``count`` ids that are not in use, in the order they were found. Does not reserve them.

        The caller ensures that `len` plus ``count`` is at most `MAX_PACKET_ID`.
        """
        first = self.next_id
        all_: tuple[Mapping[int, object], ...]
        with self.lock:
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
        """Record a PUBACK; return whether the packet id waited for one."""
        with self.lock:
            batch = self.awaiting_puback.pop(packet_id, None)
            if batch is None:
                return False
            self._over(batch, packet_id)
            return True

    def puback_many(self, packet_ids: Sequence[int]) -> int:
        """Record PUBACKs; return the number of packet ids that waited for one."""
        if len(packet_ids) == 1:  # the usual case
            return int(self.puback(packet_ids[0]))
        with self.lock:
            if len(packet_ids) < _FEW:
                return sum(map(self.puback, packet_ids))
            batches = Counter(filter(None, map(self.awaiting_puback.pop, packet_ids, repeat(None))))
            for batch, count in batches.items():
                for packet_id in packet_ids if batch.unsent else ():
                    batch.sent(packet_id)
                batch.left -= count
                if not batch.left:
                    self._finished.append(batch)
            return batches.total()

    def pubrec(self, packet_id: int, *, accepted: bool = True) -> bool:
        """Record a PUBREC; return whether the packet id belongs to a QoS 2 exchange.

        If ``accepted`` is False, the exchange ends (MQTT 5, section 4.3.3), even if its PUBREL was already sent.
        Otherwise, a PUBREC that arrives after the PUBREL was sent causes the PUBREL to be sent again.
        """
        with self.lock:
            if packet_id in self._vanished:
                self._vanished -= {packet_id}
            batch = self.awaiting_pubrec.pop(packet_id, None)
            if batch is None:
                if packet_id in self.awaiting_pubcomp and not accepted:
                    return self.pubcomp(packet_id)
                if packet_id in self.awaiting_pubcomp:
                    self._again = self._again or []
                    self._again.append(packet_id)
                    return True
                return packet_id in self._received
            if accepted:
                self._received = self._received or {}
                self._received[packet_id] = batch
            self._over(batch, packet_id)
            return True

    def pubrec_many(self, packet_ids: Sequence[int], *, accepted: bool = True) -> int:
        """Record PUBRECs; return the number of packet ids that belong to QoS 2 exchanges."""
        with self.lock:
            return sum(self.pubrec(packet_id, accepted=accepted) for packet_id in packet_ids)

    def pubcomp(self, packet_id: int) -> bool:
        """Record a PUBCOMP; return whether the packet id waited for one."""
        with self.lock:
            released = self.awaiting_pubcomp.pop(packet_id, None)
            if released is None:
                return False
            released.left -= 1
            if not released.left:
                self._finished.append(released)
            return True

    def pubcomp_many(self, packet_ids: Sequence[int]) -> int:
        """Record PUBCOMPs; return the number of packet ids that waited for one."""
        with self.lock:
            return sum(map(self.pubcomp, packet_ids))

    def _over(self, batch: InFlightBatch, packet_id: int) -> None:
        """Remove an id from its in-flight batch."""
        batch.sent(packet_id)
        batch.left -= 1
        if not batch.left:
            self._finished.append(batch)

    # --- committing ---

    @property
    def received(self) -> int:
        """The number of PUBRECs that have to be committed before their PUBRELs can be sent."""
        return len(self._received) + len(self._again)

    def stage(self, batches: Sequence[InFlightBatch], *, whole: bool) -> StagedChanges:
        """Return the changes to commit together with these new in-flight batches.

        PUBRECs are always included. PUBACKs and PUBCOMPs that leave a record partly acknowledged are included only if
        ``whole``. The window doesn't change before `apply`, except by acknowledgements.
        """
        with self.lock:
            keys, stored = self.keys, self._stored
            number = self.next_number
            writes: list[StateWrite] = []
            released = None
            if self._received:
                released = Released(number, list(self._received))
                number += 1
            for new in batches:
                new.number = number
                number += 1
            rewritten: list[InFlightBatch | Released] = []
            if self.stored:
                if whole or released is not None:
                    rewritten = self._to_rewrite(whole=whole)
                if released is not None:
                    writes.append(put(keys.released(released.number), (VERSION, pack_ids(released.ids))))
                writes += [put(keys.batch(new.number), new.record()) for new in batches]
                writes += map(self._rewrite, rewritten)
                writes += [FrameworkWrite(self._key(gone), None) for gone in self._finished if gone.number in stored]
            left = [kept.left for kept in rewritten]
            return StagedChanges(
                writes, list(batches), released, rewritten, left, len(self._finished), len(self._again)
            )

    def send(self, count: int, batch_of: Callable[[Sequence[int]], InFlightBatch]) -> Sequence[int]:
        """Add a batch of ``count`` messages of an in-memory session; return its packet ids, which are in use."""
        with self.lock:
            for gone in self._finished:
                self._stored.pop(gone.number, None)
            self._finished.clear()
            ids = self.free_ids(count)
            batch = batch_of(ids)
            batch.number = self.next_number
            self.adopt(batch)
            return ids

    def last_positions(self) -> list[tuple[int, int]]:
        """Return, for each in-flight batch that is to be sent again, its shard and its last position."""
        return [(batch.shard, int(batch.positions[-1])) for batch in self.resend if len(batch.positions)]

    def everything(self) -> list[StateWrite]:
        """Return the writes that store all messages in flight, when an in-memory session becomes a stored one."""
        with self.lock:
            return [
                put(
                    self._key(kept), kept.record() if isinstance(kept, InFlightBatch) else (VERSION, pack_ids(kept.ids))
                )
                for kept in self._stored.values()
            ]

    def apply(self, staged: StagedChanges) -> list[int]:
        """Apply staged changes after their commit; return the packet ids to send PUBRELs for."""
        with self.lock:
            for gone in self._finished[: staged.finished]:
                self._stored.pop(gone.number, None)
            del self._finished[: staged.finished]
            for changed, left in zip(staged.rewritten, staged.left, strict=True):
                changed.written = left
            again, self._again = self._again[: staged.again], self._again[staged.again :] or EMPTY_LIST
            if staged.released is not None:
                for packet_id in staged.released.ids:
                    del self._received[packet_id]
                self._adopt_released(staged.released)
                again += staged.released.ids
            for batch in staged.batches:
                self.adopt(batch)
            if not self._stored:  # dictionaries don't shrink when items are removed
                self.awaiting_puback = self.awaiting_pubrec = self.awaiting_pubcomp = self._stored = EMPTY_DICT
            return again

    def adopt(self, batch: InFlightBatch) -> None:
        """Add an in-flight batch; its ids are in use from now on."""
        self._stored = self._stored or {}
        self._stored[batch.number] = batch
        self.next_number = batch.number + 1
        ids = batch.ids
        self.next_id = ids[-1] % MAX_PACKET_ID + 1
        if batch.qos != 2:
            self.awaiting_puback = self.awaiting_puback or {}
        if batch.qos != 1:
            self.awaiting_pubrec = self.awaiting_pubrec or {}
        if batch.qos == 1:
            self.awaiting_puback.update(zip(ids, repeat(batch)))
        elif batch.qos == 2:
            self.awaiting_pubrec.update(zip(ids, repeat(batch)))
        else:
            for row, packet_id in enumerate(ids):
                waiting = self.awaiting_puback if batch.qos_of(row) == 1 else self.awaiting_pubrec
                waiting[packet_id] = batch

    def _adopt_released(self, released: Released) -> None:
        self._stored = self._stored or {}
        self._stored[released.number] = released
        self.awaiting_pubcomp = self.awaiting_pubcomp or {}
        self.next_number = released.number + 1
        self.awaiting_pubcomp.update(zip(released.ids, repeat(released)))

    def _to_rewrite(self, *, whole: bool) -> list[InFlightBatch | Released]:
        if not whole:
            shrunk = dict.fromkeys(self._received.values())  # batches with PUBRECs, whose ids move to the released ids
            return [batch for batch in shrunk if batch.left]
        return [kept for kept in self._stored.values() if 0 < kept.left < kept.written]

    def _rewrite(self, kept: InFlightBatch | Released) -> StateWrite:
        key = self._key(kept)
        if isinstance(kept, Released):
            return put(key, (VERSION, pack_ids([i for i in kept.ids if self.awaiting_pubcomp.get(i) is kept])))
        return put(key, kept.rows(self._waiting(kept)).record())

    def _waiting(self, batch: InFlightBatch) -> list[int]:
        """Return the rows of an in-flight batch that wait for their PUBACK or PUBREC."""
        puback, pubrec = self.awaiting_puback, self.awaiting_pubrec
        return [row for row, i in enumerate(batch.ids) if puback.get(i) is batch or pubrec.get(i) is batch]

    def _key(self, kept: InFlightBatch | Released) -> bytes:
        keys = self.keys
        return keys.batch(kept.number) if isinstance(kept, InFlightBatch) else keys.released(kept.number)

    # --- resuming ---

    def load(self, batches: Iterator[tuple[bytes, bytes]], released: Iterator[tuple[bytes, bytes]]) -> None:
        """Load the stored in-flight batches and ids into an empty window; all of them are to be sent again."""
        found: list[InFlightBatch | Released] = [
            InFlightBatch.of(_number_of(key), decode(key, value, StoredInFlight)) for key, value in batches
        ]
        for key, value in released:
            _, ids = decode(key, value, tuple[int, bytes])
            found.append(Released(_number_of(key), list(unpack_ids(ids, len(ids) // 2))))
        found.sort(key=lambda kept: kept.number)
        for kept in found:
            self._supersede(kept.ids)
            if isinstance(kept, InFlightBatch):
                self.adopt(kept)
            else:
                self._adopt_released(kept)
        self._again = list(self.awaiting_pubcomp) or EMPTY_LIST
        self.resend = [kept for kept in found if isinstance(kept, InFlightBatch) and kept.left] or EMPTY_LIST
        for batch in self.resend:
            batch.unsent = {batch.ids[row]: row for row in self._waiting(batch)}

    def _supersede(self, ids: Iterable[int]) -> None:
        """Remove ids from older records that hold them: the ids were free when the newer record was written."""
        for packet_id in ids:
            holders = (self.awaiting_puback, self.awaiting_pubrec, self.awaiting_pubcomp)
            for holder in holders:
                kept: InFlightBatch | Released | None = holder.pop(packet_id, None)
                if kept is not None:
                    kept.left -= 1
                    if not kept.left:
                        self._finished.append(kept)

    def vanished(self, packet_id: int) -> None:
        """Record that a message that was to be sent again can't be read any more.

        At QoS 1 its exchange ends. At QoS 2 the client may still hold the id, and would ignore another message with it
        as a repetition; a PUBREL may be sent only after a PUBREC [MQTT-4.3.3-4]. So the id stays in use, but takes no
        room on this connection. If more than half of all ids stay in use in this way, their exchanges are ended.
        """
        with self.lock:
            if not self.puback(packet_id) and packet_id in self.awaiting_pubrec:
                self.awaiting_pubrec[packet_id].sent(packet_id)
                self._vanished |= {packet_id}
                for gone in self._vanished if len(self._vanished) > MAX_PACKET_ID // 2 else ():
                    self.cancel(gone)

    def cancel(self, packet_id: int) -> None:
        """End the exchange of a message that was never sent, and free its id."""
        with self.lock:
            if not self.puback(packet_id):
                self.pubrec(packet_id, accepted=False)


def _number_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
