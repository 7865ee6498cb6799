"""Hostile requests to a real server: too large, too slow, too many, or malformed."""

from __future__ import annotations

import contextlib
import gzip
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.config.units import Duration, Size
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of, connected

HEAD = b"PUT /api/v5/ds/storages/messages/replicas HTTP/1.1\r\nHost: localhost\r\n"
BODY_SIZE = 1 << 20


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that accepts only small request bodies."""
    path = tmp_path_factory.mktemp("strict") / "db"
    with ts.open(path, backend="memory") as db, serving_http(db, body_size=Size(BODY_SIZE)) as one:
        yield one


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that soon cuts off slow connections.

    Only tests of slowness use this server, because a busy machine may be slow, too.
    """
    path = tmp_path_factory.mktemp("slow") / "db"
    with ts.open(path, backend="memory") as db, serving_http(db, request_timeout=Duration(0.3)) as one:
        yield one


def read_all(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes or resets the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def put(server: Server, **options: object) -> httpx.Response:
    """Send a body to a route that accepts one."""
    with client_of(server) as http:
        return http.put("/ds/storages/messages/replicas", **options)  # type: ignore[arg-type]


def alive(server: Server) -> bool:
    """Return whether other clients are still served; retry if an impatient server cuts the request off."""
    while True:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return httpx.get(f"{server.urls_of_http[0]}/health/live", trust_env=False).status_code == 200


# --- too large ---


def test_a_body_that_is_too_large_by_its_length_is_refused(strict: Server) -> None:
    assert put(strict, content=b" " * (BODY_SIZE + 1)).status_code == 413
    assert put(strict, content=b" " * BODY_SIZE).status_code == 400, "no JSON, but not too large"


def test_a_body_without_a_length_is_refused_when_it_becomes_too_large(strict: Server) -> None:
    assert put(strict, content=(b" " * (1 << 16) for _ in range(20))).status_code == 413


def test_a_body_without_an_end_is_not_read_without_an_end(strict: Server) -> None:
    """A body without an end is answered with 413, and the server soon stops reading it."""
    with connected(strict) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012 - until the server stops reading
            for _ in range(10_000):
                connection.sendall(chunk)
    assert alive(strict)


def test_compressed_bodies_are_refused_unread(strict: Server) -> None:
    """Compressed request bodies are refused unread, so that none can expand."""
    bomb = gzip.compress(b" " * (100 << 20))
    for coding in ("gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"):
        answer = put(strict, content=bomb, headers={"Content-Encoding": coding})
        assert (coding, 415, "identity") == (coding, answer.status_code, answer.headers["accept-encoding"])


def test_a_head_that_is_too_large_is_refused(strict: Server) -> None:
    with connected(strict) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1_000):
                connection.sendall(b"GET /" + b"a" * 65_536)
        answer = read_all(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert alive(strict)


def test_what_is_thrown_away_counts_for_each_request(strict: Server) -> None:
    """The limit on discarded request bytes applies to each request, so a refused client may send another one."""
    body = bytes(9 << 20)
    refused = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(strict) as connection:
        for _ in range(3):
            connection.sendall(refused)
            answer = b""
            while b"without a Content-Encoding" not in answer:
                piece = connection.recv(1 << 16)
                assert piece, "the connection was closed"
                answer += piece
            assert answer.startswith(b"HTTP/1.1 415 ")
            connection.sendall(body)


@pytest.mark.parametrize("depth", [980, 2_000, 50_000])
@pytest.mark.parametrize(
    ("path", "kind", "begin", "end"),
    [
        ("/queues/1/messages", "application/json", b"[", b"]"),
        ("/messages", "application/json", b"[", b"]"),
        ("/generations", "application/json", b'{"options":', b"}"),
        ("/imports", "application/vnd.msgpack", b"\x91", b""),
    ],
)
def test_a_body_that_is_nested_too_deeply_is_the_clients_mistake(
    strict: Server, path: str, kind: str, begin: bytes, end: bytes, depth: int
) -> None:
    body = begin * depth + b"1" + end * depth
    with client_of(strict) as http:
        answer = http.post(path, content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text


# --- too slow ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /",
        b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        HEAD + b"Content-Length: 1000\r\n\r\n[",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n",
    ],
)
def test_who_begins_and_does_not_go_on_is_disconnected(impatient: Server, said: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(said)
        read_all(connection)
    assert alive(impatient)


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nX-A: ", HEAD + b"Content-Length: 1000000\r\n\r\n"])
def test_who_sends_byte_by_byte_is_disconnected(impatient: Server, said: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(said)
        connection.settimeout(0.02)
        closed = False
        while not closed:
            with contextlib.suppress(TimeoutError):
                try:
                    connection.sendall(b" ")
                    closed = connection.recv(1 << 16) == b""
                except (ConnectionResetError, BrokenPipeError):
                    closed = True
    assert alive(impatient)


@pytest.mark.slow
def test_who_does_not_read_a_response_is_disconnected(impatient: Server) -> None:
    """A client that doesn't read its response is disconnected.

    The test requests the largest response, the script of the document's page.
    """
    request = b"GET /schema/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    refused = pytest.raises((ConnectionResetError, BrokenPipeError))
    with connected(impatient, 4_096) as connection, refused:
        while True:
            connection.sendall(request)
    assert alive(impatient)


@pytest.mark.slow
def test_who_sends_slowly_but_enough_is_served(tmp_path: Path) -> None:
    """A body that arrives slowly but steadily is accepted, even if it takes longer than one timeout period."""
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        serving_http(db, request_timeout=Duration(3600)) as server,
        connected(server) as connection,
    ):
        connection.sendall(HEAD + b"Content-Length: 4\r\nConnection: close\r\n\r\n")
        for byte in b"[1] ":
            connection.sendall(bytes((byte,)))
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


# --- too many ---


def test_connections_beyond_the_limit_are_refused_and_the_others_served(tmp_path: Path) -> None:
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        serving_http(db, connections=3, request_timeout=Duration(3600)) as server,
        contextlib.ExitStack() as stack,
    ):
        held = [stack.enter_context(connected(server)) for _ in range(3)]
        refused = stack.enter_context(connected(server))
        assert read_all(refused).startswith(b"HTTP/1.1 503 ")
        held[0].sendall(request)
        assert read_all(held[0]).startswith(b"HTTP/1.1 200 ")
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):  # until the server has noticed the closed connection
            again = stack.enter_context(connected(server))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                again.sendall(request)
            answer = read_all(again)


# --- malformed ---


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Header: x\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_request_is_refused(impatient: Server, said: bytes) -> None:
    """A malformed request gets an error status other than 500, or no answer, and the connection is closed."""
    with connected(impatient) as connection:
        connection.sendall(said)
        answer = read_all(connection)
    assert answer == b"" or answer.split()[1][:1] in (b"4", b"5")
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert alive(impatient)


@pytest.mark.parametrize(
    ("version", "more"),
    [("1.1", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), ("1.0", b"Transfer-Encoding: chunked\r\n")],
)
def test_a_request_that_may_be_taken_for_two_is_refused(strict: Server, version: str, more: bytes) -> None:
    """A request that might be parsed as two is refused, and the second is not answered.

    See RFC 9112, sections 6.1 and 6.3.
    """
    with connected(strict) as connection:
        connection.sendall(
            HEAD.replace(b"1.1", version.encode())
            + more
            + b"\r\n0\r\n\r\nGET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"live" not in answer


def test_a_connection_is_not_upgraded(strict: Server) -> None:
    with connected(strict) as connection:
        connection.sendall(
            b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_responses_say_what_browsers_may_do_and_not_what_serves(strict: Server) -> None:
    for path in ("/", "/health/live", "/nowhere", "/api/v5/info", "/schema"):
        headers = httpx.get(strict.urls_of_http[0] + path, trust_env=False).headers
        assert "server" not in headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
