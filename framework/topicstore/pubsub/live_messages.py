"""Messages that are stored nowhere and wait until their client can be sent them: as many as memory allows.

The oldest are dropped first: a client that gets messages of QoS 0 late is served better with the newest.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["LIVE", "LIVE_BYTES", "LiveMessages"]

LIVE = 10_000
"""The messages that wait at most."""
LIVE_BYTES = 4 << 20
"""The bytes that their payloads have at most, if there are several."""

T = TypeVar("T")


class LiveMessages(Generic[T]):
    """Waiting messages in their order. ``size`` returns the bytes of the payload of one."""

    __slots__ = ("_bytes", "_drawn", "_items", "_size")

    def __init__(self, size: Callable[[T], int]) -> None:
        self._items: collections.deque[T] | None = None  # an empty one takes 760 bytes, also in an idle session
        self._drawn: list[T] | None = None
        self._size = size
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items or ())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items or ())

    @property
    def first(self) -> T:
        """The next one."""
        return self._begun()[0]

    def append(self, item: T) -> None:
        """Add a message after all others."""
        self._begun().append(item)
        self._bytes += self._size(item)

    def insert(self, item: T, before: Callable[[T], bool]) -> None:
        """Add one before those at the end of which ``before`` says that they come after it."""
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
        """Remove the next one, and return it."""
        item = self._begun().popleft()
        self._bytes -= self._size(item)
        return item

    def draw(self) -> T:
        """Remove the next one, and return it; `rewind` brings it back, unless `settled` is called before."""
        item = self.take()
        if self._drawn is None:
            self._drawn = []
        self._drawn.append(item)
        return item

    def settled(self) -> None:
        """Note that those that were drawn are handed out."""
        self._drawn = None

    def rewind(self) -> bool:
        """Bring back those that were drawn since the last `settled`; return whether there are any."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return False
        self._begun().extendleft(reversed(drawn))
        self._bytes += sum(map(self._size, drawn))
        return True

    def drop(self) -> Iterator[T]:
        """Remove the oldest for which there is no room, and yield them."""
        while len(self) > LIVE or (self._bytes > LIVE_BYTES and len(self) > 1):
            yield self.take()

    def clear(self) -> None:
        """Remove all."""
        self._items = self._drawn = None
        self._bytes = 0
