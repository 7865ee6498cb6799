"""Listeners: connections over TCP, TLS and WebSocket look the same to a protocol, with asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from topicstore.server import logs
from topicstore.server.config.model import Limits, ListenerSettings, ServerSettings, TlsSettings
from topicstore.server.config.units import Address, Duration, Size
from topicstore.server.listeners import (
    Listener,
    ListenError,
    Peer,
    Replacement,
    Via,
    listen,
    peer_of,
)
from topicstore_conformance.mqtt.certificates import Authority
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Origin, Subprotocol

pytestmark = pytest.mark.anyio
MQTT = [Subprotocol("mqtt")]


class Echo(asyncio.Protocol):
    """A connection that sends back the bytes that it receives, and records its events."""

    def __init__(self, via: Via, made: asyncio.Queue[Echo]) -> None:
        self.via, self.made = via, made
        self.peer: Peer
        self.transport: asyncio.Transport
        self.got = bytearray()
        self.told: list[str] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.peer = peer_of(transport, self.via)
        self.made.put_nowait(self)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if not self.silent:
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Echoes:
    """Listeners whose connections echo."""

    def __init__(self) -> None:
        self.made: asyncio.Queue[Echo] = asyncio.Queue()
        self.listeners: list[Listener] = []

    def connect(self, via: Via) -> Echo:
        """Create the protocol of a new connection."""
        return Echo(via, self.made)

    async def listen(
        self,
        *,
        name: str = "here",
        protocol: str = "mqtt",
        tls: TlsSettings | None = None,
        limits: Limits | None = None,
        **more: Any,
    ) -> int:
        """Open a listener on loopback, and return its port."""
        settings = ListenerSettings(listen=Address("127.0.0.1:0"), protocol=protocol, tls=tls, **more)  # type: ignore[arg-type]
        listener = await listen(name, settings, limits if limits is not None else Limits(), self.connect, 1 << 20)
        self.listeners.append(listener)
        return Address(listener.addresses[0]).port


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The event loop that a test runs on."""
    if request.param:
        pytest.importorskip("uvloop", reason='needs uvloop: pip install "topicstore[server]"')
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def echoes() -> AsyncIterator[Echoes]:
    """The listeners of a test, which are stopped at its end."""
    found = Echoes()
    yield found
    for listener in found.listeners:
        listener.stop()


@contextlib.asynccontextmanager
async def stream(
    port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def echoed(port: int, context: ssl.SSLContext | None = None, data: bytes = b"hello") -> bytes:
    """Send data over a new connection, and return the bytes that come back."""
    async with stream(port, context) as (reader, writer):
        writer.write(data)
        return await reader.readexactly(len(data))


# --- TCP ---


async def test_a_connection_knows_where_it_comes_from(echoes: Echoes) -> None:
    """A connection knows its listener, its client's address, and that the client is on this machine."""
    port = await echoes.listen(name="hall")
    async with stream(port) as (reader, writer):
        writer.write(b"hello")
        assert b"hello" == await reader.readexactly(5)
        echo = await echoes.made.get()
        mine = writer.get_extra_info("sockname")
        via = Via(name="hall", scheme="mqtt", certificate_users=False)
        assert Peer(via=via, address=f"127.0.0.1:{mine[1]}", loopback=True, certificate_name=None) == echo.peer
    assert await echo.lost is None


async def test_behind_a_proxy_nobody_is_on_this_machine(echoes: Echoes) -> None:
    """With ``behind_proxy``, no connection counts as one from this machine, because TCP doesn't show the proxy."""
    port = await echoes.listen(behind_proxy=True)
    async with stream(port):
        assert not (await echoes.made.get()).peer.loopback


async def test_a_stopped_listener_accepts_no_more_and_keeps_what_is_there(echoes: Echoes) -> None:
    """A stopped listener accepts no connection and keeps the existing ones."""
    port = await echoes.listen()
    async with stream(port) as (reader, writer):
        await echoes.made.get()
        echoes.listeners[0].stop()
        assert [] == echoes.listeners[0].addresses
        await asyncio.sleep(0)  # the event loop closes the socket in its next iteration
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"still")
        assert b"still" == await reader.readexactly(5)


# --- TLS ---


def tls(files: tuple[Path, Path], **more: Any) -> TlsSettings:
    return TlsSettings(certificate=files[0], key=files[1], **more)


async def test_tls_with_a_certificate(echoes: Echoes, authority: Authority) -> None:
    """TLS accepts a client that trusts the authority, and rejects one without TLS.

    A client that doesn't trust the authority fails to connect.
    """
    port = await echoes.listen(tls=tls(authority.sign("server", "server")))
    assert b"hello" == await echoed(port, authority.trusting())
    assert "mqtts" == (await echoes.made.get()).via.scheme
    with pytest.raises(ssl.SSLCertVerificationError):
        await echoed(port, ssl.create_default_context())
    async with stream(port) as (reader, writer):
        writer.write(b"\x10\x10 this is no TLS")
        with contextlib.suppress(OSError):
            assert b"\x10" != (await reader.read(100))[:1]


async def test_the_lowest_version_can_be_settled(echoes: Echoes, authority: Authority) -> None:
    """The lowest TLS version can be set: a client that knows only TLS 1.2 is rejected where 1.3 is required."""
    files = authority.sign("server", "server")
    old = authority.trusting()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert b"hello" == await echoed(await echoes.listen(tls=tls(files)), old)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await echoed(await echoes.listen(tls=tls(files, minimum_version="1.3")), old)


@pytest.mark.parametrize("protocol", ["mqtt", "websocket"])
async def test_client_certificates(echoes: Echoes, authority: Authority, protocol: str) -> None:
    """A client certificate's common name becomes the user name if settings say so.

    Certificates of another authority are rejected.
    """
    files = authority.sign("server", "server")
    (authority.folder / "elsewhere").mkdir()
    stranger = Authority(authority.folder / "elsewhere")

    async def named(port: int, *own: tuple[Path, Path]) -> str | None:
        context = authority.trusting(*own)
        if protocol == "websocket":
            async with websocket(f"wss://127.0.0.1:{port}/mqtt", ssl=context, subprotocols=MQTT) as client:
                await client.send(b"hello")
                assert b"hello" == await client.recv()
        else:
            assert b"hello" == await echoed(port, context)
        return (await echoes.made.get()).peer.certificate_name

    wanted = {"client_authorities": authority.path, "user_from_certificate": True}
    optional = await echoes.listen(protocol=protocol, tls=tls(files, client_certificates="optional", **wanted))
    assert await named(optional) is None
    assert "bus-7" == await named(optional, authority.sign("bus", "bus-7"))
    assert await named(optional, authority.sign("none")) is None
    required = await echoes.listen(protocol=protocol, tls=tls(files, client_certificates="required", **wanted))
    assert "bus-9" == await named(required, authority.sign("bus", "bus-9"))
    for own in ((), (stranger.sign("other", "bus-7"),)):
        with pytest.raises((OSError, EOFError, WebSocketException)):
            await named(required, *own)
    unused = await echoes.listen(
        protocol=protocol, tls=tls(files, client_certificates="required", client_authorities=authority.path)
    )
    assert await named(unused, authority.sign("bus", "bus-9")) is None


def test_a_certificate_with_two_names_names_nobody() -> None:
    names = tuple((("commonName", name),) for name in ("bus-7", "bus-8"))
    for subject, found in ((names[:1], "bus-7"), (names, None)):
        transport = asyncio.BaseTransport({"peername": ("127.0.0.1", 5), "peercert": {"subject": subject}})
        via = Via(name="here", scheme="mqtts", certificate_users=True)
        assert found == peer_of(transport, via).certificate_name


def subject(transport: asyncio.StreamWriter) -> str:
    """Return the common name of the server's certificate."""
    return str(transport.get_extra_info("peercert")["subject"][-1][0][1])


async def test_certificates_are_read_again_while_it_serves(echoes: Echoes, authority: Authority) -> None:
    """Reloading certificates keeps connections and the port; new connections get the new certificate."""
    files = authority.sign("server", "before")
    port = await echoes.listen(tls=tls(files))
    async with stream(port, authority.trusting()) as (reader, writer):
        assert "before" == subject(writer)
        assert files == authority.sign("server", "after")
        await echoes.listeners[0].reload()
        async with stream(port, authority.trusting()) as (_, newer):
            assert "after" == subject(newer)
        writer.write(b"still")
        assert b"still" == await reader.readexactly(5)
        files[0].write_text("nonsense")
        with pytest.raises(ListenError, match=r"the TLS files .*server\.pem, .*server\.key can't be used"):
            await echoes.listeners[0].reload()
        async with stream(port, authority.trusting()) as (_, newer):
            assert "after" == subject(newer)
        assert [f"127.0.0.1:{port}"] == echoes.listeners[0].addresses


async def test_nobody_is_refused_while_certificates_are_read(echoes: Echoes, authority: Authority) -> None:
    """No connection is refused during a reload, because the sockets stay bound."""
    files = authority.sign("server", "server")
    port = await echoes.listen(tls=tls(files))
    context = authority.trusting()
    for _ in range(5):
        clients = [asyncio.create_task(echoed(port, context)) for _ in range(4)]
        await echoes.listeners[0].reload()
        assert [b"hello"] * 4 == await asyncio.gather(*clients)


@pytest.mark.parametrize("stop_first", [False, True])
async def test_a_listener_that_is_stopped_while_certificates_are_read_accepts_no_more(
    echoes: Echoes, authority: Authority, stop_first: bool
) -> None:
    """A listener that is stopped during a reload, or during two concurrent reloads, leaves no open socket."""
    port = await echoes.listen(tls=tls(authority.sign("server", "server")))
    listener = echoes.listeners[0]
    reloading = [asyncio.create_task(listener.reload()) for _ in range(2)]
    await asyncio.sleep(0)  # the first reload has begun
    if stop_first:
        listener.stop()
    await asyncio.gather(*reloading)
    listener.stop()
    assert [] == listener.addresses
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_files_that_are_no_certificate_are_an_error(echoes: Echoes, authority: Authority) -> None:
    """Missing or unusable TLS files are an error that names them; HTTP tests cover keys that don't match."""
    _, key = authority.sign("one", "one")
    for files, reason in (
        ((authority.folder / "nothing.pem", key), r"there is no TLS file .*nothing\.pem$"),
        ((authority.folder / ("x" * 300), key), "the TLS files .* can't be used: .*File name too long"),
    ):
        with pytest.raises(ListenError, match=reason):
            await echoes.listen(tls=tls(files))


async def test_a_client_that_does_not_finish_its_handshake_is_cut_off(echoes: Echoes, authority: Authority) -> None:
    """A client that doesn't finish its TLS or WebSocket handshake is cut off after the connect timeout.

    No protocol is created for it.
    """
    limits = Limits(connect_timeout=Duration(0.05))
    for port in (
        await echoes.listen(tls=tls(authority.sign("server", "server")), limits=limits),
        await echoes.listen(protocol="websocket", limits=limits),
    ):
        async with stream(port) as (reader, writer):
            writer.write(b"\x16")
            with contextlib.suppress(ConnectionError):
                assert b"" == await reader.read()
    assert echoes.made.empty()


async def test_a_handshake_that_fails_is_logged(
    echoes: Echoes, authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed TLS handshake is logged with listener, address and reason.

    If many fail, only some are logged, and a later line says how many were omitted.
    """
    # one interval of the log's rate limit lasts the whole test, however slow this machine is
    monkeypatch.setattr(logs, "_SECONDS", float("inf"))
    port = await echoes.listen(name="hall", tls=tls(authority.sign("server", "server")))
    caplog.set_level(logging.INFO, "topicstore.server")

    def lines() -> list[dict[str, Any]]:
        return [getattr(one, "fields", {}) for one in caplog.records if "TLS handshake failed" in one.getMessage()]

    addresses = []
    for _ in range(logs._LINES + 5):
        async with stream(port) as (reader, writer):
            addresses.append("{}:{}".format(*writer.get_extra_info("sockname")))
            writer.write(b"\x10 no TLS at all, and long enough to be seen as that")
            with contextlib.suppress(ConnectionError):
                assert b"" == await reader.read()
    assert await echoed(port, authority.trusting()) == b"hello"
    told = lines()
    assert addresses[: len(told)] == [line["address"] for line in told]
    assert {"hall"} == {line["listener"] for line in told}
    assert len(told) == logs._LINES
    assert all("SSL" in line["reason"] for line in told)
    monkeypatch.setattr(logs, "_SECONDS", 0.0)  # the interval of the rate limit ends
    echoes.listeners[0]._servers[0]._failed.note("127.0.0.1", {})
    assert lines()[-1]["omitted"] == 5


# --- WebSocket ---


async def test_a_websocket_is_a_stream_of_bytes(echoes: Echoes) -> None:
    """A WebSocket is a stream of bytes: packets may be split across frames [MQTT-6.0.0-2].

    The subprotocol is mqtt [MQTT-6.0.0-4].
    """
    port = await echoes.listen(protocol="websocket")
    async with websocket(f"ws://127.0.0.1:{port}/mqtt", subprotocols=MQTT) as client:
        assert "mqtt" == client.subprotocol
        echo = await echoes.made.get()
        assert ("ws", True) == (echo.via.scheme, echo.peer.loopback)
        got = b""
        await client.send(b"one")
        await client.send([b"t", b"w", b"o"])  # fragments of one message
        await client.send(b"")
        while len(got) < 6:
            part = await client.recv()
            assert isinstance(part, bytes)
            got += part
        assert b"onetwo" == got
        assert b"onetwo" == echo.got
        await (await client.ping())
        echo.transport.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
        assert b"abc" == await client.recv()
    assert await echo.lost is None
    assert echo.transport.is_closing()
    echo.transport.write(b"too late")


async def test_the_server_closes_a_websocket_in_order(echoes: Echoes) -> None:
    """When the server closes a WebSocket, written data arrives first, then the close frame."""
    port = await echoes.listen(protocol="websocket")
    async with websocket(f"ws://127.0.0.1:{port}/mqtt", subprotocols=MQTT) as client:
        echo = await echoes.made.get()
        echo.transport.write(b"last")
        echo.transport.close()
        echo.transport.close()
        echo.transport.write(b"nothing")
        assert echo.transport.is_closing()
        assert b"last" == await client.recv()
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert 1_000 == client.close_code
        assert await echo.lost is None


async def test_text_frames_end_a_websocket(echoes: Echoes) -> None:
    """A text frame closes a WebSocket [MQTT-6.0.0-1]."""
    port = await echoes.listen(protocol="websocket")
    async with websocket(f"ws://127.0.0.1:{port}/mqtt", subprotocols=MQTT) as client:
        echo = await echoes.made.get()
        await client.send("hello")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert 1_003 == client.close_code
        await echo.lost
        assert b"" == echo.got


@pytest.mark.parametrize(
    ("path", "protocols", "status"),
    [("/mqtt", [], 400), ("/mqtt", ["chat"], 400), ("/", MQTT, 404), ("/mqtt/x", MQTT, 404), ("/mqtt?a=b", MQTT, 101)],
)
async def test_a_handshake_must_ask_for_mqtt(echoes: Echoes, path: str, protocols: list[Any], status: int) -> None:
    """A WebSocket handshake must use the listener's path and the subprotocol mqtt [MQTT-6.0.0-3]."""
    port = await echoes.listen(protocol="websocket")
    found = 101
    try:
        async with websocket(f"ws://127.0.0.1:{port}{path}", subprotocols=protocols or None):
            pass
    except InvalidStatus as refused:
        found = refused.response.status_code
    assert status == found
    assert echoes.made.empty() is (status != 101)


@pytest.mark.parametrize(
    ("headers", "loopback"),
    [
        ({}, True),
        ({"Origin": "http://localhost:5173"}, True),
        ({"Origin": "http://127.0.0.1"}, True),
        ({"Origin": "https://elsewhere.example"}, False),
        ({"Origin": "http://localhost.elsewhere.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[bad"}, False),
        ({"X-Forwarded-For": "192.0.2.1"}, False),
        ({"Forwarded": "for=192.0.2.1"}, False),
    ],
)
async def test_a_page_or_proxy_on_this_machine_does_not_count_as_this_machine(
    echoes: Echoes, headers: dict[str, str], loopback: bool
) -> None:
    """A WebSocket of a foreign page or of a proxy doesn't count as a connection from this machine.

    A page or a proxy on this machine must not pass on permissions that only this machine has.
    """
    port = await echoes.listen(protocol="websocket")
    uri = f"ws://127.0.0.1:{port}/mqtt"
    async with websocket(uri, subprotocols=MQTT, additional_headers=headers, proxy=None):
        assert (await echoes.made.get()).peer.loopback is loopback


async def test_origins_can_be_settled(echoes: Echoes, caplog: pytest.LogCaptureFixture) -> None:
    """If allowed origins are set, pages of other origins are refused and logged; programs without an origin aren't."""
    caplog.set_level(logging.INFO, "topicstore.server")
    port = await echoes.listen(protocol="websocket", origins=("https://ours.example",))
    uri = f"ws://127.0.0.1:{port}/mqtt"
    for origin in (Origin("https://ours.example"), None):
        async with websocket(uri, subprotocols=MQTT, origin=origin):
            await echoes.made.get()
    with pytest.raises(InvalidStatus, match="403"):
        await websocket(uri, subprotocols=MQTT, origin=Origin("https://theirs.example"))
    while not caplog.records:
        await asyncio.sleep(0.01)
    [logged] = [record.__dict__["fields"] for record in caplog.records]
    assert "the WebSocket handshake was refused with 403: Pages of this origin may not connect." == logged["reason"]
    assert "here" == logged["listener"]
    assert logged["bytes_in"] > 0


async def test_a_message_larger_than_a_packet_may_be_ends_a_websocket(echoes: Echoes) -> None:
    """A WebSocket message that exceeds the limit closes the connection before it is in memory.

    A message of up to a megabyte is accepted, because it may hold many small packets.
    """
    port = await echoes.listen(protocol="websocket", limits=Limits(packet_size=Size(10)))
    async with websocket(f"ws://127.0.0.1:{port}/mqtt", subprotocols=MQTT, max_size=None) as client:
        echo = await echoes.made.get()
        await client.send(bytes(1 << 20))
        assert (1 << 20) == len(await client.recv())
        with contextlib.suppress(ConnectionClosed):
            await client.send(bytes((1 << 20) + 1))
        with pytest.raises(ConnectionClosed):
            await client.recv()
        await echo.lost
        assert (1 << 20) == len(echo.got)


@pytest.mark.parametrize("protocol", ["mqtt", "websocket"])
async def test_a_slow_reader_pauses_writing_and_a_paused_connection_is_not_read(echoes: Echoes, protocol: str) -> None:
    """If a client reads slowly, writing to it pauses; the server doesn't read from a paused connection.

    So memory stays limited.
    """
    port = await echoes.listen(protocol=protocol)
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        if protocol == "websocket":
            await loop.sock_sendall(client, HANDSHAKE)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                answer += await loop.sock_recv(client, 1)
            assert answer.startswith(b"HTTP/1.1 101 ")
        echo = await echoes.made.get()
        echo.silent = True
        echo.transport.set_write_buffer_limits(high=1_000, low=100)
        while "pause" not in echo.told:
            echo.transport.write(bytes(100_000))
        assert echo.transport.get_write_buffer_size() > 0
        while "resume" not in echo.told:
            assert await loop.sock_recv(client, 1 << 20)
        echo.transport.pause_reading()
        assert not echo.transport.is_reading()
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += client.send(masked(bytes(100_000)) if protocol == "websocket" else bytes(100_000))
        assert b"" == echo.got
        echo.transport.resume_reading()
        await loop.sock_sendall(client, b"")
        echo.transport.abort()
        assert echo.transport.is_closing()
        await echo.lost


HANDSHAKE = (
    b"GET /mqtt HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
)


def masked(payload: bytes, first: int = 0x82) -> bytes:
    """Return a long client frame with a mask of zeros."""
    return struct.pack(">BBQI", first, 0x80 | 127, len(payload), 0) + payload


def short(first: int, payload: bytes = b"") -> bytes:
    """Return a short client frame with a mask of zeros."""
    return struct.pack(">BBI", first, 0x80 | len(payload), 0) + payload


async def test_pings_of_a_client_that_does_not_read_do_not_fill_memory(echoes: Echoes) -> None:
    """The server stops reading from a client that sends pings and doesn't read the answers, until it reads them."""
    port = await echoes.listen(protocol="websocket")
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, HANDSHAKE)
        echo = await echoes.made.get()
        echo.transport.set_write_buffer_limits(high=10_000, low=1_000)
        pings = short(0x89, bytes(125)) * 1_000
        flood = asyncio.create_task(loop.sock_sendall(client, pings * 200))
        while echo.transport.is_reading():
            await asyncio.sleep(0)
        assert not flood.done()
        assert echo.transport.get_write_buffer_size() < 1 << 20
        got = 0
        while not flood.done() or got < 200 * 1_000 * 127:
            got += len(await loop.sock_recv(client, 1 << 20))
        await flood
    await echo.lost


@pytest.mark.parametrize(
    "data",
    [
        b"\x10\x0c\x00\x04MQTT\r\n",
        b"GET /mqtt HTTP/1.0\r\n\r\n",
        b"GET " + b"x" * 100_000,
        HANDSHAKE.replace(b"13", b"12"),
        HANDSHAKE.replace(b"\r\n\r\n", b"\r\nOrigin: a\r\nOrigin: b\r\nUpgrade: b\r\n\r\n"),
        HANDSHAKE + b"\xff" * 50,
        HANDSHAKE + b"\x82\x05hello",
        HANDSHAKE + short(0x88, b"\x03"),
        HANDSHAKE + short(0x80, b"x"),
        HANDSHAKE + short(0x02, b"x") + short(0x88),
        HANDSHAKE + short(0x88) + short(0x82, b"x"),
        HANDSHAKE + struct.pack(">BBQ", 0x82, 0xFF, 1 << 62),
    ],
)
async def test_what_is_no_websocket_is_closed(echoes: Echoes, data: bytes) -> None:
    """Invalid WebSocket data closes the connection, in one piece or byte by byte, before or after the handshake."""
    port = await echoes.listen(protocol="websocket")
    for pieces in ([data], [data[:1], data[1:]], [data[n : n + 1] for n in range(min(len(data), 400))]):
        async with stream(port) as (reader, writer):
            for piece in pieces:
                writer.write(piece)
            if len(pieces) > 2 and len(data) > 400:
                continue
            with contextlib.suppress(ConnectionError):
                await reader.read()
        while not echoes.made.empty():
            await echoes.made.get_nowait().lost


# --- replacing listeners while a server runs ---


async def replaced(echoes: Echoes, **addresses: str) -> None:
    """Replace the listeners with others; if that fails, restore the former ones."""
    listeners = {name: ListenerSettings(listen=Address(text)) for name, text in addresses.items()}
    replacement = Replacement(echoes.listeners)
    try:
        await replacement.open(ServerSettings(listeners=listeners), echoes.connect, 1 << 20)
    except BaseException:
        await replacement.undo()
        raise
    replacement.finish()
    echoes.listeners = replacement.listeners


async def named(port: int, host: str = "127.0.0.1", data: bytes = b"hello") -> None:
    """Connect, send data, and check that the same data come back."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    assert data == await reader.readexactly(len(data))
    writer.close()


async def test_an_address_goes_from_one_listener_to_another(echoes: Echoes) -> None:
    """An address can move to another listener, and two listeners can swap theirs; the sockets stay open."""
    one, other = await echoes.listen(name="a"), await echoes.listen(name="b")
    at, there = f"127.0.0.1:{one}", f"127.0.0.1:{other}"
    for addresses in ({"a": there, "b": at}, {"c": at, "d": there}, {"d": at}, {"d": "127.0.0.1:0", "e": at}):
        await replaced(echoes, **addresses)
        while not echoes.made.empty():
            echoes.made.get_nowait()
        assert list(addresses) == [listener.via.name for listener in echoes.listeners]
        await named(one)
        assert [name for name, text in addresses.items() if text == at] == [(await echoes.made.get()).via.name]


async def test_a_free_port_stays_with_its_listener(echoes: Echoes) -> None:
    """A listener on port 0 keeps its port when the settings change or the listener is renamed."""
    port = await echoes.listen(name="a")
    await replaced(echoes, z="127.0.0.1:0", a="127.0.0.1:0")
    assert [f"127.0.0.1:{port}"] == echoes.listeners[1].addresses
    await replaced(echoes, b="127.0.0.1:0")
    await replaced(echoes, c=f"127.0.0.1:{Address(echoes.listeners[0].addresses[0]).port}")
    await named(Address(echoes.listeners[0].addresses[0]).port)


async def test_a_listener_is_widened_and_narrowed(echoes: Echoes) -> None:
    """A listener can change from a loopback address to all addresses and back on the same port.

    Both addresses can't be bound at the same time.
    """
    port = await echoes.listen(name="a")
    for host, open_to in (("0.0.0.0", "127.0.0.2"), ("127.0.0.1", None), ("localhost", None), ("0.0.0.0", "127.0.0.2")):
        await replaced(echoes, a=f"{host}:{port}")
        await named(port)
        if open_to is not None:
            await named(port, open_to)
        else:
            with pytest.raises(ConnectionRefusedError):
                await named(port, "127.0.0.2")


async def test_listeners_that_cannot_be_had_leave_those_that_run(echoes: Echoes) -> None:
    """If a listener can't be opened, the running listeners stay, including one that was closed to free its address.

    Two listeners with the same address are refused.
    """
    port = await echoes.listen(name="a")
    with socket.create_server(("127.0.0.2", port)) as foreign:
        before = echoes.listeners[0].addresses
        for addresses in (
            {"a": f"0.0.0.0:{port}"},
            {"b": "127.0.0.1:0", "a": f"127.0.0.2:{port}"},
            {"a": f"127.0.0.1:{port}", "b": f"127.0.0.1:{port}"},
            {"a": f"127.0.0.1:{port}", "b": f"0.0.0.0:{port}"},
        ):
            with pytest.raises(ListenError, match="can't listen on"):
                await replaced(echoes, **addresses)
            assert before == echoes.listeners[0].addresses
            await named(port)
        assert foreign.getsockname() == ("127.0.0.2", port)


async def test_all_addresses_of_ipv6_and_of_ipv4_have_one_port(echoes: Echoes) -> None:
    """``[::]`` is bound for IPv6 only, so that ``0.0.0.0`` can use the same port, in either order."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("needs IPv6: this machine has none")
    port = await echoes.listen(name="a")
    for hosts in (("[::]", "0.0.0.0"), ("0.0.0.0", "[::]")):
        await replaced(echoes, a=f"{hosts[0]}:{port}", b=f"{hosts[1]}:{port}")
        await named(port)
        await named(port, "::1")
    await replaced(echoes, b=f"[::]:{port}")
    await named(port, "::1")
    with pytest.raises(ConnectionRefusedError):
        await named(port)
