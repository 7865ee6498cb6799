"""A bounded queue of messages that are not stored and wait for delivery.

The oldest messages are dropped first, because new messages of QoS 0 are more useful to a late client.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["MOST", "MOST_BYTES", "NonPersistentMessages"]

MOST = 10_000
"""The largest number of queued messages."""
MOST_BYTES = 4 << 20
"""The most bytes of queued payloads; a single message may be larger."""

T = TypeVar("T")


class NonPersistentMessages(Generic[T]):
    """A queue of messages. ``size`` returns the size of an item's payload in bytes."""

    __slots__ = ("_bytes", "_drawn", "_items", "_size")

    def __init__(self, size: Callable[[T], int]) -> None:
        self._items: collections.deque[T] | None = None  # an empty deque takes 760 bytes, even in an idle session
        self._drawn: list[T] | None = None
        self._size = size
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items or ())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items or ())

    @property
    def first(self) -> T:
        """The next message, which stays in the queue."""
        return self._begun()[0]

    def append(self, item: T) -> None:
        """Add a message at the end."""
        self._begun().append(item)
        self._bytes += self._size(item)

    def insert(self, item: T, before: Callable[[T], bool]) -> None:
        """Insert a message before those messages at the end for which ``before`` returns True."""
        items = self._begun()
        behind = len(items)
        while behind and before(items[behind - 1]):
            behind -= 1
        items.insert(behind, item)
        self._bytes += self._size(item)

    def _begun(self) -> collections.deque[T]:
        if self._items is None:
            self._items = collections.deque()
        return self._items

    def take(self) -> T:
        """Remove and return the next message."""
        item = self._begun().popleft()
        self._bytes -= self._size(item)
        return item

    def draw(self) -> T:
        """Remove and return the next message; `rewind` puts it back, unless `committed` is called before."""
        item = self.take()
        if self._drawn is None:
            self._drawn = []
        self._drawn.append(item)
        return item

    def committed(self) -> None:
        """Forget the drawn messages, because they are handed out."""
        self._drawn = None

    def rewind(self) -> bool:
        """Put back the messages drawn since the last `committed`; return whether there were any."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return False
        self._begun().extendleft(reversed(drawn))
        self._bytes += sum(map(self._size, drawn))
        return True

    def drop(self) -> Iterator[T]:
        """Remove and yield the oldest messages above the limits."""
        while len(self) > MOST or (self._bytes > MOST_BYTES and len(self) > 1):
            yield self.take()

    def clear(self) -> None:
        """Remove all messages."""
        self._items = self._drawn = None
        self._bytes = 0
