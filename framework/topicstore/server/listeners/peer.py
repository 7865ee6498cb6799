"""Who is at the other end of a connection, as far as the connection tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from topicstore.server.addresses import is_loopback, site_of, written_address

__all__ = ["FROM_ELSEWHERE", "ConnectionFactory", "Peer", "Scheme", "Via", "peer_of"]

FROM_ELSEWHERE = "topicstore_from_elsewhere"
"""The extra information of a transport whose client is on another machine, though its socket is of this one."""


Scheme = Literal["mqtt", "mqtts", "ws", "wss"]


class Via(msgspec.Struct, frozen=True, kw_only=True):
    """What all connections of a listener have in common."""

    name: str
    """The listener's name in logs."""
    scheme: Scheme
    """The scheme of the listener's URLs."""
    certificate_users: bool
    """Whether the common name of a client's certificate is its user name."""
    zone: str | None = None
    """The zone whose settings its clients have."""
    behind_proxy: bool = False
    """Whether the other end of a socket is a proxy, and clients may be anywhere."""


ConnectionFactory = Callable[[Via], asyncio.Protocol]
"""Makes what a new connection of a listener talks to."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The other end of a connection."""

    via: Via
    address: str
    """Its address and port."""
    loopback: bool
    """Whether it is on this machine, and nothing says that it speaks for somebody elsewhere."""
    certificate_name: str | None
    """The common name of its certificate if that is a user name here; None without one."""

    @property
    def site(self) -> str:
        """What it has in common with others at the same place: the address without the port; of IPv6 the network."""
        return site_of(self.address.rpartition(":")[0].strip("[]"))


def peer_of(transport: asyncio.BaseTransport, via: Via) -> Peer:
    """Return who is at the other end. Call it when the connection is made, before the other end may have gone."""
    address = transport.get_extra_info("peername")
    host = address[0] if isinstance(address, (tuple, list)) else ""
    elsewhere = via.behind_proxy or transport.get_extra_info(FROM_ELSEWHERE, False)
    return Peer(
        via=via,
        address="unknown" if address is None else written_address(address),
        loopback=is_loopback(host.partition("%")[0]) and not elsewhere,
        certificate_name=_common_name(transport) if via.certificate_users else None,
    )


def _common_name(transport: asyncio.BaseTransport) -> str | None:
    """Return the common name of the certificate of a client, which was verified; None if it has not exactly one."""
    certificate = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else None
