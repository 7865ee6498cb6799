"""Where clients come in: TCP, TLS and WebSocket, all of which hand on one kind of connection.

`listen` opens a listener. Each of its connections becomes an `asyncio.Protocol` of the server's, with an asyncio
transport, whatever lies between that and the socket.
"""

from __future__ import annotations

from .listener import Listener, ListenError, listen, read_tls
from .peer import ConnectionFactory, Peer, Via, peer_of

__all__ = ["ConnectionFactory", "ListenError", "Listener", "Peer", "Via", "listen", "peer_of", "read_tls"]
