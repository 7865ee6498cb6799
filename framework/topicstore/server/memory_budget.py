"""Memory that clients can fill and hold: a bound for all of them together, and which of them has to go above it.

A bound for each client alone is none for a server: thousands of clients that each keep a little less hold the memory
of everybody. Used in one event loop only, but for the figures, which any thread may read.
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
"""Bytes that a client sends in each period of patience at least."""
_WORTH = 16 << 20
"""Released bytes from which on returning memory to the system is worth the time that it takes."""
_IDLE, _LITTLE = 0.5, 1 << 20
"""Seconds in which fewer bytes than this came to be held, after which memory is returned."""


class Holder(Protocol):
    """A connection for whose client memory is held. Compared by identity."""

    @property
    def host(self) -> str:
        """The address of the client, without its port."""

    @property
    def work(self) -> object:
        """The packet that isn't whole yet; None while it isn't the client for which the server waits."""

    @property
    def breakable(self) -> bool:
        """Whether what is held waits for the client, so that ending its connection releases it at once."""

    def break_off(self, why: str) -> None:
        """End the connection, and release what is held for it."""


class MemoryBudget:
    """The bytes that are held for the clients of one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        """The bytes that may be held; it may be changed at any time."""
        self.held = 0
        self.broken_off = 0
        """How many connections were ended, because more was held or because their clients were too slow."""
        self._sizes: dict[Holder, int] = {}
        """The holders, the one first that made no progress for longest."""
        self._marks: dict[Holder, tuple[object, int, float]] = {}
        """By holder, the packet, its size and the time of the progress that was seen last."""
        self._released = self._taken = 0
        """Bytes that were released since memory was returned, and those that came to be held since that was thought of.
        """
        self._returning: asyncio.TimerHandle | None = None

    def hold(self, holder: Holder, size: int) -> None:
        """Note how many bytes are held for a client from now on; 0 for none. May end connections, also this one.

        The connection that has to go is the largest one of the host that holds most, so that whoever holds little is
        never in anybody's way. Of connections that hold about the same, the one goes that made no progress for longest.
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
        """End connections until no more is held than may be. To be called when a holder becomes breakable, too."""
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
        """End connections of which less than 16 KiB of a packet came within ``patience`` seconds, and not the rest."""
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
        """Return memory to the system if little came for a while; else look again later."""
        taken, self._taken = self._taken, 0
        if taken >= _LITTLE:
            self._returning = asyncio.get_running_loop().call_later(_IDLE, self._return)
            return
        self._returning, self._released = None, 0
        threading.Thread(target=_return_memory, name="topicstore-memory", daemon=True).start()


def _return_memory() -> None:
    """Return what the allocators keep for later to the system."""
    pa.default_memory_pool().release_unused()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc that returns free memory; other C libraries have none, and return it themselves."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
