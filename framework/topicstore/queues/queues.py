"""`Queues`: named, durable, bounded FIFO queues, for messages to forward while the receiver is down.

A queue is a small separate database in the directory of its main database, with the same backend, durability and
plugins, and so with the same safety and confidentiality. It has the same layout if this layout shows messages
immediately and in order of positions (``position_order``), otherwise the default layout. The queue's database has one
shard and one topic, and so one stream. Generations are dropped when the head has passed them, which frees their disk
space.

Stored form: a directory ``queues/<name>`` with the name percent-encoded (RFC 3986, section 2.1). If the encoded name is
longer than 200 characters, the directory is named by its first 150, ``%%``, and the xxh3_128 of the queue's name as 32
hexadecimal digits. `topicstore.queues.record` describes the content of the database.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote

import xxhash

from topicstore.contract.arguments import KEEP, Keep
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    DatabaseNotFoundError,
    EngineError,
    InvalidArgumentError,
    NewerFormatError,
    NotADatabaseError,
    ReadOnlyDatabaseError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.layout import Damage
from topicstore.contract.topics import check_utf8
from topicstore.runtime.closing import Closer, close_all
from topicstore.storage.directory.files import convert_os_errors, permissions_of, sync_directory
from topicstore.storage.directory.manifest import MANIFEST, finished_manifest
from topicstore.storage.maintenance import write_copy
from topicstore.storage.reports import verify
from topicstore.storage.storage import Storage

if TYPE_CHECKING:
    from .queue import Queue, QueueInfo
    from .record import Overflow

__all__ = ["DIRECTORY", "Queues"]

DIRECTORY = "queues"
"""Name of the directory of queues in a database's directory."""
_LONGEST, _HEAD = 200, 150
_HASHED = "%%"
_GONE = ".dropped-"


class OpenQueue(Protocol):
    """A function that opens the database of a queue."""

    def __call__(self, path: Path, *, read_only: bool = False) -> Storage:
        """Open the database in a directory; create it if it doesn't exist, unless ``read_only``."""


class Queues:
    """The queues of one database. All methods are thread-safe."""

    def __init__(self, directory: Path, open_queue: OpenQueue, *, read_only: bool) -> None:
        self._directory = directory
        self._open_queue = open_queue
        self._read_only = read_only
        self._lock = ProcessLock()
        """Guards the attributes below, and the directory."""
        self._queues: dict[str, Queue] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Queues in {self._directory}{', read only' * self._read_only}{', closed' * self._closed}>"

    def open(
        self,
        name: str,
        *,
        max_messages: int | Keep | None = KEEP,
        max_bytes: int | str | Keep | None = KEEP,
        overflow: Overflow | Keep = KEEP,
    ) -> Queue:
        """Open a durable, bounded FIFO queue; create it if it doesn't exist.

        name:         any text, for example the receiver.
        max_messages: the most uncommitted messages in the queue.
        max_bytes:    the most bytes of these messages, a number or a text such as ``"8MB"``: topics, client ids,
                      payloads, and about 6 bytes for each.
        overflow:     the policy of `Queue.append` if a bound is reached: ``"refuse"``, ``"drop_oldest"`` or
                      ``"drop_newest"``.

        Bounds are stored: omitted bounds stay as they are, and None removes a bound. A new queue has no bounds, and its
        ``overflow`` is ``"refuse"``. Its messages are separate from those of the database. The queue is closed together
        with the database. In a read-only database, the queue is a snapshot as of this call, which can be read but not
        committed; if it doesn't exist, `ReadOnlyDatabaseError` is raised.
        """
        if not name:
            raise InvalidArgumentError("the name of a queue has at least one character")
        check_utf8(name, "queue name", InvalidArgumentError)
        with self._lock:
            self._check_open()
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = self._open(name)
            queue.bound(max_messages=max_messages, max_bytes=max_bytes, overflow=overflow)
        return queue

    def __iter__(self) -> Iterator[QueueInfo]:
        """Iterate over a snapshot of all queues, sorted by name, including queues that are not open."""
        with self._lock:
            self._check_open()
            known = {_file_name(name) for name in self._queues}
            others = [path for path in self._directories() if path.name not in known]
            found = [queue.info() for queue in self._queues.values()]
            found += [info for path in others if (info := self._info_in(path)) is not None]
        return iter(sorted(found, key=lambda info: info.name))

    def opened(self) -> list[QueueInfo]:
        """Return the information about the open queues, sorted by name."""
        with self._lock:
            self._check_open()
            return sorted((queue.info() for queue in self._queues.values()), key=lambda info: info.name)

    def __len__(self) -> int:
        """Return the number of queues."""
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> QueueInfo:
        """Return the information about a queue. Raises `InvalidArgumentError` if no queue has that name."""
        with self._lock:
            self._check_open()
            queue = self._queues.get(name)
            info = self._info_in(self._directory / _file_name(name)) if queue is None else queue.info()
        if info is None:
            raise InvalidArgumentError(f"there is no queue {name!r}")
        return info

    def _info_in(self, path: Path) -> QueueInfo | None:
        """Return the information about a queue that isn't open, or None if the directory holds no queue. Read-only."""
        from .queue import Queue
        from .record import load

        with (
            contextlib.suppress(DatabaseNotFoundError),  # the queue's creation was interrupted, or has just begun
            contextlib.closing(self._open_queue(path, read_only=True)) as storage,
        ):
            record = load(storage.state(0))
            return None if record is None else Queue(storage, record).info()
        return None

    def write_copies(self, copy: Path) -> None:
        """Write a copy of each queue into the copy of the database in the directory ``copy``."""
        with self._lock:
            self._check_open()
            paths = sorted(self._directories())
        if paths:
            (copy / DIRECTORY).mkdir(permissions_of(self._directory))
        for path in paths:
            with self._lock:
                self._check_open()
                self._write_copy(path, copy / DIRECTORY / path.name)
        if paths:
            sync_directory(copy / DIRECTORY)
            sync_directory(copy)

    def _write_copy(self, path: Path, copy: Path) -> None:
        queue = next((queue for name, queue in self._queues.items() if _file_name(name) == path.name), None)
        if queue is not None:
            queue.write_copy(copy)
            return
        try:
            finished_manifest(path)
        except (DatabaseNotFoundError, NotADatabaseError):
            return  # a queue that was dropped or isn't complete, or no queue
        with contextlib.closing(self._open_queue(path)) as storage:
            write_copy(storage, copy)

    def damages(self) -> Iterator[Damage]:
        """Read all queues, including queues that are not open, and yield the damage found. Read-only."""
        for path in sorted(self._directories()):
            with self._lock:
                self._check_open()
                found = list(self._damages_in(path))
            for damage in found:
                yield Damage(place=f"{path}, {damage.place}", reason=damage.reason)

    def _damages_in(self, path: Path) -> Iterator[Damage]:
        from .record import DECODERS

        for name, queue in self._queues.items():
            if _file_name(name) == path.name:
                yield from queue.damages()
                return
        if not path.exists():
            return  # the queue was dropped meanwhile
        try:
            with contextlib.closing(self._open_queue(path, read_only=True)) as storage:
                yield from verify(storage, DECODERS).damages
        except DatabaseNotFoundError:
            return  # the queue's creation was interrupted
        except (EngineError, NewerFormatError, NotADatabaseError) as bad:  # the queue can't be opened
            place = bad.place if isinstance(bad, CorruptionError) else ""
            yield Damage(place=place or "its files", reason=str(bad))

    def __contains__(self, name: str) -> bool:
        """Return whether there is a queue with that name."""
        with self._lock:
            return name in self._queues or (self._directory / _file_name(name)).is_dir()

    @convert_os_errors()
    def drop(self, name: str) -> bool:
        """Remove a queue with all its messages; return False if there is none with that name."""
        with self._lock:
            self._check_may_change(name)
            queue = self._queues.get(name)
            if queue is not None:
                queue.close()
                del self._queues[name]
            self._sweep()
            path = self._directory / _file_name(name)
            there = path.is_dir()
            if there:
                path.rename(path.with_name(_GONE + path.name))  # the commit point of the drop
                sync_directory(self._directory)
                self._sweep()
        return there or queue is not None

    def close(self) -> None:
        """Close the open queues. Idempotent."""
        with self._lock:
            self._closed = True
            close_all(queue.close for queue in self._queues.values())

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError("the database is closed")

    def _check_may_change(self, name: str) -> None:
        self._check_open()
        if self._read_only:
            raise ReadOnlyDatabaseError(f"the database was opened to be read; queue {name!r} can't be made or dropped")

    @convert_os_errors()
    def _directories(self) -> Sequence[Path]:
        if not self._directory.is_dir():
            return []
        return [path for path in self._directory.iterdir() if _is_file_name(path.name) and _has_shards(path)]

    def _sweep(self) -> None:
        """Remove the directories of dropped queues, even if an earlier removal was interrupted."""
        for path in self._directory.glob(f"{_GONE}*"):
            shutil.rmtree(path)

    def _open(self, name: str) -> Queue:
        from .queue import Queue
        from .record import QueueRecord, load, save

        path = self._directory / _file_name(name)
        with Closer() as closer:
            if not path.is_dir():
                self._check_may_change(name)
            storage = self._open_queue(path, read_only=self._read_only)
            closer.add(storage.close)
            record = load(storage.state(0))
            if record is None:
                self._check_may_change(name)
                record = QueueRecord(name=name)
                storage.state(0).write([save(record)])
            if record.name != name:
                raise InvalidArgumentError(f"the file system takes queue {name!r} for queue {record.name!r}")
            return Queue(storage, record)


def _is_file_name(name: str) -> bool:
    """Return whether a name may be a result of `_file_name`, unlike directories such as ``lost+found``."""
    return not name.startswith(_GONE) and (_HASHED in name or _file_name(unquote(name)) == name)


def _has_shards(path: Path) -> bool:
    """Return whether a directory holds a queue, even a damaged one."""
    return (path / MANIFEST).exists() or any(path.glob("shard-*"))


def _file_name(name: str) -> str:
    """Return the name of a queue's directory."""
    quoted = quote(name, safe="").replace(".", "%2E")
    if len(quoted) <= _LONGEST:
        return quoted
    return f"{quoted[:_HEAD]}{_HASHED}{xxhash.xxh3_128_hexdigest(name.encode())}"
