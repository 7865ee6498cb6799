"""A server that many tests share, and clients of the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import Serving, serving

Connect = Callable[..., RawClient]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A certificate authority that writes its certificates to the test's directory."""
    return Authority(tmp_path)


@pytest.fixture
def anyio_backend() -> str:
    """The event loop library that runs coroutine tests."""
    return "asyncio"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """An in-memory database for a server in the test's own process."""
    need("memory")
    with ts.open(tmp_path / "db", backend="memory") as db:
        yield db


@pytest.fixture
def embedded(db: ts.Database) -> Iterator[Embedded]:
    """A server of the database from the fixture `db`, in the test's own process and with default settings."""
    with Embedded(db) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def mqtt() -> Iterator[Serving]:
    """A server over TCP and WebSocket that all tests of the session share.

    Tests use topics and client ids made from the fixture `name`.
    """
    need("rocksdb")
    with quick_directory() as directory, serving(Path(directory) / "db", "--listen", "ws://127.0.0.1:0/mqtt") as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test has, usable as a topic level and as a client id."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def connect(mqtt: Serving) -> Iterator[Connect]:
    """Connect a raw client, which the server must accept. The options are those of `RawClient.connect`."""
    with ExitStack() as clients:

        def connected(client_id: str = "", *, version: int = 5, **options: object) -> RawClient:
            client = clients.enter_context(mqtt.client(version=version))
            client.connack = client.connect(client_id, **options)  # type: ignore[attr-defined]
            assert client.connack.reason == 0  # type: ignore[attr-defined]
            return client

        yield connected


@pytest.fixture
def stranger(mqtt: Serving) -> Iterator[Connect]:
    """Open a connection on which nothing has been sent yet."""
    with ExitStack() as clients:
        yield lambda version=5: clients.enter_context(mqtt.client(version=version))
