"""TLS handshakes of a listener, and the lines in the log of those that fail.

asyncio says nothing of them: the protocol that a server is given hears of a connection when its handshake is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

from topicstore.server.addresses import written_address

__all__ = ["FailedHandshakes", "Handshake"]

_SECONDS, _LINES = 10.0, 10
"""So many lines of failures are written in so many seconds; the first line after them says how many were left out."""

_under_way: set[asyncio.Task[None]] = set()
"""The handshakes that are under way: a loop holds its tasks weakly."""

_log = logging.getLogger("topicstore.server.connections")


class FailedHandshakes:
    """Logs the handshakes of one listener that fail, a bounded number of them."""

    __slots__ = ("_began", "_listener", "_omitted", "_written")

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._began = float("-inf")
        self._written = self._omitted = 0

    def note(self, address: str, reason: str) -> None:
        """Write the line of a handshake that has failed, unless there were many of late."""
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


class Handshake(asyncio.Protocol):
    """A connection before its handshake, which ``made`` is called for when that is over.

    The socket is given to a transport that speaks TLS, because only then the loop says what has failed.

    seconds: how long the handshake may take.
    """

    def __init__(
        self, made: Callable[[], asyncio.Protocol], context: ssl.SSLContext, seconds: float, failed: FailedHandshakes
    ) -> None:
        self._made, self._context, self._seconds, self._failed = made, context, seconds, failed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, before anything is read."""
        peer = transport.get_extra_info("peername")
        address = "unknown" if peer is None else written_address(peer)
        try:
            accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as bad:  # there may be no descriptor left
            self._failed.note(address, str(bad))
        else:
            task = asyncio.get_running_loop().create_task(self._shake(accepted, address))
            _under_way.add(task)
            task.add_done_callback(_under_way.discard)
        cast("asyncio.Transport", transport).abort()  # closes its own descriptor, and not the connection

    async def _shake(self, accepted: socket.socket, address: str) -> None:
        try:
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._made, accepted, ssl=self._context, ssl_handshake_timeout=self._seconds
            )
        except OSError as bad:  # of TLS, of the socket, or because it takes too long
            self._failed.note(address, str(bad) or "the client closed the connection")
            accepted.close()
        except BaseException:
            accepted.close()
            raise
