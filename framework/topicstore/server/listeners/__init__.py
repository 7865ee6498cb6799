"""Listeners for MQTT clients over TCP, TLS and WebSocket.

`listen` opens a listener. Each of its connections becomes an `asyncio.Protocol` of the server with an asyncio
transport, independent of the layers between the transport and the socket.
"""

from __future__ import annotations

from .listener import Listener, Replacement, listen, read_tls
from .peer import ConnectionFactory, Peer, Via, peer_of
from .reserving import ListenError, Reserved, bind, places_of

__all__ = [
    "ConnectionFactory",
    "ListenError",
    "Listener",
    "Peer",
    "Replacement",
    "Reserved",
    "Via",
    "bind",
    "listen",
    "peer_of",
    "places_of",
    "read_tls",
]
