"""Accepts connections, and immediately closes those that exceed the limit of file descriptors.

An asyncio server would accept connections until no descriptor is left. Here a connection whose descriptor number is
too high (`topicstore.server.resource_limits`) is closed before any object is created for it. Failed TLS handshakes,
which asyncio doesn't log, are logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from topicstore.server.config.units import site_of, written_address
from topicstore.server.logs import RateLimitedLog

if TYPE_CHECKING:
    from .peer import Via
    from .proxy_header import Network, Source

__all__ = ["Acceptor"]

_AT_ONCE = 64
"""Most connections that are accepted in one round of the event loop."""
_PAUSE = 1.0
"""Seconds without accepting after the system has run out of descriptors or memory for a connection."""
_LOG_INTERVAL = 60.0
"""Seconds between two log lines about refused connections."""
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger("topicstore.server")
_connections = logging.getLogger("topicstore.server.connections")


class Acceptor:
    """Accepts connections of a listening socket in the running event loop, until `close`.

    name:    the listener's name, for the log.
    make:    returns the protocol for a new connection; its argument is the client that a proxy has named, the
             properties that another site of the cluster has named, or None.
    below:   connections whose descriptor has this number or a higher one are closed.
    patience: the time limit in seconds for a proxy's header, and for the handshake of TLS.
    context: the TLS context; None without TLS.
    proxies: the networks of the proxies that begin each connection with a header; if there are any, connections from
             elsewhere are closed.
    key:     the key with which other sites of the cluster sign the headers of connections that they pass on; None if
             they pass none on to this listener.
    """

    def __init__(
        self,
        name: str,
        listening: socket.socket,
        make: Callable[[Source | Via | None], asyncio.Protocol],
        below: int,
        patience: float,
        context: ssl.SSLContext | None = None,
        proxies: Sequence[Network] = (),
        key: bytes | None = None,
    ) -> None:
        self._name, self._listening, self._make, self._below = name, listening, make, below
        self._patience, self._context, self._proxies, self._key = patience, context, proxies, key
        self._without_header = RateLimitedLog("a connection without a proxy's header was refused", _connections)
        self._failed = RateLimitedLog("TLS handshake failed", _connections)
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
            with contextlib.suppress(OSError):  # fails if the client has disconnected
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(accepted, peer))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket, peer: Any) -> None:
        """Create the protocol of a connection, after a proxy's header and the TLS handshake."""
        source: Source | Via | None = None
        make = self._make
        if self._key is not None and self._context is not None:
            make = self._edge(self._key, peer)
        elif self._proxies or self._key is not None:
            from .proxy_header import ProxyHeaderError  # imported late: few listeners need it

            try:
                source = await self._read_header(accepted, str(peer[0]))
            except BaseException as bad:
                accepted.close()
                if not isinstance(bad, (ProxyHeaderError, OSError)):
                    raise
                self._note(self._without_header, peer, str(bad) or "there was no header in time")
                return
        handshake = None if self._context is None else self._patience
        try:
            await self._loop.connect_accepted_socket(
                lambda: make(source), accepted, ssl=self._context, ssl_handshake_timeout=handshake
            )
        except (OSError, EOFError) as bad:  # a failed handshake, for example: `ssl.SSLError` is an OSError
            accepted.close()
            if self._context is not None:
                self._note(
                    self._failed,
                    source if isinstance(source, tuple) else peer,
                    str(bad) or "the client closed the connection",
                )
        except BaseException:
            accepted.close()
            raise

    def _edge(self, key: bytes, peer: Any) -> Callable[[object], asyncio.Protocol]:
        """Return a factory of protocols for connections whose first bytes, within TLS, may be a site's header."""
        from .proxy_header import SiteEdge  # imported only on a site of a cluster

        refused = partial(self._note, self._without_header, peer)
        return lambda _: SiteEdge(self._make, key, self._patience, refused)

    async def _read_header(self, accepted: socket.socket, host: str) -> Source | Via | None:
        from .proxy_header import ProxyHeaderError, is_proxy, read_header

        if not self._proxies and self._key is not None:
            from .proxy_header import begins_with_header, read_site_header

            async with asyncio.timeout(self._patience):
                return await read_site_header(accepted, self._key) if await begins_with_header(accepted) else None
        if not is_proxy(host, self._proxies):
            raise ProxyHeaderError("it is not from one of the listener's proxies")
        async with asyncio.timeout(self._patience):
            return await read_header(accepted)

    def _note(self, log: RateLimitedLog, peer: Any, reason: str) -> None:
        fields = {"listener": self._name, "address": written_address(peer), "reason": reason}
        log.note(site_of(str(peer[0])), fields)

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
