"""`BoundedCache`: what was worked out before, because topics and properties of messages come again and again."""

from __future__ import annotations

import threading
from sys import getsizeof
from typing import Generic, TypeVar

from topicstore.contract.forking import remember

__all__ = ["BoundedCache"]

_ENTRY = 100
"""About how many bytes a dictionary takes for an entry, without key and value."""
_SHARE = 64
"""An entry that would take more than this part of the bytes isn't kept: a few of them would drive out all others."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Keeps at most ``entries`` values and about ``size`` bytes by their keys. It is emptied when it is full.

    Both methods may be called from any thread. Another thread may empty the cache at any time, so a value that was just
    kept need not be found.
    """

    __slots__ = ("__weakref__", "_entries", "_kept", "_lock", "_size", "_used", "get")

    def __init__(self, entries: int, size: int) -> None:
        self._kept: dict[K, V] = {}
        self._entries, self._size = entries, size
        self._lock = threading.RLock()  # a signal handler may keep a value, too
        """Guards `_used`, and changes of `_kept`."""
        self._used = 0
        self.get = self._kept.get
        """Return the value of a key, or None."""
        remember(self)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: K, value: V, size: int = 0) -> V:
        """Keep a value, and return it. ``size``: the bytes of the value, if they are many; those of the key are known.

        A key that is a tuple of texts counts with them.
        """
        parts = key if isinstance(key, tuple) else (key,)
        size += sum(map(getsizeof, parts)) + _ENTRY
        if size <= self._size // _SHARE:
            with self._lock:
                if len(self._kept) >= self._entries or self._used + size > self._size:
                    self._kept.clear()
                    self._used = 0
                self._kept[key] = value
                self._used += size
        return value

    def leave_to_parent(self) -> None:
        """Go on in a forked child, whatever thread of the parent was about to keep a value."""
        self._lock = threading.RLock()
