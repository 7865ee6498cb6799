"""Limits for the memory and the file descriptors that all clients together can occupy.

Limits for single clients don't limit a server: thousands of clients that each stay below theirs can fill its memory. A
budget is used in one event loop only, except that any thread may read its numbers. If the
budget is exceeded, connections are ended.

Sockets and files share the process's limit of descriptors (``ulimit -n``). An engine that fails to open a file refuses
writes until it is opened again. So the server raises its limit as far as permitted, and reserves descriptors for the
engines and for HTTP: a connection is closed at once if its descriptor's number exceeds the limit of its kind. The
system assigns the lowest free number, so the number shows about how many descriptors are in use.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import pyarrow as pa

import topicstore as ts

from .config.model import HttpSettings, Limits, ServerSettings

__all__ = ["Descriptors", "Holder", "MemoryBudget", "raise_limit"]

_PROGRESS = 16 << 10
"""Fewest bytes that a client must send in each period of `end_slow`."""
_WORTH = 16 << 20
"""Memory is returned to the system after this number of bytes was released."""
_IDLE, _LITTLE = 0.5, 1 << 20
"""Memory is returned to the system after a period of so many seconds in which fewer bytes than this were taken."""
_MOST = 1 << 20
"""Most descriptors that the server requests, because some systems refuse a huge or unlimited number."""
_SHARD = 128
"""Descriptors reserved for each shard: its SST files, its write-ahead logs, and the files open during recovery."""
_OTHERS = 32
"""Descriptors reserved for files outside of shards, such as exports."""
_HTTP = 64
"""HTTP connections whose descriptors are reserved, so that MQTT clients can't block health checks."""
_FEW = 1_000
"""With fewer connections than this the log has a warning, even if the settings name no number."""

_log = logging.getLogger("topicstore.server")


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


def raise_limit() -> None:
    """Raise the process's limit of open files to the hard limit, at most to `_MOST`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError) as bad:
            _log.warning("the number of open files can't be raised from %d to %d: %s", soft, most, bad)


@attrs.frozen
class Descriptors:
    """The process's limit of file descriptors, and the numbers of connections that it allows."""

    limit: int
    """Most descriptors that the process may have open."""
    http: int
    """HTTP connections are accepted with descriptors below this number; the rest is reserved for the engines."""
    mqtt: int
    """MQTT connections are accepted with descriptors below this number."""
    clients: int
    """Most MQTT clients that are connected at the same time."""
    requests: int
    """Most HTTP connections at the same time."""

    @classmethod
    def of(cls, settings: ServerSettings, storages: Iterable[ts.Database], *, open_clients: int = 0) -> Descriptors:
        """Return the limits of connections beside the engines of open databases.

        ``open_clients`` is the number of descriptors in use that belong to MQTT clients.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST if soft == resource.RLIM_INFINITY else soft
        shards = sum(len(db.storage.shards) for db in storages if "persistent" in db.storage.capabilities)
        http = max(limit - min(_OTHERS + _SHARD * shards, limit // 2), 1)
        wanted = 0 if settings.http is None else settings.http.connections
        mqtt = max(http - min(wanted, _HTTP, limit // 8), 1)
        # Most descriptors in use stay open. Files that engines have open count twice: as in use, and in their reserve.
        clients = max(mqtt - _in_use() + open_clients, 1)
        return cls(limit, http, mqtt, min(clients, settings.limits.connections), min(wanted, max(limit // 4, 1)))

    def log(self, settings: ServerSettings) -> None:
        """Log the settings that allow more connections than there are descriptors for.

        The level is warning if a setting differs from its default, or if there are descriptors for fewer than `_FEW`.
        """
        for name, wanted, default, there in (
            ("limits.connections", settings.limits.connections, Limits().connections, self.clients),
            (
                "http.connections",
                0 if settings.http is None else settings.http.connections,
                HttpSettings().connections,
                self.requests,
            ),
        ):
            if there < wanted:
                _log.log(
                    logging.INFO if wanted == default and there >= _FEW else logging.WARNING,
                    "%s is %d, but this process may have only %d files open, which is enough for %d; "
                    "raise its limit (ulimit -n, or LimitNOFILE of systemd)",
                    name,
                    wanted,
                    self.limit,
                    there,
                )


def _in_use() -> int:
    """Return the lowest free descriptor number, which is about the number of descriptors in use."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    return lowest
