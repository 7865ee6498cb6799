"""Accepts connections, and immediately closes those that exceed the limit of file descriptors.

An event loop's own server would accept until the last descriptor is used. Here a connection whose descriptor number is
too high (`topicstore.server.descriptors`) is closed before any object is created for it. Failed TLS handshakes, which
asyncio doesn't log, are logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from topicstore.server.config.units import written_address

__all__ = [
    "Acceptor",
    "FailedHandshakes",
]

_SECONDS, _LINES = 10.0, 10
"""The limit of log lines in a period of seconds; the first line after the period reports the number of omitted ones."""

_log = logging.getLogger("topicstore.server.connections")


class FailedHandshakes:
    """Logs failed handshakes of one listener, at a limited rate."""

    __slots__ = ("_began", "_listener", "_omitted", "_written")

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._began = float("-inf")
        self._written = self._omitted = 0

    def note(self, address: str, reason: str) -> None:
        """Log a failed handshake, unless the rate limit is exceeded."""
        now = time.monotonic()
        if now - self._began >= _SECONDS:
            self._began, self._written = now, 0
        if self._written >= _LINES:
            self._omitted += 1
            return
        self._written += 1
        fields: dict[str, object] = {"listener": self._listener, "address": address, "reason": reason}
        if self._omitted:
            fields["omitted"], self._omitted = self._omitted, 0
        _log.warning("TLS handshake failed", extra={"fields": fields})


_AT_ONCE = 64
"""Most connections that are accepted in one round of the event loop."""
_PAUSE = 1.0
"""Seconds without accepting after the system has run out of descriptors or memory for a connection."""
_LOG_INTERVAL = 60.0
"""Seconds between two log lines about refused connections."""
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger("topicstore.server")


class Acceptor:
    """Accepts connections of a listening socket in the running event loop, until `close`.

    name:    the listener's name, for the log.
    make:    returns the protocol for a new connection.
    below:   connections whose descriptor has this number or a higher one are closed.
    context, handshake: the TLS context, and the handshake's time limit in seconds; None without TLS.
    """

    def __init__(
        self,
        name: str,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        below: int,
        context: ssl.SSLContext | None = None,
        handshake: float | None = None,
    ) -> None:
        self._name, self._listening, self._make, self._below = name, listening, make, below
        self._context, self._handshake = context, handshake
        self._failed = FailedHandshakes(name)
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._refused = 0
        """Number of connections refused since the last log line about them."""
        self._logged = float("-inf")
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The listening socket; empty after `close`."""
        return (self._listening,) if self._listening.fileno() >= 0 else ()

    def close(self) -> None:
        """Stop accepting; open connections stay. Idempotent."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        if self._resume is not None:
            self._resume.cancel()

    async def wait_closed(self) -> None:
        """Return at once, because `close` leaves nothing to wait for."""

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as bad:
                if bad.errno not in _SHORT:
                    raise
                self._pause()
                return
            if accepted.fileno() >= self._below:
                accepted.close()
                self._refuse()
                continue
            accepted.setblocking(False)
            with contextlib.suppress(OSError):  # the client has disconnected
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(accepted, peer))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket, peer: Any) -> None:
        """Create the protocol of a connection, after the TLS handshake."""
        try:
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake
            )
        except (OSError, EOFError) as bad:  # such as a failed handshake: `ssl.SSLError` is an OSError
            accepted.close()
            if self._context is not None:
                self._failed.note(written_address(peer), str(bad) or "the client closed the connection")
        except BaseException:
            accepted.close()
            raise

    def _pause(self) -> None:
        self._loop.remove_reader(self._listening)
        self._resume = self._loop.call_later(_PAUSE, self._loop.add_reader, self._listening, self._accept)
        self._refuse()

    def _refuse(self) -> None:
        """Count a refused connection, and log the count at most once a minute."""
        self._refused += 1
        now = self._loop.time()
        if now >= self._logged + _LOG_INTERVAL:
            _log.warning(
                "listener %s: %d connections were refused, because no file descriptors are left for them; "
                "raise the limit of open files (ulimit -n), or lower the number of connections",
                self._name,
                self._refused,
            )
            self._logged, self._refused = now, 0
