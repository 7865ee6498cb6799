"""A server for the tests of a module, and clients of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import Serving, serving

Connect = Callable[..., RawClient]


@pytest.fixture
def anyio_backend() -> str:
    """What runs tests that are coroutines."""
    return "asyncio"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database in memory, for a server within the test's own process."""
    need("memory")
    with ts.open(tmp_path / "db", backend="memory") as db:
        yield db


@pytest.fixture
def embedded(db: ts.Database) -> Iterator[Embedded]:
    """A server of that database within the test's own process, with the settings that there are by default."""
    with Embedded(db) as embedded:
        yield embedded


@pytest.fixture(scope="module")
def mqtt(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server that all tests of a module use: they choose topics and client ids by `name`.

    The module may have further ARGUMENTS for it.
    """
    need("rocksdb")
    more = getattr(request.module, "ARGUMENTS", ())
    with quick_directory() as directory, serving(Path(directory) / "db", *more) as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test has, and that may be a topic level and a client id."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def connect(mqtt: Serving) -> Iterator[Connect]:
    """Connect a raw client, which must be accepted; the options are those of `RawClient.connect`."""
    with ExitStack() as clients:

        def connected(client_id: str = "", *, version: int = 5, **options: object) -> RawClient:
            client = clients.enter_context(mqtt.client(version=version))
            client.connack = client.connect(client_id, **options)  # type: ignore[attr-defined]
            assert client.connack.reason == 0  # type: ignore[attr-defined]
            return client

        yield connected


@pytest.fixture
def stranger(mqtt: Serving) -> Iterator[Connect]:
    """Open a connection on which nothing was sent yet."""
    with ExitStack() as clients:
        yield lambda version=5: clients.enter_context(mqtt.client(version=version))
