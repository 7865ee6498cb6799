"""The header with which a proxy, or a site of a cluster, begins a connection to name the client: the PROXY protocol.

The grammar is that of HAProxy (https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt):

* version 1 is a line of at most 107 bytes that ends with CR and LF: ``PROXY TCP4 192.0.2.1 192.0.2.7 50000 1883``, with
  the client's address and port before the proxy's, or ``PROXY UNKNOWN``;
* version 2 is a signature of 12 bytes, version and command, family and transport, a length of 16 bits, and as many
  bytes: both addresses and ports, then extensions (TLV), which are skipped.

Nothing after the header is read, so that the TLS handshake or the first packet stays in the socket.

A site begins a client's connection that it passes on to another site with a header of version 2. The client's address
and port are both its source and its destination. Its only extension (TLV), of the type `_EXTENSION`, is an HMAC of
SHA-256 with the cluster's key over all that precedes and follows it in the header, then 16 random bytes, then a `Via`
as MessagePack. A client of MQTT or of TLS never begins with the header's first byte, so that one listener serves
clients and sites. At a listener with TLS the header is within TLS, at others it precedes everything else.

Sites trust the HMAC, because only the cluster's sites know the key. The random bytes differ in each header, so that
equal addresses have different HMACs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from .peer import Peer, Relayed, Via

__all__ = [
    "SIGNATURE",
    "Network",
    "ProxyHeaderError",
    "SiteEdge",
    "Source",
    "begins_with_header",
    "is_proxy",
    "parse_binary",
    "parse_line",
    "read_binary",
    "read_header",
    "read_site_header",
    "site_header",
]

Source = tuple[str, int]
"""The address and the port of a client."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
"""The first bytes of a header of version 2."""
_LONGEST_LINE = 107
"""Most bytes of a header of version 1, with its line end."""
_LONGEST_REST = 4_096
"""Most bytes of a header of version 2 after its length; extensions of proxies have some hundred bytes."""
_ADDRESSES = {0x11: 4, 0x21: 16}
"""The bytes of an address, for TCP over IPv4 and over IPv6."""
_WITHOUT = frozenset((0x00, 0x31))
"""Families whose client has no IP address: unspecified, and stream sockets of Unix."""
_EXTENSION = 0xE7
"""One of the types that the protocol leaves to programs (PP2_TYPE_MIN_CUSTOM to PP2_TYPE_MAX_CUSTOM)."""
_MAC, _NONCE = 32, 16
_TCP4, _TCP6, _UNSPECIFIED = 0x11, 0x21, 0x00

_decoder = msgspec.msgpack.Decoder(Via)


class ProxyHeaderError(ValueError):
    """A connection did not begin with a valid header."""


def is_proxy(host: str, networks: Sequence[Network]) -> bool:
    """Return whether a host's address is in one of the networks."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in networks)


def parse_line(line: bytes) -> Source | None:
    """Return the client of a header of version 1, None if it names none. Raises `ProxyHeaderError`.

    line: the header with its line end.
    """
    if len(line) > _LONGEST_LINE or not line.endswith(b"\r\n"):
        raise ProxyHeaderError("the line has no end")
    kind, *rest = line[:-2].removeprefix(b"PROXY ").split(b" ")
    if not line.startswith(b"PROXY "):
        raise ProxyHeaderError("there is no header")
    if kind == b"UNKNOWN":
        return None
    if kind not in (b"TCP4", b"TCP6") or len(rest) != 4:
        raise ProxyHeaderError("the line is not 'PROXY TCP4 ADDRESS ADDRESS PORT PORT'")
    version = ipaddress.IPv4Address if kind == b"TCP4" else ipaddress.IPv6Address
    try:
        client, _ = (str(version(one.decode("ascii"))) for one in rest[:2])
        port, _ = map(_port, rest[2:])
    except ValueError as bad:
        raise ProxyHeaderError(f"an address or a port is invalid: {bad}") from bad
    return client, port


def _port(text: bytes) -> int:
    if not text.isdigit() or len(text) > 5 or (text[:1] == b"0" and text != b"0") or int(text) > 0xFFFF:
        raise ValueError(f"{text!r} is no port")
    return int(text)


def parse_binary(head: bytes, rest: bytes) -> Source | None:
    """Return the client of a header of version 2, None if it names none. Raises `ProxyHeaderError`.

    head: the first 16 bytes.
    rest: the bytes after them, as many as `head` says.
    """
    version, command = head[12] >> 4, head[12] & 15
    if version != 2 or command > 1:
        raise ProxyHeaderError(f"version {version} and command {command} are unknown")
    family = head[13]
    if command == 0 or family in _WITHOUT:  # LOCAL: the proxy itself, such as for a health check
        return None
    size = _ADDRESSES.get(family)
    if size is None:
        raise ProxyHeaderError(f"address family {family:#04x} is not TCP over IPv4 or IPv6")
    if len(rest) < 2 * size + 4:
        raise ProxyHeaderError("the addresses are incomplete")
    return str(ipaddress.ip_address(rest[:size])), int.from_bytes(rest[2 * size : 2 * size + 2])


async def read_header(accepted: socket.socket) -> Source | None:
    """Read the header from a connection; return the client, None if the header names none.

    Reads no byte after the header, and at most 4,112 bytes. The caller limits the time. Raises `ProxyHeaderError`, and
    OSError.
    """
    data = await _exactly(accepted, len(SIGNATURE))
    if data != SIGNATURE:
        return parse_line(await _line(accepted, data))
    return (await _binary(accepted, data))[2]


async def read_binary(accepted: socket.socket) -> tuple[bytes, bytes, Source | None]:
    """Read a header of version 2; return its first 16 bytes, the bytes after them, and the client, as `read_header`."""
    data = await _exactly(accepted, len(SIGNATURE))
    if data != SIGNATURE:
        raise ProxyHeaderError("there is no header")
    return await _binary(accepted, data)


def split_binary(received: bytes) -> tuple[bytes, bytes, Source | None] | None:
    """Parse a header of version 2 at the start of the received bytes, and return the result of `read_binary`.

    Returns None if the header is incomplete. Raises `ProxyHeaderError` for other bytes than a header, even before
    ``received`` is as long as a header.
    """
    if received[: len(SIGNATURE)] != SIGNATURE[: len(received)]:
        raise ProxyHeaderError("there is no header")
    head = received[: len(SIGNATURE) + 4]
    if len(head) < len(SIGNATURE) + 4:
        return None
    rest = received[len(head) :][: _size_of_rest(head)]
    return (head, rest, parse_binary(head, rest)) if len(rest) == _size_of_rest(head) else None


def _size_of_rest(head: bytes) -> int:
    """Return the number of bytes after the first 16 of a header. Raises `ProxyHeaderError` if they are too many."""
    size = int.from_bytes(head[14:16])
    if size > _LONGEST_REST:
        raise ProxyHeaderError(f"the header has {size:,} bytes, more than {_LONGEST_REST:,}")
    return size


async def _binary(accepted: socket.socket, signature: bytes) -> tuple[bytes, bytes, Source | None]:
    head = signature + await _exactly(accepted, 4)
    rest = await _exactly(accepted, _size_of_rest(head))
    return head, rest, parse_binary(head, rest)


async def _exactly(accepted: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        some = await loop.sock_recv(accepted, size - len(data))
        if not some:
            raise ProxyHeaderError("the connection ended within the header")
        data += some
    return data


async def _line(accepted: socket.socket, begun: bytes) -> bytes:
    """Read the rest of a line, after looking at the received bytes without taking them from the socket."""
    data = begun
    if not data.startswith(b"PROXY ") or b"\n" in data:
        raise ProxyHeaderError("there is no header")
    while not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
        data += await _exactly(accepted, 1)
        try:
            ahead = accepted.recv(_LONGEST_LINE - len(data), socket.MSG_PEEK) if data[-1:] != b"\n" else b""
        except BlockingIOError:
            continue
        data += accepted.recv(ahead.find(b"\n") + 1 or len(ahead)) if ahead else b""
    return data


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
