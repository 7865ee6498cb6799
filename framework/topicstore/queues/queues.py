"""Queues: named, durable, bounded, first in first out; for what is to be forwarded while the other side is down.

Each is a small database of its own below the one it belongs to, with the same backend, durability and
plugins, so that it is as safe, and as secret, as that; with its layout too, if that shows messages at once
and in order of positions (``position_order``), else with the default one. It has one shard and one topic,
so one stream. Generations are dropped as the head passes them, which gives the disk back.

Stored form: a directory ``queues/<name>`` with the name percent-encoded (of one that gets longer than
200 characters so, the first 150, ``%%``, and the name's xxh3_128 as 32 hexadecimal digits).
`topicstore.queues.record` says what is in its database.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import xxhash

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
from topicstore.releasing import Taken, release_all
from topicstore.storage.durable_files import sync_directory
from topicstore.storage.reports import verify
from topicstore.storage.storage import Storage

from .queue import Queue, QueueInfo
from .record import Overflow, QueueRecord, load, save

__all__ = ["DIRECTORY", "Queues"]

DIRECTORY = "queues"
"""Of a database's directory: where its queues are."""
_LONGEST, _HEAD = 200, 150
_GONE = ".dropped-"


class OpenQueue(Protocol):
    """Opens the database of a queue."""

    def __call__(self, path: Path, *, read_only: bool = False) -> Storage:
        """Do it, in a directory, or make one there; to be read it must be there."""


class Queues:
    """The queues of one database. All methods may be called from any thread."""

    def __init__(self, directory: Path, open_queue: OpenQueue, *, read_only: bool) -> None:
        self._directory = directory
        self._open_queue = open_queue
        self._read_only = read_only
        self._lock = ProcessLock()
        """Guards what follows, and the directory."""
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
        """Return a queue, making it where there is none: durable, bounded, first in first out.

        name:         any text; whom it is for, say.
        max_messages: how many may wait to be committed.
        max_bytes:    of their topics, client ids and payloads, and some 6 for each.
        overflow:     what `Queue.append` does where there is no room: ``"refuse"``, ``"drop_oldest"`` or
                      ``"drop_newest"``.

        Bounds are stored; None leaves one as it is. A new queue has none, and refuses. It keeps its
        messages apart from those of the database, and is closed with it; `Database.checkpoint` leaves it out.
        """
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
                with contextlib.closing(self._open_queue(path)) as storage:
                    record = load(storage.state(0))
                    if record is not None:  # else its making was interrupted
                        found.append(Queue(storage, record).info())
        return sorted(found, key=lambda info: info.name)

    def damages(self) -> Iterator[Damage]:
        """Read all queues, those of earlier openings too, and yield what is damaged. None is changed."""
        for path in sorted(self._directories()):
            with self._lock:
                self._check_open()
                found = list(self._damages_in(path))
            for damage in found:
                yield Damage(place=f"{path}, {damage.place}", reason=damage.reason)

    def _damages_in(self, path: Path) -> Iterator[Damage]:
        for name, queue in self._queues.items():
            if _file_name(name) == path.name:
                yield from queue.damages()
                return
        if not path.exists():
            return  # dropped meanwhile
        try:
            with contextlib.closing(self._open_queue(path, read_only=True)) as storage:
                yield from verify(storage, None).damages
        except DatabaseNotFoundError:
            return  # its making was interrupted
        except (EngineError, NewerFormatError, NotADatabaseError) as bad:  # it can't even be opened
            place = bad.place if isinstance(bad, CorruptionError) else ""
            yield Damage(place=place or "its files", reason=str(bad))

    def __contains__(self, name: str) -> bool:
        """Say whether there is a queue of that name."""
        with self._lock:
            return name in self._queues or (self._directory / _file_name(name)).is_dir()

    def drop(self, name: str) -> bool:
        """Remove a queue with all that it holds; False if there is none of that name."""
        with self._lock:
            self._check_usable()
            queue = self._queues.get(name)
            if queue is not None:
                queue.close()
                del self._queues[name]
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
            release_all(queue.close for queue in self._queues.values())

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError("the database is closed")

    def _check_usable(self) -> None:
        self._check_open()
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
        with Taken() as taken:
            storage = self._open_queue(self._directory / _file_name(name))
            taken.add(storage.close)
            record = load(storage.state(0))
            if record is None:
                record = QueueRecord(name=name)
                storage.state(0).write([save(record)])
            if record.name != name:
                raise InvalidArgumentError(f"the file system takes queue {name!r} for queue {record.name!r}")
            return Queue(storage, record)


def _file_name(name: str) -> str:
    """Return the name of a queue's directory."""
    quoted = quote(name, safe="").replace(".", "%2E")
    if len(quoted) <= _LONGEST:
        return quoted
    return f"{quoted[:_HEAD]}%%{xxhash.xxh3_128_hexdigest(name.encode())}"
