"""Fixtures for the tests of sessions: databases in memory and on disk, and a clock that only tests advance.

Sessions use an engine only through the state of shards. Therefore `make test` needs databases on disk only for tests
that kill the process, reopen the database, or make writes fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.sessions import Sessions
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.parts.machines import forget_sessions


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", pytest.param("rocksdb", marks=pytest.mark.slow)])
def db(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    clocks = {"clock": clock, "monotonic": clock.monotonic}
    with ts.open(tmp_path / "db", backend=request.param, shards=2, auto_compact=False, **clocks) as opened:
        yield opened


@pytest.fixture
def sessions(db: ts.Database) -> Sessions:
    return db.sessions


@pytest.fixture
def crash(db: ts.Database) -> Callable[[], Sessions]:
    """Return a function that loads the sessions from committed state alone, as the next process would after a crash."""

    def crash() -> Sessions:
        former = db._publisher, db.sessions, db.storage.steady
        forget_sessions(db)
        try:
            return db.sessions
        finally:
            db._made_publisher, db._sessions, db.storage.steady = former

    return crash


@pytest.fixture
def publish(db: ts.Database) -> Callable[..., None]:
    """Return a function that publishes payloads, by default at QoS 1 to the topic ``a/b``."""

    def publish(*payloads: str, topic: str = "a/b", client_id: str = "publisher", qos: int = 1) -> None:
        db.publish([ts.Message(topic, payload.encode(), client_id, qos) for payload in payloads])

    return publish
