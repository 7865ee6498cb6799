"""A log store whose answers are lost, repeated and delayed as the test commands, and the sites of a cluster."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.log_store import LogStore, LogStoreRefusedError, ObjectExistsError, StorageUnavailableError
from topicstore.replication.log_stores import open_log_store
from topicstore_conformance.replication.memory_store import Objects

NEVER = 3_600.0
"""A time in seconds within which no test ends."""
LONG = 30
"""The timeout of waits in seconds, after which a test fails."""


class Gate:
    """A point at which a PUT waits until the test opens the gate; then the command ``then`` applies to the PUT."""

    def __init__(self, then: str = "") -> None:
        self.then = then
        self._reached, self._open = threading.Event(), threading.Event()

    def reached(self) -> None:
        assert self._reached.wait(LONG)

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._open.wait(LONG)


class Line(Objects):
    """A site's connection to the store, with a command for each PUT; without a command, the PUT succeeds.

    ``drop``: the request is lost. ``lose``: the answer is lost. ``late``: the request is delayed, and arrives at each
    call of `arrive`. ``refuse``: the store answers that the name exists, which is false.
    ``forbid``: the store refuses the request. `Gate`: the request waits.
    """

    def __init__(self, store: LogStore, *commands: str | Gate) -> None:
        self._store = store
        self.commands = deque(commands)
        self._late: list[tuple[str, bytes]] = []
        self.requests: list[str] = []
        """The reading requests, such as ``GET shards/3/log/…``."""

    def create(self, name: str, data: bytes) -> None:
        command = self.commands.popleft() if self.commands else ""
        if isinstance(command, Gate):
            command.pass_through()
            command = command.then
        if command == "late":
            self._late.append((name, data))
        if command == "refuse":
            raise ObjectExistsError(name, self.place)
        if command == "forbid":
            raise LogStoreRefusedError("403 Forbidden")
        if command not in ("drop", "late"):
            self._store.create(name, data)
        if command in ("drop", "late", "lose"):
            raise StorageUnavailableError("no answer")

    def arrive(self) -> None:
        """Send the delayed requests to the store."""
        for name, data in self._late:
            try:
                self._store.create(name, data)
            except ObjectExistsError:
                continue

    def get(self, name: str) -> bytes:
        self.requests.append(f"GET {name}")
        return self._store.get(name)

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        self.requests.append(f"LIST {prefix}")
        yield from self._store.names(prefix, after)

    def delete(self, name: str) -> None:
        self._store.delete(name)


class Sites:
    """The sites of one cluster, each with a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = (root / "log").as_uri()

    def open(self, name: str, *, takeover_after: float = NEVER, **how: Any) -> ts.Database:
        """Open a site, which by default never suspects another one, however busy the machine is."""
        own = {key: how.pop(key) for key in ("n_sites", "replication_factor", "address", "log_retention") if key in how}
        cluster = ts.Cluster(
            self.url,
            beat_interval=0.02,
            poll_interval=0.02,
            takeover_after=takeover_after,
            **own,
        )
        return ts.open(self.root / name, cluster=cluster, site=name, **how)

    @property
    def store(self) -> LogStore:
        return open_log_store(self.url)


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    """Return a cluster without sites."""
    return Sites(tmp_path)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Return a stack of what is closed after the test."""
    with ExitStack() as stack:
        yield stack
