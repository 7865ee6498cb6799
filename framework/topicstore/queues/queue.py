"""Queues: named, durable, bounded, first in first out; for what is to be forwarded while the other side is down.

Each is a small database of its own below the one it belongs to, with the same backend, durability and
plugins, so that it is as safe, and as secret, as that; with its layout too, if that shows messages at once
and in order of positions (``position_order``), else with the default one. It has one shard and one topic,
so one stream. Generations are dropped as the head passes them, which gives the disk back.

Stored form: a directory ``queues/<name>`` with the name percent-encoded (of one that gets longer than
200 characters so, the first 150, ``%%``, and the name's xxh3_128 as 32 hexadecimal digits). In its database::

    messages of topic "queue": the payload is a msgpack array of topic, client id and payload
    state: 01 "q" -> checksum (`topicstore.contract.checksums`) and msgpack array of version 1, name, head, messages,
                     bytes, dropped, max_messages or nil, max_bytes or nil, overflow

The head is a position: what lies up to it was committed, or dropped. Fields are only ever appended.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import quote

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.batch import MessageBatch
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    InvalidArgumentError,
    NewerFormatError,
    QuotaExceededError,
    ReadOnlyDatabaseError,
)
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter, check_utf8
from topicstore.plugins import registry
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.manifest import Manifest, sync_directory
from topicstore.storage.replays import in_order

if TYPE_CHECKING:
    from topicstore.database import Database

__all__ = ["Overflow", "Queue", "QueueBatch", "QueueInfo", "Queues"]

Overflow = Literal["refuse", "drop_oldest", "drop_newest"]

DIRECTORY = "queues"
_TOPIC = "queue"
_FILTER = TopicFilter(_TOPIC)
_KEY = b"\1q"
_VERSION = 1
_LONGEST, _HEAD = 200, 150
_GONE = ".dropped-"
_GENERATION_BYTES = 8 << 20
"""Bytes of values after which a new generation is begun."""
_LOOK = 4_096
"""Messages that are looked at in one go to find out where the head goes."""

_PACK = msgspec.msgpack.Encoder().encode
_UNPACK = msgspec.msgpack.Decoder(tuple[str, str, bytes]).decode


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


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a queue stands."""

    version: int = _VERSION
    name: str
    head: int = 0
    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    max_messages: int | None = None
    max_bytes: int | None = None
    overflow: Overflow = "refuse"


class Queue:
    """One queue, as `Database.queue` gives it. All methods may be called from any thread."""

    def __init__(self, db: Database, record: _Record) -> None:
        self._db = db
        self._lock = threading.RLock()
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
            disk_bytes=self._db.info().disk_bytes,
        )

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
        batch = _pack(messages)
        if not len(batch):
            return []
        sizes = np.fromiter(map(len, to_iterable(batch.payloads)), np.int64, len(batch))
        with self._lock:
            self._rotate()
            taken, messages_over, bytes_over = _taken(self._record, sizes)
            batch, new = batch if len(taken) == len(batch) else batch.take(taken), sizes[taken]
            made_room = self._oldest(messages_over, bytes_over)
            record = self._without(made_room)
            record = msgspec.structs.replace(
                record,
                messages=record.messages + len(new),
                bytes=record.bytes + int(new.sum()),
                dropped=record.dropped + made_room + len(sizes) - len(new),
            )
            result = self._db.store_request(batch, {0: [_state(record)]})
            self._adopt(record, made_room)
        return [one.position for one in result.ids]

    def _rotate(self) -> None:
        """Begin a generation if the current one is large. First, so that an append which fails took no effect."""
        if self._db.shards[0].generations()[-1].live_bytes >= _GENERATION_BYTES:
            self._db.add_generation()
            self._drop_passed()

    # --- out ---

    def read(self, limit: int = 1_000) -> QueueBatch:
        """Return at most ``limit`` messages behind those read last, maybe fewer; none only if there are no more.

        They stay in the queue until they are committed: who opens it anew begins at the first that was not.
        """
        if type(limit) is not int or limit < 1:
            raise InvalidArgumentError(f"limit is a whole number of at least 1, not {limit!r}")
        with self._lock:
            batch = self._behind(self._read, limit)
            if not len(batch):
                return QueueBatch(messages=[], ids=[])
            self._note(batch)
            self._read = int(batch.positions[-1])
        return QueueBatch(messages=list(_unpack(batch)), ids=batch.positions.tolist())

    def rewind(self) -> None:
        """Read on at the first message that is not committed: what was read since comes again."""
        with self._lock:
            self._read = self._record.head

    def commit(self, upto: int) -> int:
        """Remove the messages up to and with the id ``upto``, for good; return how many there were.

        0 if they were removed before, so it may be called again.
        """
        if type(upto) is not int or not 0 <= upto < 1 << 64:
            raise InvalidArgumentError(f"an id is a whole number, not {upto!r}")
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
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgumentError(f"{name} is a whole number of at least 1, not {value!r}")
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
        self._db.close()

    # --- the head ---

    @property
    def _looked(self) -> int:
        """Up to where sizes are known."""
        return int(self._positions[-1]) if len(self._positions) else self._record.head

    def _behind(self, position: int, limit: int) -> MessageBatch:
        """Return at most ``limit`` messages behind a position, in order, as they are stored."""
        shard = self._db.shards[0]
        shard.reader()  # raises if it was closed
        identity = bytes.fromhex(self._db.manifest.id)
        plan = shard.plan(identity, _FILTER, position + 1, shard.watermark, since=None)
        return next(in_order(plan, self._db.fetch, limit), MessageBatch.empty())[:limit]

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

    def _without(self, count: int) -> _Record:
        """Return the record without so many of the oldest."""
        if not count:
            return self._record
        return msgspec.structs.replace(
            self._record,
            head=int(self._positions[count - 1]),
            messages=self._record.messages - count,
            bytes=self._record.bytes - int(self._sizes[:count].sum()),
        )

    def _save(self, record: _Record, removed: int) -> None:
        self._db.state(0).write([_state(record)])
        self._adopt(record, removed)

    def _adopt(self, record: _Record, removed: int) -> None:
        """Remember what was committed."""
        self._record = record
        self._positions, self._sizes = self._positions[removed:], self._sizes[removed:]
        self._read = max(self._read, record.head)

    def _drop_passed(self) -> None:
        """Drop the generations that the head has passed."""
        for generation in self._db.shards[0].generations()[:-1]:
            if (generation.last_position or 0) <= self._record.head:
                self._db.drop_generation(generation.number)


def _taken(record: _Record, sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], int, int]:
    """Return which of the messages of these sizes are put into a queue, and what must go for them.

    That is at least so many of the oldest messages, and at least so many bytes. Raises `QuotaExceededError`.
    """
    rows, size = np.arange(len(sizes)), int(sizes.sum())
    most = len(sizes) + record.messages if record.max_messages is None else record.max_messages
    most_bytes = size + record.bytes if record.max_bytes is None else record.max_bytes
    if record.overflow == "drop_oldest":
        return _newest(record, sizes, most, most_bytes)
    room, room_bytes = max(most - record.messages, 0), most_bytes - record.bytes
    if record.overflow == "drop_newest":
        fitting = int(np.searchsorted(np.cumsum(sizes), room_bytes, side="right"))
        return rows[: min(fitting, room)], 0, 0
    if len(sizes) > room or size > room_bytes:
        raise QuotaExceededError(
            f"queue {record.name!r} has no room for {len(sizes):,} messages of {size:,} bytes: it holds "
            f"{record.messages:,} of {record.bytes:,} bytes; commit what was forwarded, or raise its bounds"
        )
    return rows, 0, 0


def _newest(
    record: _Record, sizes: npt.NDArray[np.int64], most: int, most_bytes: int
) -> tuple[npt.NDArray[np.intp], int, int]:
    """Return what `_taken` does where the oldest make room: in effect one message after the other is put."""
    rows = np.flatnonzero(sizes <= most_bytes)
    fitting = min(int(np.searchsorted(np.cumsum(sizes[rows][::-1]), most_bytes, side="right")), most)
    if fitting < len(rows):  # some of these must go already: so must all that are older
        return rows[len(rows) - fitting :], record.messages, 0
    size = record.bytes + int(sizes[rows].sum())
    return rows, max(0, record.messages + len(rows) - most), max(0, size - most_bytes)


def _pack(messages: Iterable[Message] | MessageBatch) -> MessageBatch:
    """Return messages as they are stored: of one topic and publisher, theirs in the payload."""
    batch = messages.checked() if isinstance(messages, MessageBatch) else MessageBatch.from_messages(messages)
    columns = zip(to_iterable(batch.topics), to_iterable(batch.client_ids), to_iterable(batch.payloads), strict=True)
    rows = len(batch)
    return batch.replace(
        payloads=list(map(_PACK, columns)), topics=Constant(_TOPIC, rows), client_ids=Constant("", rows)
    )


def _unpack(batch: MessageBatch) -> Iterator[Message]:
    """Yield the messages as they were appended."""
    try:
        for row, payload in zip(batch.to_messages(), to_iterable(batch.payloads), strict=True):
            topic, client_id, own = _UNPACK(payload)
            yield Message(topic, own, client_id, row.qos, row.retain, row.timestamp, row.properties)
    except msgspec.DecodeError as bad:
        raise CorruptionError(f"a message of the queue can't be read: {bad}", "shard 0") from bad


def _state(record: _Record) -> FrameworkWrite:
    return FrameworkWrite(_KEY, add_checksum(_KEY, msgspec.msgpack.encode(record)))


def _load(db: Database) -> _Record | None:
    """Return the record in a queue's database; None if it is new."""
    stored = db.state(0).get(_KEY)
    if stored is None:
        return None
    try:
        record = msgspec.msgpack.decode(strip_checksum(_KEY, stored), type=_Record)
    except (CorruptionError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), "shard 0, state: queue") from bad
    if record.version > _VERSION:
        raise NewerFormatError(f"the queue has version {record.version}; this topicstore reads up to {_VERSION}")
    return record


class Queues:
    """The queues of one database. All methods may be called from any thread."""

    def __init__(
        self, path: Path, manifest: Manifest, plugins: Sequence[str], clock: Callable[[], int], *, read_only: bool
    ) -> None:
        self._directory = path / DIRECTORY
        self._manifest = manifest
        self._plugins = plugins
        self._clock = clock
        self._read_only = read_only
        self._lock = threading.RLock()
        self._queues: dict[str, Queue] = {}
        self._closed = False

    def open(
        self,
        name: str,
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        overflow: Overflow | None = None,
    ) -> Queue:
        """Return a queue, making it where there is none; see `Database.queue`."""
        if not name:
            raise InvalidArgumentError("the name of a queue has at least one character")
        check_utf8(name, "queue name", InvalidArgumentError)
        with self._lock:
            self._check_usable()
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = self._open(name)
            queue.bound(max_messages=max_messages, max_bytes=max_bytes, overflow=overflow)
        return queue

    def list(self) -> list[QueueInfo]:
        """Return all queues, sorted by name, those of earlier openings too."""
        with self._lock:
            self._check_usable()
            known = {_file_name(name) for name in self._queues}
            others = [path for path in self._directories() if path.name not in known]
            found = [queue.info() for queue in self._queues.values()]
            for path in others:
                with self._database(path) as db:
                    record = _load(db)
                    if record is not None:  # else its making was interrupted
                        found.append(Queue(db, record).info())
        return sorted(found, key=lambda info: info.name)

    def __contains__(self, name: str) -> bool:
        """Say whether there is a queue of that name."""
        with self._lock:
            return name in self._queues or (self._directory / _file_name(name)).is_dir()

    def drop(self, name: str) -> bool:
        """Remove a queue with all that it holds; False if there is none of that name."""
        with self._lock:
            self._check_usable()
            queue = self._queues.pop(name, None)
            if queue is not None:
                queue.close()
            self._sweep()
            path = self._directory / _file_name(name)
            there = path.is_dir()
            if there:
                path.rename(path.with_name(_GONE + path.name))  # from here on there is none
                sync_directory(self._directory)
                self._sweep()
        return there or queue is not None

    def close(self) -> None:
        """Close those that are open. May be called twice."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.close()
            self._queues.clear()

    def _check_usable(self) -> None:
        if self._closed:
            raise DatabaseClosedError("the database is closed")
        if self._read_only:
            raise ReadOnlyDatabaseError(
                "the database was opened to be read; open it without read_only to use its queues"
            )

    def _directories(self) -> Sequence[Path]:
        if not self._directory.is_dir():
            return []
        return [path for path in self._directory.iterdir() if not path.name.startswith(_GONE)]

    def _sweep(self) -> None:
        """Remove the directories of dropped queues, also of those whose removal was interrupted."""
        for path in self._directory.glob(f"{_GONE}*"):
            shutil.rmtree(path)

    def _open(self, name: str) -> Queue:
        db = self._database(self._directory / _file_name(name))
        try:
            record = _load(db)
            if record is None:
                record = _Record(name=name)
                db.state(0).write([_state(record)])
            if record.name != name:
                raise InvalidArgumentError(f"the file system takes queue {name!r} for queue {record.name!r}")
            return Queue(db, record)
        except BaseException:
            db.close()
            raise

    def _database(self, path: Path) -> Database:
        from topicstore.opening import open as open_database

        of = self._manifest
        layout = of.layout if "position_order" in registry().layout(of.layout).capabilities else None
        return open_database(
            path,
            backend=of.backend,
            layout=layout,
            shards=1,
            durability=of.durability,
            plugins=self._plugins,
            options={name: values for name, values in of.options.items() if name in (of.backend, layout)},
            auto_compact=False,
            clock=self._clock,
        )


def _file_name(name: str) -> str:
    """Return the name of a queue's directory."""
    quoted = quote(name, safe="").replace(".", "%2E")
    if len(quoted) <= _LONGEST:
        return quoted
    return f"{quoted[:_HEAD]}%%{xxhash.xxh3_128_hexdigest(name.encode())}"
