"""One queue: messages go in behind, and are read and committed in front."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.arguments import check_count, check_within
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.layout import Damage
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.storage.generations import add_generation, drop_generation
from topicstore.storage.reports import verify
from topicstore.storage.storage import Storage

from .record import TOPIC, Overflow, QueueRecord, pack, save, taken, unpack

__all__ = ["Queue", "QueueBatch", "QueueInfo"]

_FILTER = TopicFilter(TOPIC)
_GENERATION_BYTES = 8 << 20
"""Bytes of values after which a new generation is begun."""
_LOOK = 4_096
"""Messages that are looked at in one go to find out where the head goes."""


@attrs.frozen(kw_only=True)
class QueueBatch:
    """Messages of a queue, the oldest first."""

    messages: list[Message]
    ids: list[int]
    """Of the messages, ascending: what `Queue.commit` takes."""

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def last(self) -> int:
        """The id of the last message; commit it when all were forwarded. Raises `IndexError` if there is none."""
        return self.ids[-1]


@attrs.frozen(kw_only=True)
class QueueInfo:
    """A queue in numbers."""

    name: str
    messages: int
    """Not yet committed."""
    bytes: int
    """Of their topics, client ids and payloads, and some 6 for each."""
    dropped: int
    """Messages that found no room, or made room for others, since the queue was made."""
    max_messages: int | None
    max_bytes: int | None
    overflow: Overflow
    disk_bytes: int


class Queue:
    """One queue, as `Queues.open` gives it. All methods may be called from any thread."""

    def __init__(self, storage: Storage, record: QueueRecord) -> None:
        self._storage = storage
        self._lock = ProcessLock()
        """Guards what follows. The record is replaced as a whole, so a glance at it needs no lock."""
        self._record = record
        self._read = record.head
        """Where `read` goes on."""
        self._positions: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        """Of the first messages behind the head, as far as they were looked at."""
        self._sizes: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._drop_passed()

    # --- looking ---

    @property
    def name(self) -> str:
        """What it was made as."""
        return self._record.name

    @property
    def bytes(self) -> int:
        """Bytes of the messages that are not yet committed: topics, client ids and payloads, and some 6 for each."""
        return self._record.bytes

    @property
    def dropped(self) -> int:
        """Messages that found no room, or made room for others, since the queue was made."""
        return self._record.dropped

    def __len__(self) -> int:
        """Return the number of messages that are not yet committed."""
        return self._record.messages

    def __bool__(self) -> bool:
        """A queue is true, also an empty one."""
        return True

    def info(self) -> QueueInfo:
        """Return its numbers."""
        r = self._record
        return QueueInfo(
            name=r.name,
            messages=r.messages,
            bytes=r.bytes,
            dropped=r.dropped,
            max_messages=r.max_messages,
            max_bytes=r.max_bytes,
            overflow=r.overflow,
            disk_bytes=self._storage.shards[0].engine().stats().disk_bytes,
        )

    def damages(self) -> list[Damage]:
        """Read everything, and return what is damaged."""
        return verify(self._storage, None).damages

    # --- in ---

    def append(self, messages: Iterable[Message] | MessageBatch) -> list[int]:
        """Put messages behind the others; return the ids of those that were put there, in their order.

        All in one commit, as durable as the database. Where the queue's bounds have no room for all,
        its ``overflow`` decides:

        ``refuse``:      none is put; raises `QuotaExceededError`.
        ``drop_newest``: the first of them are, as far as there is room.
        ``drop_oldest``: the oldest make room, those in the queue before these; one that is too large for the
                         whole queue is left out.

        Raises `InvalidMessageError`, also for a payload that with its topic and client id is larger than
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
        """Begin a generation if the current one is large. First, so that an append which fails took no effect."""
        if self._storage.shards[0].generations()[-1].live_bytes >= _GENERATION_BYTES:
            add_generation(self._storage)
            self._drop_passed()

    # --- out ---

    def read(self, limit: int = 1_000) -> QueueBatch:
        """Return at most ``limit`` messages behind those read last, maybe fewer; none only if there are no more.

        They stay in the queue until they are committed: who opens it anew begins at the first that was not.
        """
        check_count("limit", limit)
        with self._lock:
            batch = self._behind(self._read, limit)
            if not len(batch):
                return QueueBatch(messages=[], ids=[])
            self._note(batch)
            self._read = int(batch.positions[-1])
        return QueueBatch(messages=list(unpack(batch)), ids=batch.positions.tolist())

    def rewind(self) -> None:
        """Read on at the first message that is not committed: what was read since comes again."""
        with self._lock:
            self._read = self._record.head

    def commit(self, upto: int) -> int:
        """Remove the messages up to and with the id ``upto``, for good; return how many there were.

        0 if they were removed before, so it may be called again.
        """
        check_within("an id", upto, 0, (1 << 64) - 1)
        with self._lock:
            while self._looked < upto and self._look():
                pass
            count = int(np.searchsorted(self._positions, np.uint64(upto), side="right"))
            if count:
                self._save(self._without(count), count)
                self._drop_passed()
        return count

    def bound(self, *, max_messages: int | None, max_bytes: int | None, overflow: Overflow | None) -> None:
        """Change the bounds, durably; None leaves one as it is. What is in the queue stays."""
        for name, value in (("max_messages", max_messages), ("max_bytes", max_bytes)):
            if value is not None:
                check_count(name, value)
        if overflow is not None and overflow not in get_args(Overflow):
            raise InvalidArgumentError(f"overflow is one of {', '.join(get_args(Overflow))}, not {overflow!r}")
        given = {"max_messages": max_messages, "max_bytes": max_bytes, "overflow": overflow}
        with self._lock:
            changed = {name: value for name, value in given.items() if value is not None}
            record = msgspec.structs.replace(self._record, **changed)
            if record != self._record:
                self._save(record, 0)

    def close(self) -> None:
        """Give back its files. Whoever opened the queue's database does this."""
        self._storage.close()

    # --- the head ---

    @property
    def _looked(self) -> int:
        """Up to where sizes are known."""
        return int(self._positions[-1]) if len(self._positions) else self._record.head

    def _behind(self, position: int, limit: int) -> MessageBatch:
        """Return at most ``limit`` messages behind a position, in order, as they are stored."""
        self._storage.check_open()
        plan = self._storage.plan_shard(0, _FILTER, position + 1, None)
        return next(self._storage.run_shards([plan], limit), MessageBatch.empty())[:limit]

    def _look(self) -> bool:
        """Look at more messages; say whether there were any."""
        batch = self._behind(self._looked, _LOOK)
        self._note(batch)
        return len(batch) > 0

    def _note(self, batch: MessageBatch) -> None:
        """Note the sizes of messages, those that are not known yet."""
        if len(batch):
            new = batch[int(np.searchsorted(batch.positions, np.uint64(self._looked), side="right")) :]
            sizes = np.fromiter(map(len, to_iterable(new.payloads)), np.int64, len(new))
            if len(new):
                self._positions = np.concatenate((self._positions, new.positions))
                self._sizes = np.concatenate((self._sizes, sizes))

    def _oldest(self, messages: int, size: int) -> int:
        """Return how many of the oldest are at least so many messages, and at least so many bytes."""
        while True:
            by_size = int(np.searchsorted(np.cumsum(self._sizes), size)) + 1 if size else 0
            count = max(messages, by_size)
            if count <= len(self._positions) or not self._look():
                return min(count, len(self._positions))

    def _without(self, count: int) -> QueueRecord:
        """Return the record without so many of the oldest."""
        if not count:
            return self._record
        return msgspec.structs.replace(
            self._record,
            head=int(self._positions[count - 1]),
            messages=self._record.messages - count,
            bytes=self._record.bytes - int(self._sizes[:count].sum()),
        )

    def _save(self, record: QueueRecord, removed: int) -> None:
        self._storage.state(0).write([save(record)])
        self._adopt(record, removed)

    def _adopt(self, record: QueueRecord, removed: int) -> None:
        """Remember what was committed."""
        self._record = record
        self._positions, self._sizes = self._positions[removed:], self._sizes[removed:]
        self._read = max(self._read, record.head)

    def _drop_passed(self) -> None:
        """Drop the generations that the head has passed."""
        for generation in self._storage.shards[0].generations()[:-1]:
            if (generation.last_position or 0) <= self._record.head:
                drop_generation(self._storage, generation.number)
