"""The PROXY protocol: the header names the client, and nothing but a valid header of a known proxy is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.server.config.load import read_settings
from topicstore.server.config.model import SettingsError
from topicstore.server.listeners.proxy_header import (
    ProxyHeaderError,
    Source,
    is_proxy,
    parse_binary,
    parse_line,
    read_header,
)
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import serving

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
PORTS = st.integers(0, 0xFFFF)
HOSTS = st.ip_addresses()


def line(client: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> bytes:
    return f"PROXY TCP{client.version} {client} {client} {port} 1883\r\n".encode()


def binary(client: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, extension: bytes = b"") -> bytes:
    rest = client.packed * 2 + port.to_bytes(2) + (1883).to_bytes(2) + extension
    return SIGNATURE + bytes([0x21, 0x11 if client.version == 4 else 0x21]) + len(rest).to_bytes(2) + rest


HEADERS = st.one_of(
    st.builds(lambda host, port: (line(host, port), (str(host), port)), HOSTS, PORTS),
    st.builds(
        lambda host, port, more: (binary(host, port, more), (str(host), port)), HOSTS, PORTS, st.binary(max_size=300)
    ),
    st.builds(lambda rest: (b"PROXY UNKNOWN" + rest + b"\r\n", None), st.sampled_from([b"", b" ::1 ::1 1 2"])),
    st.builds(lambda rest: (SIGNATURE + b"\x20\x00" + len(rest).to_bytes(2) + rest, None), st.binary(max_size=100)),
)


async def fed(pieces: list[bytes]) -> tuple[Source | ProxyHeaderError | None, bytes]:
    """Send pieces and the end of the connection; return the client or the error, and the bytes left in the socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reading = asyncio.ensure_future(read_header(ours))
        for piece in pieces:
            theirs.sendall(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        theirs.shutdown(socket.SHUT_WR)
        found: Source | ProxyHeaderError | None
        try:
            found = await reading
        except ProxyHeaderError as bad:
            found = bad
        left = b""
        while some := ours.recv(1 << 16):
            left += some
        return found, left


@given(HEADERS, st.binary(max_size=50), st.lists(st.integers(0, 400), max_size=6))
def test_a_header_names_the_client(header: tuple[bytes, Source | None], after: bytes, cuts: list[int]) -> None:
    """A header of either version names the client, however it is split; the bytes after it stay in the socket."""
    data = header[0] + after
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[first:last] for first, last in pairwise(edges)]
    assert (header[1], after) == asyncio.run(fed(pieces))


@given(HEADERS, st.data())
def test_a_part_of_a_header_is_no_header(header: tuple[bytes, Source | None], data: st.DataObject) -> None:
    """A header that ends early is refused."""
    size = data.draw(st.integers(0, len(header[0]) - 1))
    found, _ = asyncio.run(fed([header[0][:size]]))
    assert isinstance(found, ProxyHeaderError)


@given(st.one_of(st.binary(max_size=120), st.binary(max_size=120).map(lambda rest: b"PROXY TCP4 " + rest + b"\r\n")))
def test_other_bytes_are_refused(data: bytes) -> None:
    """Any bytes in place of a text header name a valid client or none, or raise `ProxyHeaderError`."""
    with contextlib.suppress(ProxyHeaderError):
        found = parse_line(data)
        assert found is None or (ipaddress.ip_address(found[0]) and 0 <= found[1] <= 0xFFFF)


@given(st.binary(min_size=4, max_size=4), st.binary(max_size=60))
def test_other_binary_headers_are_refused(head: bytes, rest: bytes) -> None:
    """Any bytes after a binary header's signature name a valid client or none, or raise `ProxyHeaderError`."""
    with contextlib.suppress(ProxyHeaderError):
        found = parse_binary(SIGNATURE + head, rest)
        assert found is None or (ipaddress.ip_address(found[0]) and 0 <= found[1] <= 0xFFFF)


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x0e\x00\x04MQTT\x04\x02\x00<\x00\x00",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n" + bytes(100),
        b"PROXY TCP4 192.0.2.1 192.0.2.2 01 2\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n",
        b"PROXY TCP4 ::1 ::1 1 2\r\n",
        b"PROXY TCP6 192.0.2.1 192.0.2.2 1 2\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n",
        b"PROXY UNKNOWN " + b"x" * 100 + b"\r\n",
        b"PROXY " + b"x" * 1_000,
        SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
        SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12),
        SIGNATURE + b"\x21\x12\x00\x0c" + bytes(12),
        SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11),
        SIGNATURE + b"\x21\x11\xff\xff" + bytes(0xFFFF),
    ],
)
def test_a_malformed_header_is_refused(data: bytes) -> None:
    """A malformed header, a header that is too long, and a connection without one are refused with few bytes read."""
    found, left = asyncio.run(fed([data]))
    assert isinstance(found, ProxyHeaderError)
    assert len(data) - len(left) <= 107


def test_proxies_are_known_by_their_networks() -> None:
    """A proxy's address is compared with networks of its family; an IPv4 address mapped into IPv6 counts as IPv4."""
    networks = [ipaddress.ip_network(text) for text in ("10.1.0.0/16", "fd00::/8")]
    assert all(is_proxy(host, networks) for host in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"))
    assert not any(is_proxy(host, networks) for host in ("10.2.0.1", "::1", "::ffff:10.2.0.1"))


def test_a_wrong_network_is_an_error(tmp_path: Path) -> None:
    """A setting ``proxies`` that is no network is an error that names it."""
    file = tmp_path / "server.toml"
    file.write_text('[listeners.mqtt]\nlisten = "127.0.0.1:0"\nproxies = ["10.1.0.1/16"]\n')
    with pytest.raises(SettingsError, match=r"10\.1\.0\.1/16"):
        read_settings(file)


SETTINGS = """
[listeners.plain]
listen = "127.0.0.1:0"
proxies = ["127.0.0.0/8"]
[listeners.other]
listen = "127.0.0.1:0"
proxies = ["192.0.2.0/24"]
[listeners.tls]
listen = "127.0.0.1:0"
proxies = ["127.0.0.1"]
[listeners.tls.tls]
certificate = "{}"
key = "{}"
[limits]
connect_timeout = "300ms"
[authentication]
anonymous = "always"
[[authorization.rules]]
permission = "allow"
topics = ["#"]
"""


def test_a_server_knows_clients_behind_a_proxy(tmp_path: Path, authority: Authority) -> None:
    """Behind a proxy, with TLS or without, the server logs the client's address; other connections are closed."""
    certificate, key = authority.sign("server", "server")
    config = tmp_path / "server.toml"
    config.write_text(SETTINGS.format(certificate, key))
    with serving(tmp_path / "db", "--config", str(config), listen=False) as server:
        plain, other = (int(address.rpartition(":")[2]) for address in server.ready["mqtt"])
        [tls] = (int(address.rpartition(":")[2]) for address in server.ready["mqtts"])
        with RawClient(plain) as client:
            client.socket.sendall(line(ipaddress.ip_address("198.51.100.7"), 5_000))
            assert client.connect("one").reason == 0
        with RawClient(tls) as client:
            client.socket.sendall(binary(ipaddress.ip_address("2001:db8::7"), 6_000, b"\x04\x00\x01x"))
            context = authority.trusting()
            context.check_hostname = False
            client.socket = context.wrap_socket(client.socket)
            assert client.connect("two").reason == 0
        for port in (plain, other, tls):
            with RawClient(port) as client:
                client.send(wire.connect("three"))
                assert client.ended() is None
        with RawClient(plain) as client:  # a client that sends nothing is closed in time
            assert client.ended() is None
        with RawClient(other) as client:
            client.socket.sendall(line(ipaddress.ip_address("198.51.100.7"), 5_000))
            client.send(wire.connect("three"))
            assert client.ended() is None
        assert 0 == server.stop()
        log = server.log()
    events = [json.loads(text) for text in log.splitlines()]
    connected = [(one["client_id"], one["address"]) for one in events if one["event"] == "client connected"]
    assert [("one", "198.51.100.7:5000"), ("two", "[2001:db8::7]:6000")] == connected
    refused = [one["reason"] for one in events if "without a proxy's header" in one["event"]]
    no_proxy = "it is not from one of the listener's proxies"
    assert sorted(["there is no header"] * 2 + [no_proxy] * 2 + ["there was no header in time"]) == sorted(refused)
