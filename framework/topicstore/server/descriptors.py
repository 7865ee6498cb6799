"""File descriptors: how many connections there may be, so that engines can always open their files.

A process may have a number of descriptors open (``ulimit -n``), which sockets and files share. An engine whose next
file can't be opened takes no writes until it is opened again. So the server raises its limit as far as it may, and
keeps some descriptors for the engines and for HTTP: a connection whose descriptor has a higher number than its kind may
have is closed at once. The system gives the lowest number that is free, so the number tells how many are in use.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable

import attrs

import topicstore as ts

from .limits import Limits
from .settings import HttpSettings, ServerSettings

__all__ = ["Descriptors", "raise_limit"]

_MOST = 1 << 20
"""Descriptors that the server asks for, at most: where there is no limit, or a huge one, some systems refuse it."""
_SHARD = 128
"""Descriptors that are kept for each shard: its tables, its logs, and what it has open while it is opened again."""
_OTHERS = 32
"""Descriptors that are kept for what isn't a shard's: notes, exports, the database's other files."""
_HTTP = 64
"""Connections of HTTP for which descriptors are kept from clients of MQTT, so that health can be asked for."""
_FEW = 1_000
"""Connections that a server is expected to take where its settings name no number."""

_log = logging.getLogger("topicstore.server")


def raise_limit() -> None:
    """Raise the number of files that this process may have open as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError) as bad:
            _log.warning("the number of open files can't be raised from %d to %d: %s", soft, most, bad)


@attrs.frozen
class Descriptors:
    """The file descriptors that this process may have, and the numbers of connections that they allow."""

    limit: int
    """Descriptors that the process may have."""
    http: int
    """The number below which the descriptors of HTTP's connections lie: those above are the engines'."""
    mqtt: int
    """The number below which those of other connections lie."""
    clients: int
    """Clients of MQTT that may be connected at the same time."""
    requests: int
    """Connections of HTTP at the same time."""

    @classmethod
    def of(cls, settings: ServerSettings, storages: Iterable[ts.Database], *, open_clients: int = 0) -> Descriptors:
        """Return what is left for connections beside the engines of open databases.

        ``open_clients`` is how many of the descriptors in use are clients' of MQTT.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST if soft == resource.RLIM_INFINITY else soft
        shards = sum(len(db.storage.shards) for db in storages if "persistent" in db.storage.capabilities)
        http = max(limit - min(_OTHERS + _SHARD * shards, limit // 2), 1)
        wanted = 0 if settings.http is None else settings.http.connections
        mqtt = max(http - min(wanted, _HTTP, limit // 8), 1)
        # Of what is open now most stays open; the engines' own files count against what is kept for them.
        clients = max(mqtt - _in_use() + open_clients, 1)
        return cls(limit, http, mqtt, min(clients, settings.limits.connections), min(wanted, max(limit // 4, 1)))

    def log(self, settings: ServerSettings) -> None:
        """Log which settings want more connections than there are descriptors for.

        It is a warning if the settings name another number than the default, or if less than `_FEW` are left.
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
    """Return the lowest number of a descriptor that is free: about as many are in use."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    return lowest
