"""An HTTP server on a real socket, shared by the tests of a module, and clients of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.http.connections import Connection
from topicstore_conformance.mqtt.embedded import serving_http


def client_of(server: Server, path: str = "/api/v5", timeout: float | None = 60) -> httpx.Client:
    """Return an HTTP client of a server. Its request paths are relative to ``path``."""
    certificates = False  # plain HTTP needs no certificates, and loading them is slow
    return httpx.Client(base_url=server.urls_of_http[0] + path, timeout=timeout, trust_env=False, verify=certificates)


def connected(server: Server, receive_buffer: int = 0) -> socket.socket:
    """Return a connection to a server, optionally with a receive buffer of so many bytes.

    Nothing has been sent on it.
    """
    host, _, port = server.urls_of_http[0].removeprefix("http://").rpartition(":")
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect((host, int(port)))
    return made


def connections_of(server: Server, *clients: tuple[str, int]) -> list[Connection]:
    """Return the server's connections to the clients with these addresses and ports."""
    assert server.http is not None
    return [one for one in list(server.http.connections) if one.client in clients]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ts.Database, Server]]:
    """A served in-memory database. Tests share it and use different topics."""
    with ts.open(tmp_path_factory.mktemp("http") / "db", backend="memory") as db, serving_http(db) as server:
        yield db, server


@pytest.fixture
def http(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of the served database. Its request paths are relative to ``/api/v5``."""
    with client_of(served[1]) as client:
        yield client


@pytest.fixture
def site(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of the served database whose request paths are relative to the root."""
    with client_of(served[1], "") as client:
        yield client


@pytest.fixture
def owner(served: tuple[ts.Database, Server]) -> dict[str, str]:
    """The request headers with the token that the server generated for the user that runs it."""
    _, server = served
    assert server.http is not None
    return {"Authorization": f"Bearer {server.http.context.tokens.own}"}


@pytest.fixture
def db(served: tuple[ts.Database, Server]) -> ts.Database:
    """The served database."""
    return served[0]
