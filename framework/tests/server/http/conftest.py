"""An HTTP server for the tests of a module, on a real socket, and a client of it."""

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
    """Return a client of a server, whose paths begin behind ``path``."""
    certificates = False  # plain HTTP needs none, and loading them takes long
    return httpx.Client(base_url=server.urls_of_http[0] + path, timeout=timeout, trust_env=False, verify=certificates)


def connected(server: Server, receive_buffer: int = 0) -> socket.socket:
    """Return a connection to a server, on which nothing was sent yet, with a buffer of so many bytes if it is said."""
    host, _, port = server.urls_of_http[0].removeprefix("http://").rpartition(":")
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect((host, int(port)))
    return made


def connections_of(server: Server, *clients: tuple[str, int]) -> list[Connection]:
    """Return what a server has for clients with these addresses and ports, as long as they are connected."""
    assert server.http is not None
    return [one for one in list(server.http.connections) if one.client in clients]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ts.Database, Server]]:
    """A database in memory that is served; tests share it, and choose topics of their own."""
    with ts.open(tmp_path_factory.mktemp("http") / "db", backend="memory") as db, serving_http(db) as server:
        yield db, server


@pytest.fixture
def http(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of the served database, whose paths begin behind ``/api/v5``."""
    with client_of(served[1]) as client:
        yield client


@pytest.fixture
def site(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client of all that the server serves."""
    with client_of(served[1], "") as client:
        yield client


@pytest.fixture
def owner(served: tuple[ts.Database, Server]) -> dict[str, str]:
    """The headers of who has the token that the server made for its own user."""
    _, server = served
    assert server.http is not None
    return {"Authorization": f"Bearer {server.http.context.tokens.own}"}


@pytest.fixture
def db(served: tuple[ts.Database, Server]) -> ts.Database:
    """The served database itself."""
    return served[0]
