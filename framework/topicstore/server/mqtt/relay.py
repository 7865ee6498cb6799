"""Clients of a cluster whose session lies in a shard of another site: their connection is passed on to that site.

The site that has accepted a client decodes its CONNECT, connects to the owner of the client id's shard, and sends a
header with the client's address (`topicstore.server.listeners.proxy_header`), the CONNECT, and all that follows. The
owner authenticates the client by the rules of the listener that has accepted it, and serves it. Each direction has
back-pressure: reading from one socket pauses while the other one's buffer is full.
"""

from __future__ import annotations

import asyncio
import time

from topicstore.replication.site import ShardOwner
from topicstore.server.access.bans import BanIndex
from topicstore.server.codec.reason import ReasonCode

from .channel import Channel
from .connections import Serving
from .upstream import Relays, Upstream

__all__ = ["Relay"]


class Relay(asyncio.Protocol):
    """The client's side of a connection that is passed on to another site. Used in the event loop only.

    A relay replaces the `MqttConnection`, and has those of its methods that apply to a client of another site. The
    relay is ended when the server stops, when the client is banned, and when another site becomes the shard's owner.
    """

    def __init__(self, serving: Serving, channel: Channel, upstream: Upstream, owner: ShardOwner) -> None:
        self._serving, self._channel, self._upstream, self._owner = serving, channel, upstream, owner
        channel.ends(f"it was passed on to site {owner.site}", ReasonCode.SUCCESS)

    def begin(self, received: bytes) -> None:
        """Pass on the bytes that the client has sent, and then all that it sends."""
        self._upstream.transport.write(received)
        self._upstream.attach(self)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on to the owner."""
        self._channel.arrived(len(data))
        if data and not self._channel.over:
            self._upstream.transport.write(data)

    def send(self, data: bytes) -> None:
        """Send bytes of the owner to the client."""
        self._channel.write_raw(data)

    def hold(self, hold: bool) -> None:
        """Pause or resume reading from the client."""
        self._channel.hold(hold)

    def pause_writing(self) -> None:
        """Pause reading from the owner."""
        if not self._upstream.transport.is_closing():
            self._upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the owner."""
        if not self._upstream.transport.is_closing():
            self._upstream.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection to the owner, after it has received everything."""
        self._channel.lost(exc)
        self._serving.remove(self)
        self._serving.relayed.pop(self, None)
        self._upstream.transport.close()

    def finish(self) -> None:
        """Close the client's connection once the client has read everything, because the owner has ended it."""
        self._channel.shut()

    def end_if_moved(self, relays: Relays) -> None:
        """End the client's connection if the site that serves it doesn't own the client's shard any more.

        A site that has stopped or is cut off doesn't end connections itself. Bytes that it has not read are dropped.
        """
        if relays.owner(self._channel.record.client_id or "") != self._owner:
            self._upstream.transport.abort()
            self.end(ReasonCode.USE_ANOTHER_SERVER, f"site {self._owner.site} has lost its shard")

    # --- what is done with all connections ---

    def renew_rights(self) -> None:
        """Do nothing: the owner decides about the client's rights."""

    def end_if_banned(self, bans: BanIndex) -> None:
        """End the connection if this site has banned the client."""
        record = self._channel.record
        if bans.find(record.client_id, [record.user], self._channel.peer.host, time.time()):
            self.end(ReasonCode.ADMINISTRATIVE_ACTION, "the client is banned")

    def end(self, reason: ReasonCode, text: str) -> None:
        """End the connection. The client gets no reason, because the owner may be in the middle of a packet."""
        self._channel.ends(text, reason)
        self._upstream.transport.close()
        self._channel.shut()

    @property
    def address(self) -> str:
        """The client's address and port."""
        return self._channel.peer.address

    @property
    def unsent(self) -> int:
        """Number of written bytes that the kernel has not accepted yet."""
        return self._channel.unsent

    def abort(self) -> None:
        """Close both sockets at once."""
        self._upstream.transport.abort()
        self._channel.abort()
