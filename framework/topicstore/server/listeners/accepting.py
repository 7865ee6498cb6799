"""Accepting connections, of which those that there are no descriptors for are closed at once.

Event loops accept by themselves as long as there are descriptors, and take the last one too. Here a connection is
closed if its descriptor's number is too high (`topicstore.server.descriptors`), before anything is made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from topicstore.server.addresses import written_address

from .failed_handshakes import FailedHandshakes

__all__ = ["Acceptor"]

_AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""
_PAUSE = 1.0
"""Seconds in which nothing is accepted after the system had no descriptor, or no memory, for a connection."""
_TOLD = 60.0
"""Seconds between two lines of the log that say that connections are refused."""
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger("topicstore.server")


class Acceptor:
    """A listening socket in the running event loop, which it accepts on until `close`.

    name:    the listener's name, for the log.
    make:    makes the protocol of a connection.
    below:   the number below which the descriptors of connections must lie.
    context, handshake: what TLS needs, and the seconds that its handshake may take; None without TLS.
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
        """Connections that were closed since the last line about it."""
        self._told = float("-inf")
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The socket on which it listens; none after `close`."""
        return (self._listening,) if self._listening.fileno() >= 0 else ()

    def close(self) -> None:
        """Accept no more. May be called twice; connections that are there stay."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        if self._resume is not None:
            self._resume.cancel()

    async def wait_closed(self) -> None:
        """Return at once: `close` leaves nothing to wait for."""

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
            with contextlib.suppress(OSError):  # it is gone already
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(accepted, peer))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket, peer: Any) -> None:
        """Have a protocol take a connection, after its handshake."""
        try:
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake
            )
        except (OSError, EOFError) as bad:  # of its client, such as a failed handshake: `ssl.SSLError` is an OSError
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
        """Count a connection that isn't served, and log how many there were, once a minute."""
        self._refused += 1
        now = self._loop.time()
        if now >= self._told + _TOLD:
            _log.warning(
                "listener %s: %d connections were refused, because no file descriptors are left for them; "
                "raise the limit of open files (ulimit -n), or lower the number of connections",
                self._name,
                self._refused,
            )
            self._told, self._refused = now, 0
