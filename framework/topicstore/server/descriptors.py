"""Limits for connections by file descriptors, so that storage engines can always open their files.

Sockets and files share the process's limit of descriptors (``ulimit -n``). An engine that fails to open a file refuses
writes until it is opened again. So the server raises its limit as far as permitted, and reserves descriptors for the
engines and for HTTP: a connection is closed at once if its descriptor's number exceeds the limit of its kind. The
system assigns the lowest free number, so the number shows about how many descriptors are in use.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable

import attrs

import topicstore as ts

from .config.model import HttpSettings, Limits, ServerSettings

__all__ = ["Descriptors", "raise_limit"]

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
        # Most of the descriptors in use stay open. Files that engines have open count twice: here and in their reserve.
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
