"""A limit for the memory that all clients together can occupy, and the choice of connections to end above it.

Limits for single clients don't limit a server: thousands of clients that each stay below theirs can fill its memory. A
budget is used in one event loop only, except that any thread may read its numbers.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

__all__ = ["Holder", "MemoryBudget"]

_PROGRESS = 16 << 10
"""Fewest bytes that a client must send in each period of `end_slow`."""
_WORTH = 16 << 20
"""Memory is returned to the system after this number of bytes was released."""
_IDLE, _LITTLE = 0.5, 1 << 20
"""Memory is returned to the system after a period of so many seconds in which fewer bytes than this were taken."""


class Holder(Protocol):
    """A connection that occupies memory. Compared by identity."""

    @property
    def host(self) -> str:
        """The address of the client, without its port."""

    @property
    def work(self) -> object:
        """The incomplete packet; None while the server does not wait for the client."""

    @property
    def breakable(self) -> bool:
        """Whether ending the connection releases its memory at once."""

    def break_off(self, why: str) -> None:
        """End the connection, and release its memory."""


class MemoryBudget:
    """A budget of memory for the clients of one event loop, in bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Most bytes that may be held; may be changed at any time."""
        self.held = 0
        self.broken_off = 0
        """Number of connections ended because the budget was exceeded or because their clients were too slow."""
        self._sizes: dict[Holder, int] = {}
        """Bytes by holder; the holder with the oldest change comes first."""
        self._marks: dict[Holder, tuple[object, int, float]] = {}
        """By holder, the packet, its size and the time at which `end_slow` last saw progress."""
        self._released = self._taken = 0
        """Bytes released since memory was last returned to the system, and bytes taken since the last check for
        that."""
        self._returning: asyncio.TimerHandle | None = None

    def hold(self, holder: Holder, size: int) -> None:
        """Set the number of bytes that a connection occupies; 0: none. May end connections, also this one.

        Above the budget, the largest connection of the host with most bytes ends, so that hosts with few bytes are not
        affected. Among connections of about the same size, the one without progress for longest ends.
        """
        before = self._sizes.pop(holder, 0)
        if size:
            self._sizes[holder] = size
        self.held += size - before
        if size > before:
            self._taken += size - before
            self.make_room()
        else:
            self._released += before - size
            if self._released >= _WORTH and self._returning is None:
                self._returning = asyncio.get_running_loop().call_later(_IDLE, self._return)

    def make_room(self) -> None:
        """End connections until the budget is met. To be called when a holder becomes breakable, too."""
        while self.held > self.most:
            victim = self._largest()
            if victim is None:
                return
            self._break_off(victim, "the server holds too many bytes of what clients have begun or don't take")

    def _largest(self) -> Holder | None:
        hosts: dict[str, int] = {}
        for holder, size in self._sizes.items():
            hosts[holder.host] = hosts.get(holder.host, 0) + size
        found = [one for one in self._sizes if one.breakable]
        return max(found, key=lambda one: (hosts[one.host], self._sizes[one].bit_length()), default=None)

    def _break_off(self, holder: Holder, why: str) -> None:
        self.broken_off += 1
        holder.break_off(why)
        self.hold(holder, 0)

    def end_slow(self, patience: float, now: float) -> None:
        """End connections whose incomplete packet grew by less than 16 KiB within ``patience`` seconds."""
        before, self._marks = self._marks, {}
        for holder, size in list(self._sizes.items()):
            mark, work = before.get(holder), holder.work
            if mark is None or work is None or mark[0] != work or size >= mark[1] + _PROGRESS:
                self._marks[holder] = (work, size, now)
            elif now - mark[2] < patience:
                self._marks[holder] = mark
            else:
                self._break_off(holder, f"a packet wasn't whole in time: {size:,} bytes of it came")

    def _return(self) -> None:
        """Return memory to the system if few bytes were taken since the last check; else check again later."""
        taken, self._taken = self._taken, 0
        if taken >= _LITTLE:
            self._returning = asyncio.get_running_loop().call_later(_IDLE, self._return)
            return
        self._returning, self._released = None, 0
        threading.Thread(target=_return_memory, name="topicstore-memory", daemon=True).start()


def _return_memory() -> None:
    """Return the allocators' unused memory to the system."""
    pa.default_memory_pool().release_unused()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; None with other C libraries, which return free memory by themselves."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
