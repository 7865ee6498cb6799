"""An HTTP server on a real socket for the tests of a module, and a client of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.http.connections import Connection
from topicstore_conformance.conditions.browser import Open, windows
from topicstore_conformance.mqtt.embedded import serving_http


def client_of(server: Server, path: str = "/api/v5", timeout: float | None = 60) -> httpx.Client:
    """Return a client of a server; request paths are relative to ``path``."""
    certificates = False  # plain HTTP needs no certificates, and loading them takes long
    return httpx.Client(base_url=server.urls_of_http[0] + path, timeout=timeout, trust_env=False, verify=certificates)


def connected(server: Server, receive_buffer: int = 0) -> socket.socket:
    """Return a connection to a server on which nothing has been sent yet.

    ``receive_buffer`` sets the socket's receive buffer in bytes, unless it is 0.
    """
    host, _, port = server.urls_of_http[0].removeprefix("http://").rpartition(":")
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect((host, int(port)))
    return made


def connections_of(server: Server, *clients: tuple[str, int]) -> list[Connection]:
    """Return the server's connections to clients with these addresses and ports."""
    assert server.http is not None
    return [one for one in list(server.http.connections) if one.client in clients]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ts.Database, Server]]:
    """A served database in memory that tests share; each test uses topics of its own."""
    with ts.open(tmp_path_factory.mktemp("http") / "db", backend="memory") as db, serving_http(db) as server:
        yield db, server


@pytest.fixture
def http(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of the served database; request paths are relative to ``/api/v5``."""
    with client_of(served[1]) as client:
        yield client


@pytest.fixture
def site(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of the server with paths relative to its root."""
    with client_of(served[1], "") as client:
        yield client


@pytest.fixture
def owner(served: tuple[ts.Database, Server]) -> dict[str, str]:
    """Request headers with the token that the server created for its own user."""
    _, server = served
    assert server.http is not None
    return {"Authorization": f"Bearer {server.http.context.tokens.own}"}


@pytest.fixture
def db(served: tuple[ts.Database, Server]) -> ts.Database:
    """The served database."""
    return served[0]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open browser windows, each with a profile of its own."""
    with windows(lambda: tmp_path_factory.mktemp("profile")) as opened:
        yield opened
