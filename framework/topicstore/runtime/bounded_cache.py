"""`BoundedCache`: a cache of computed values, because the topics and properties of messages recur often."""

from __future__ import annotations

import os
import threading
from sys import getsizeof
from typing import ClassVar, Generic, TypeVar

__all__ = ["BoundedCache"]

_ENTRY = 100
"""The approximate size of a dictionary's entry in bytes, without key and value."""
_SHARE = 64
"""An entry larger than the cache's size divided by this number isn't cached, because few such entries would evict all
others."""

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache of at most ``entries`` values and about ``size`` bytes. It is cleared when it is full.

    All methods are thread-safe. Another thread may clear the cache at any time, so a value that was just stored may be
    missing.
    """

    __slots__ = ("_entries", "_kept", "_size", "_used", "get")

    _lock: ClassVar = threading.RLock()  # reentrant, because a signal handler may store a value, too
    """Guards `_used`, and changes of `_kept`, of all caches: it is held briefly, and there may be many small caches."""

    def __init__(self, entries: int, size: int) -> None:
        self._kept: dict[K, V] = {}
        self._entries, self._size = entries, size
        self._used = 0
        self.get = self._kept.get
        """A function that returns the value of a key, or None."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: K, value: V, size: int = 0) -> V:
        """Store a value under a key, and return it. ``size`` is the value's size in bytes, if it is considerable.

        The size of the key is added; for a tuple of texts, the size of all texts.
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

    @classmethod
    def renew_lock(cls) -> None:
        """Replace the lock in a forked child, where a thread of the parent may have held it."""
        cls._lock = threading.RLock()


os.register_at_fork(after_in_child=BoundedCache.renew_lock)
