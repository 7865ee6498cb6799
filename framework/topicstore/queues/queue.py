"""`Queue`: messages are appended at the end, and read and committed at the head."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.arguments import KEEP, Keep, byte_count, check_count, check_within, given
from topicstore.contract.batch import MessageBatch, Messages
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.layout import Damage
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.storage.generations import add_generation, drop_generation
from topicstore.storage.maintenance import write_copy
from topicstore.storage.reports import verify
from topicstore.storage.storage import Storage

from .record import DECODERS, TOPIC, Overflow, QueueRecord, pack, save, taken, unpack

__all__ = ["Queue", "QueueBatch", "QueueInfo"]

_FILTER = TopicFilter(TOPIC)
_GENERATION_BYTES = 8 << 20
"""Bytes of values in a generation after which a new one is begun."""
_LOOK = 4_096
"""Number of messages that are read at once to find the next head."""


@attrs.frozen(kw_only=True)
class QueueBatch:
    """Messages of a queue, the oldest first."""

    messages: list[Message]
    ids: list[int]
    """The ids of the messages, ascending: arguments of `Queue.commit`."""

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def last(self) -> int:
        """The id of the last message, to commit after all were forwarded. Raises `IndexError` if the batch is empty."""
        return self.ids[-1]


@attrs.frozen(kw_only=True)
class QueueInfo:
    """A snapshot of a queue's counts and bounds."""

    name: str
    messages: int
    """Number of messages that are not committed."""
    bytes: int
    """Bytes of these messages: topics, client ids, payloads, and about 6 bytes of overhead for each message."""
    dropped: int
    """Number of messages that were dropped by the ``overflow`` policy since the queue was created."""
    max_messages: int | None
    max_bytes: int | None
    overflow: Overflow
    disk_bytes: int


class _Known:
    """The positions and sizes of the first messages after the head, oldest first, in arrays that double when full.

    Because of the doubling, each entry is copied only a few times.
    """

    def __init__(self) -> None:
        self._positions = np.empty(0, np.uint64)
        self._sums = np.empty(0, np.int64)
        """The cumulative sums of the sizes, including removed messages."""
        self._first = self._end = 0
        self._removed = 0
        """The sum of the sizes of the removed messages."""

    def __len__(self) -> int:
        return self._end - self._first

    def position(self, row: int) -> int:
        return int(self._positions[self._first + row])

    def size(self, rows: int) -> int:
        """Return the sum of the sizes of the first ``rows`` messages."""
        return int(self._sums[self._first + rows - 1]) - self._removed if rows else 0

    def upto(self, position: int) -> int:
        """Return the number of messages up to and including a position."""
        return int(np.searchsorted(self._positions[self._first : self._end], np.uint64(position), side="right"))

    def reaching(self, size: int) -> int:
        """Return the smallest number of messages with at least ``size`` bytes together; `len` + 1 if all have less."""
        return int(np.searchsorted(self._sums[self._first : self._end], size + self._removed)) + 1

    def add(self, positions: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64]) -> None:
        total = self._removed + self.size(len(self))
        if self._end + len(positions) > len(self._positions):
            room = np.empty(len(self) + len(positions), np.uint64)
            there = slice(self._first, self._end)
            self._positions = np.concatenate((self._positions[there], room))
            self._sums = np.concatenate((self._sums[there], room.view(np.int64)))
            self._first, self._end = 0, len(self)
        end = self._end + len(positions)
        self._positions[self._end : end] = positions
        self._sums[self._end : end] = total + np.cumsum(sizes)
        self._end = end

    def remove(self, rows: int) -> None:
        """Remove the oldest ``rows`` messages."""
        self._removed += self.size(rows)
        self._first += rows


class Queue:
    """One queue, as returned by `Queues.open`. All methods are thread-safe."""

    def __init__(self, storage: Storage, record: QueueRecord) -> None:
        self._storage = storage
        self._lock = ProcessLock()
        """Guards the attributes below. The record is replaced as a whole, so reading it needs no lock."""
        self._record = record
        self._read = record.head
        """The position after which the next `read` begins."""
        self._known = _Known()
        if storage.mode is None:
            self._drop_passed()

    # --- inspecting ---

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._record.name

    @property
    def bytes(self) -> int:
        """Bytes of uncommitted messages: topics, client ids, payloads, and about 6 bytes of overhead for each."""
        return self._record.bytes

    @property
    def dropped(self) -> int:
        """Number of messages that were dropped by the ``overflow`` policy since the queue was created."""
        return self._record.dropped

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}: {len(self):,} messages>"

    def __len__(self) -> int:
        """Return the number of messages that are not yet committed."""
        return self._record.messages

    def __bool__(self) -> bool:
        """Return True, even for an empty queue."""
        return True

    def info(self) -> QueueInfo:
        """Return a snapshot of the queue's counts and bounds."""
        r = self._record
        return QueueInfo(
            name=r.name,
            messages=r.messages,
            bytes=r.bytes,
            dropped=r.dropped,
            max_messages=r.max_messages,
            max_bytes=r.max_bytes,
            overflow=r.overflow,
            disk_bytes=self._storage.shards[0].writer.open_engine().info().disk_bytes,
        )

    def damages(self) -> list[Damage]:
        """Read all messages and records; return the damage found."""
        return verify(self._storage, DECODERS).damages

    # --- appending ---

    def append(self, messages: Messages) -> list[int]:
        """Append messages; return the ids of those that were appended, in order.

        They are stored in one commit, with the durability of the database. If not all of them fit within the queue's
        bounds, the ``overflow`` policy applies:

        ``refuse``:      no message is appended; raises `QuotaExceededError`.
        ``drop_newest``: only the first of them that fit are appended.
        ``drop_oldest``: the oldest messages are removed to make room, first those in the queue, then those of this
                         call; a message that is too large for the whole queue is left out.

        Raises `InvalidMessageError`, also if payload, topic and client id together are larger than
        `topicstore.MAX_PAYLOAD`.
        """
        batch = pack(messages)
        if not len(batch):
            return []
        sizes = np.fromiter(map(len, to_iterable(batch.payloads)), np.int64, len(batch))
        with self._lock:
            self._rotate()
            found = taken(self._record, sizes)
            batch, new = batch if len(found.rows) == len(batch) else batch.take(found.rows), sizes[found.rows]
            made_room = self._oldest(found.messages_over, found.bytes_over)
            record = self._without(made_room)
            record = msgspec.structs.replace(
                record,
                messages=record.messages + len(new),
                bytes=record.bytes + int(new.sum()),
                dropped=record.dropped + made_room + len(sizes) - len(new),
            )
            result = self._storage.write(batch, {0: [save(record)]})
            self._adopt(record, made_room)
        return [one.position for one in result.ids]

    def _rotate(self) -> None:
        """Begin a generation if the current one is large. Called first, so that a failed append has no effect."""
        if self._storage.shards[0].generations.listed()[-1].live_bytes >= _GENERATION_BYTES:
            add_generation(self._storage)
            self._drop_passed()

    # --- reading and committing ---

    def read(self, limit: int = 1_000) -> QueueBatch:
        """Return at most ``limit`` messages after the last read, perhaps fewer; an empty batch only at the end.

        Messages stay in the queue until they are committed. After the queue is opened again, reading begins at the
        first uncommitted message.
        """
        check_count("limit", limit)
        with self._lock:
            batch = self._behind(self._read, limit)
            if not len(batch):
                return QueueBatch(messages=[], ids=[])
            self._note(batch)
            self._read = int(batch.positions[-1])
        return QueueBatch(messages=list(unpack(batch)), ids=batch.positions.tolist())

    def peek(self, limit: int = 1_000, *, after: int = 0) -> QueueBatch:
        """Return at most ``limit`` uncommitted messages after an id, by default the oldest. Doesn't affect `read`.

        For several readers of one queue, each of which keeps track of its own position.
        """
        check_count("limit", limit)
        check_within("an id", after, 0, (1 << 64) - 1)
        with self._lock:
            batch = self._behind(max(after, self._record.head), limit)
        return QueueBatch(messages=list(unpack(batch)), ids=batch.positions.tolist())

    def rewind(self) -> None:
        """Make the next `read` begin at the first uncommitted message, so that messages are returned again."""
        with self._lock:
            self._read = self._record.head

    def commit(self, upto: int) -> int:
        """Remove the messages up to and including the id ``upto`` durably; return the number of removed messages.

        Idempotent: returns 0 if the messages were removed before. Messages that are appended later stay in the queue,
        even if ``upto`` is higher than their ids.
        """
        check_within("an id", upto, 0, (1 << 64) - 1)
        with self._lock:
            while self._looked < upto and self._look():
                pass
            count = self._known.upto(upto)
            if count:
                self._save(self._without(count), count)
                self._drop_passed()
        return count

    def bound(
        self,
        *,
        max_messages: int | Keep | None = KEEP,
        max_bytes: int | str | Keep | None = KEEP,
        overflow: Overflow | Keep = KEEP,
    ) -> None:
        """Change the bounds durably; None removes a bound. Omitted bounds and the queue's messages stay as they are."""
        changed = given({"max_messages": max_messages, "max_bytes": byte_count(max_bytes), "overflow": overflow})
        for name in ("max_messages", "max_bytes"):
            if changed.get(name) is not None:
                check_count(name, changed[name])
        if changed.get("overflow", "refuse") not in get_args(Overflow):
            raise InvalidArgumentError(f"overflow is one of {', '.join(get_args(Overflow))}, not {overflow!r}")
        with self._lock:
            record = msgspec.structs.replace(self._record, **changed)
            if record != self._record:
                self._save(record, 0)

    def write_copy(self, copy: Path) -> None:
        """Write a copy of the queue's database into the new directory ``copy``."""
        write_copy(self._storage, copy)

    def close(self) -> None:
        """Close the queue's database. Its owner, `Queues`, calls this."""
        self._storage.close()

    # --- the head ---

    @property
    def _looked(self) -> int:
        """The position up to which `_known` has the messages."""
        return self._known.position(len(self._known) - 1) if len(self._known) else self._record.head

    def _behind(self, position: int, limit: int) -> MessageBatch:
        """Return at most ``limit`` messages after a position, in order, in stored form."""
        self._storage.check_open()
        plan = self._storage.plan_shard(0, _FILTER, position + 1, None)
        return next(self._storage.run_shards([plan], limit), MessageBatch.empty())[:limit]

    def _look(self) -> bool:
        """Read the sizes of more messages; return whether there were any."""
        batch = self._behind(self._looked, _LOOK)
        self._note(batch)
        return len(batch) > 0

    def _note(self, batch: MessageBatch) -> None:
        """Add the messages of a batch that `_known` doesn't have yet."""
        if len(batch):
            new = batch[int(np.searchsorted(batch.positions, np.uint64(self._looked), side="right")) :]
            sizes = np.fromiter(map(len, to_iterable(new.payloads)), np.int64, len(new))
            self._known.add(new.positions, sizes)

    def _oldest(self, messages: int, size: int) -> int:
        """Return the number of oldest messages that are at least ``messages`` messages and ``size`` bytes."""
        while True:
            count = max(messages, self._known.reaching(size) if size else 0)
            if count <= len(self._known) or not self._look():
                return min(count, len(self._known))

    def _without(self, count: int) -> QueueRecord:
        """Return the record after the removal of the ``count`` oldest messages."""
        if not count:
            return self._record
        return msgspec.structs.replace(
            self._record,
            head=self._known.position(count - 1),
            messages=self._record.messages - count,
            bytes=self._record.bytes - self._known.size(count),
        )

    def _save(self, record: QueueRecord, removed: int) -> None:
        self._storage.state(0).write([save(record)])
        self._adopt(record, removed)

    def _adopt(self, record: QueueRecord, removed: int) -> None:
        """Apply a committed record, by which the ``removed`` oldest messages were removed."""
        self._record = record
        self._known.remove(removed)
        self._read = max(self._read, record.head)

    def _drop_passed(self) -> None:
        """Drop the generations whose messages are all before the head."""
        for generation in self._storage.shards[0].generations.listed()[:-1]:
            if (generation.last_position or 0) <= self._record.head:
                drop_generation(self._storage, generation.number)
