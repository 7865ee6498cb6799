"""Ports for servers that a test or a measurement starts."""

from __future__ import annotations

import socket
import sys

__all__ = ["hold_port"]


def hold_port() -> tuple[socket.socket, int]:
    """Return a port of the loopback interface for a server, and a socket that reserves it until the socket is closed.

    Linux doesn't assign a bound port to a process that asks for a free one, but still lets a server listen on it if
    both sockets allow the reuse of addresses and the first doesn't listen. Elsewhere nothing is reserved, because then
    no server could listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return held, port
