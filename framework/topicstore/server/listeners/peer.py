"""The peer of a connection: its address, its certificate's name, and whether it is on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from topicstore.server.config.model import Anonymous
from topicstore.server.config.units import is_loopback, site_of, written_address

__all__ = ["FROM_ELSEWHERE", "ConnectionFactory", "Peer", "Relayed", "Scheme", "Via", "peer_of"]

FROM_ELSEWHERE = "topicstore_from_elsewhere"
"""The key of a transport's extra information that marks a client from another machine behind a local socket."""


Scheme = Literal["mqtt", "mqtts", "ws", "wss"]


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a client's connection to another site of the cluster, which that site reports."""

    site: str
    """The name of the site that has accepted the client, and passes its bytes on."""
    loopback: bool
    """`Peer.loopback`, as seen from that site."""
    certificate_name: str | None
    """`Peer.certificate_name`."""


class Via(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that a connection has from its listener, and the client's address that a proxy names for it."""

    name: str
    """The listener's name in logs."""
    scheme: Scheme
    """The scheme of the listener's URLs."""
    certificate_users: bool
    """Whether the common name of a client's certificate is its user name."""
    zone: str | None = None
    """The zone whose settings apply to the listener's clients; None if there is none."""
    behind_proxy: bool = False
    """Whether clients connect through a proxy, so that a socket's peer address is not the client's."""
    anonymous: Anonymous | None = None
    """The clients of this listener that may connect without a user name; None: those of `[authentication]`."""
    sources: tuple[str, ...] = ("plugins", "passwords")
    """The sources that authenticate the clients of this listener: plugins, the password file, both, or neither."""
    source: tuple[str, int] | None = None
    """The client's address that the proxy of this connection has named; None if there is no such proxy."""
    redirect: bool = False
    """Whether clients of MQTT 5 are referred to the site that owns their session, instead of being passed on to it."""
    relayed: Relayed | None = None
    """The connection of the client to another site, which passes it on; None if the client has connected here. If
    there is one, the other fields are those of the other site's listener."""


ConnectionFactory = Callable[[Via], asyncio.Protocol]
"""Returns the protocol for a new connection of a listener."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The peer of a connection."""

    via: Via
    address: str
    """The peer's address and port."""
    loopback: bool
    """Whether the peer is on this machine, and no proxy or foreign web page is involved."""
    certificate_name: str | None
    """The common name of the peer's certificate, if the listener uses certificates' names as user names; else None."""

    @property
    def host(self) -> str:
        """The peer's address without the port."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def site(self) -> str:
        """The IPv4 address or the IPv6 /64 network, by which clients of one site are counted together."""
        return site_of(self.host)


def peer_of(transport: asyncio.BaseTransport, via: Via) -> Peer:
    """Return the peer of a connection. Must be called when the connection is made, before the peer may disconnect."""
    address = via.source or transport.get_extra_info("peername")
    host = address[0] if isinstance(address, (tuple, list)) else ""
    written = "unknown" if address is None else written_address(address)
    if via.relayed is not None:
        loopback, name = via.relayed.loopback, via.relayed.certificate_name
        return Peer(via=via, address=written, loopback=loopback, certificate_name=name)
    elsewhere = via.behind_proxy or transport.get_extra_info(FROM_ELSEWHERE, False)
    return Peer(
        via=via,
        address=written,
        loopback=is_loopback(host.partition("%")[0]) and not elsewhere,
        certificate_name=_common_name(transport) if via.certificate_users else None,
    )


def _common_name(transport: asyncio.BaseTransport) -> str | None:
    """Return the common name of a client's verified certificate; None unless it has exactly one."""
    certificate = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else None
