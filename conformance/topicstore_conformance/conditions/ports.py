"""Ports for servers that a test or a measurement starts."""

from __future__ import annotations

import socket
import sys

__all__ = ["hold_port"]


def hold_port() -> tuple[socket.socket, int]:
    """Return a port of the loopback interface for a server, and a socket that reserves it until the socket is closed.

    Linux doesn't assign a bound port to a process that asks for a free one. It still lets a server listen on the port
    if both sockets set SO_REUSEADDR and the first doesn't listen. On other systems the port is not reserved, because a
    server could not listen on a reserved one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return held, port
