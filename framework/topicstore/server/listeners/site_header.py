"""The header with which a site of a cluster begins a client's connection that it passes on to another site.

It is a header of the PROXY protocol, version 2 (`topicstore.server.listeners.proxy_header`), with the client's address
and port in both places, and one extension (TLV) of the type `_EXTENSION`: an HMAC of SHA-256 with the cluster's key
over all that precedes and follows it in the header, then 16 random bytes, then a `Via` as MessagePack. A client of MQTT
or of TLS never begins with the header's first byte, so that one listener serves clients and sites.

At a listener with TLS the header is within TLS, at others it precedes everything else.

The HMAC is what a site trusts: only the cluster's sites know the key. The random bytes differ in each header, so that
its HMAC shows no other one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from .peer import Peer, Relayed, Via
from .proxy_header import SIGNATURE, ProxyHeaderError, Source, read_binary, split_binary

__all__ = ["SiteEdge", "begins_with_header", "read_site_header", "site_header"]

_EXTENSION = 0xE7
"""One of the types that the protocol leaves to programs (PP2_TYPE_MIN_CUSTOM to PP2_TYPE_MAX_CUSTOM)."""
_MAC, _NONCE = 32, 16
_TCP4, _TCP6, _UNSPECIFIED = 0x11, 0x21, 0x00

_decoder = msgspec.msgpack.Decoder(Via)


def site_header(key: bytes, site: str, peer: Peer) -> bytes:
    """Return the header for a client's connection that ``site`` passes on."""
    relayed = Relayed(site=site, loopback=peer.loopback, certificate_name=peer.certificate_name)
    via = msgspec.structs.replace(peer.via, relayed=relayed, scheme="mqtt", source=None)
    family, addresses = _addresses(peer)
    value = secrets.token_bytes(_NONCE) + msgspec.msgpack.encode(via)
    size = len(addresses) + 3 + _MAC + len(value)
    begun = SIGNATURE + bytes((0x21, family)) + size.to_bytes(2) + addresses
    begun += bytes((_EXTENSION,)) + (_MAC + len(value)).to_bytes(2)
    return begun + hmac.digest(key, begun + value, hashlib.sha256) + value


def _addresses(peer: Peer) -> tuple[int, bytes]:
    """Return the family and the bytes of a client's address; the unspecified family for one without an IP address."""
    try:
        host, port = ipaddress.ip_address(peer.host.partition("%")[0]), int(peer.address.rpartition(":")[2])
    except ValueError:
        return _UNSPECIFIED, b""
    family = _TCP4 if host.version == 4 else _TCP6
    return family, host.packed * 2 + port.to_bytes(2) * 2


async def begins_with_header(accepted: socket.socket) -> bool:
    """Wait for the first byte of a connection, and return whether it begins a header. The byte stays in the socket."""
    while True:
        try:
            return accepted.recv(1, socket.MSG_PEEK) == SIGNATURE[:1]
        except (BlockingIOError, InterruptedError):
            await _readable(accepted)


async def _readable(accepted: socket.socket) -> None:
    """Wait until a socket has received something."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, received.set)
    try:
        await received.wait()
    finally:
        loop.remove_reader(accepted)


async def read_site_header(accepted: socket.socket, key: bytes) -> Via:
    """Read a header, and return the properties of the client's connection, with its address as the source.

    Raises `ProxyHeaderError` for an invalid header, or one that no site of the cluster has made, and OSError.
    """
    return _verified(*await read_binary(accepted), key)


def _verified(head: bytes, rest: bytes, source: Source | None, key: bytes) -> Via:
    at = {_TCP4: 12, _TCP6: 36}.get(head[13], 0)
    value = rest[at + 3 :]
    mac, value = value[:_MAC], value[_MAC:]
    if rest[at : at + 1] != bytes((_EXTENSION,)) or len(mac) + len(value) != int.from_bytes(rest[at + 1 : at + 3]):
        raise ProxyHeaderError("the header has no extension of a site")
    if not hmac.compare_digest(mac, hmac.digest(key, head + rest[: at + 3] + value, hashlib.sha256)):
        raise ProxyHeaderError("the header is not from a site of this cluster")
    try:
        via = _decoder.decode(value[_NONCE:])
    except msgspec.DecodeError as bad:
        raise ProxyHeaderError(f"the site's extension is invalid: {bad}") from bad
    return msgspec.structs.replace(via, source=source)


class SiteEdge(asyncio.Protocol):
    """A connection of a listener with TLS, until its first bytes show whether a client or a site has connected.

    A site sends its header within TLS. Then the protocol that ``make`` returns serves the connection.

    make:     returns the protocol for a client, or for a connection that a site passes on.
    key:      the key with which the cluster's sites sign headers.
    patience: the time limit in seconds for the first bytes, and for the header.
    refused:  is called with the reason if a header is refused. Then the connection ends.
    """

    def __init__(
        self,
        make: Callable[[Via | None], asyncio.Protocol],
        key: bytes,
        patience: float,
        refused: Callable[[str], object],
    ) -> None:
        self._make, self._key, self._patience, self._refused = make, key, patience, refused
        self._received = b""
        self._transport: asyncio.Transport  # set by `connection_made`
        self._timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first bytes."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Look at the first bytes; once they are known, let another protocol serve the connection."""
        self._received += data
        received = self._received
        if received[:1] != SIGNATURE[:1]:
            self._serve(None, received)
            return
        try:
            header = split_binary(received)
            if header is not None:
                head, rest, source = header
                self._serve(_verified(head, rest, source, self._key), received[len(head) + len(rest) :])
        except ProxyHeaderError as bad:
            self._refused(str(bad))
            self._transport.abort()

    def _serve(self, via: Via | None, rest: bytes) -> None:
        self._timer.cancel()
        inner = self._make(via)
        self._transport.set_protocol(inner)
        inner.connection_made(self._transport)
        if rest:
            inner.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit."""
        self._timer.cancel()
