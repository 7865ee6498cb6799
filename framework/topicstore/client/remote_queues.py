"""`RemoteQueues`: the queues of a database that a server has open."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from topicstore.contract.errors import InvalidArgumentError
from topicstore.files.formats import decode_line
from topicstore.queues.queue import QueueBatch, QueueInfo

from .connection import Connection
from .paths import part

__all__ = ["RemoteQueue", "RemoteQueues"]

_MOST = 10_000
"""The maximum number of messages that the server returns per request."""


class _Committed(msgspec.Struct):
    committed: int


class _Waiting(msgspec.Struct):
    id: int
    message: msgspec.Raw


class _Read(msgspec.Struct):
    items: list[_Waiting]


class RemoteQueue:
    """The remote form of `topicstore.Queue`."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self._path = f"/queues/{part(name)}"
        self._connection = connection
        self._read = 0
        """The id of the last message that was read."""

    def __len__(self) -> int:
        """Return the number of uncommitted messages."""
        return self._connection.get(self._path, QueueInfo).messages

    def read(self, limit: int = 1_000) -> QueueBatch:
        """Return the messages after the last ones read: at most ``limit``; none only at the queue's end."""
        page = self._connection.get(f"{self._path}/messages", _Read, after=self._read, limit=min(limit, _MOST))
        if page.items:
            self._read = page.items[-1].id
        messages = [decode_line(bytes(one.message)) for one in page.items]
        return QueueBatch(messages=messages, ids=[one.id for one in page.items])

    def commit(self, upto: int) -> int:
        """Remove the messages up to and including an id; return their number."""
        return self._connection.change("POST", f"{self._path}/commit", _Committed, json={"upto": upto}).committed


class RemoteQueues:
    """The remote form of `topicstore.Database.queues`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __iter__(self) -> Iterator[QueueInfo]:
        """Iterate over all queues, sorted by name."""
        return iter(self._connection.items("/queues", QueueInfo))

    def __contains__(self, name: str) -> bool:
        """Return whether there is a queue with that name."""
        return any(one.name == name for one in self)

    def open(self, name: str) -> RemoteQueue:
        """Return an existing queue. Makes no request."""
        return RemoteQueue(name, self._connection)

    def drop(self, name: str) -> None:
        """Remove a queue with all its messages."""
        if not name:
            raise InvalidArgumentError("the name of a queue has at least one character")
        self._connection.change("DELETE", f"/queues/{part(name)}")
