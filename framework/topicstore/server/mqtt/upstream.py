"""Connections to other sites of a cluster, for clients whose sessions these sites own, and the choice of the site."""

from __future__ import annotations

import asyncio
import uuid
from typing import Protocol, cast

import topicstore as ts
from topicstore.replication.objects import ClusterDocument
from topicstore.replication.site import ShardOwner, Site
from topicstore.server.cluster import SiteTls, mqtt_key
from topicstore.server.config.units import Address
from topicstore.server.listeners.peer import Peer
from topicstore.server.listeners.proxy_header import site_header

__all__ = ["Downstream", "Relays", "Upstream"]


class Downstream(Protocol):
    """The client's side of a connection that is passed on (`topicstore.server.mqtt.relay.Relay`)."""

    def send(self, data: bytes) -> None:
        """Send bytes of the owner to the client."""

    def hold(self, hold: bool) -> None:
        """Pause or resume reading from the client."""

    def finish(self) -> None:
        """Close the client's connection once it has read everything."""

    def end_if_moved(self, relays: Relays) -> None:
        """End the client's connection if another site has become the owner of its shard."""


_TRIES = 4_096
"""Most random client ids that are tried until one lies in a shard of this site."""


class Relays:
    """Finds the site that serves a client id, and connects to it. Used in the event loop only."""

    def __init__(self, db: ts.Database, site: Site, tls: SiteTls) -> None:
        self._site, self._tls = site, tls
        self._shard_of = db.storage.shard_of
        self.key = mqtt_key(site)
        """The key of headers."""

    @property
    def document(self) -> ClusterDocument:
        """The cluster's current document, which decides about owners; another object after each change."""
        return self._site.document

    def is_here(self, client_id: str) -> bool:
        """Return whether this site owns the shard of a client id."""
        return self._site.owns(self._shard_of(client_id))

    def owner(self, client_id: str) -> ShardOwner | None:
        """Return the other site that owns a client id's shard; None while no other site does."""
        return self._site.owner(self._shard_of(client_id))

    def assigned_id(self) -> str:
        """Return a new client id in a shard of this site; if this site owns none, in any shard."""
        for _ in range(_TRIES):
            made = f"auto-{uuid.uuid4().hex}"
            if self.is_here(made):
                break
        return made

    async def connect(self, owner: ShardOwner, peer: Peer, patience: float) -> Upstream:
        """Connect to the owner of a client's shard, and send the header. Raises OSError and ValueError."""
        address, loop = Address(owner.address), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                _, upstream = await loop.create_connection(Upstream, address.host, address.port, ssl=self._tls.for_mqtt)
        except TimeoutError as late:
            raise OSError("it did not answer in time") from late
        upstream.transport.write(site_header(self.key, self._site.name, peer))
        return upstream


class Upstream(asyncio.Protocol):
    """The connection to the owner of a client's shard."""

    transport: asyncio.Transport
    relay: Downstream | None = None
    """The client's connection, once its bytes are passed on."""
    _ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to pass on bytes."""
        self.transport = cast("asyncio.Transport", transport)

    def attach(self, relay: Downstream) -> None:
        """Pass on the owner's bytes to a client."""
        self.relay = relay
        if self._ended:
            relay.finish()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on to the client. Before the CONNECT the owner sends nothing."""
        if self.relay is not None:
            self.relay.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the client's connection, too."""
        self._ended = True
        if self.relay is not None:
            self.relay.finish()

    def pause_writing(self) -> None:
        """Pause reading from the client."""
        if self.relay is not None:
            self.relay.hold(True)

    def resume_writing(self) -> None:
        """Resume reading from the client."""
        if self.relay is not None:
            self.relay.hold(False)
