"""Client addresses take turns for request threads, and work for disconnected clients ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from litestar.exceptions import ServiceUnavailableException
from topicstore.runtime.cancelling import UnwantedError, check_wanted, while_wanted
from topicstore.server import Server
from topicstore.server.http.threads import Asking, RequestThreads, Way, asking
from topicstore.storage.storage import Storage
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of, connected, connections_of

EXPLAIN = b"GET /api/v5/messages/explain?order=any HTTP/1.1\r\nHost: localhost\r\n\r\n"


class HeldFetches:
    """A patch that counts database reads, and delays them until the test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.begun = threading.Event(), 0
        fetch = Storage.fetch

        def held(storage: Storage, *arguments: Any, **named: Any) -> Any:
            self.begun += 1
            assert self.go_on.wait(PATIENCE)
            return fetch(storage, *arguments, **named)

        monkeypatch.setattr(Storage, "fetch", held)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ts.Database, Server]]:
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server:
        for _ in range(100):
            db.store([ts.Message("a", b"x" * 100_000, "c")] * 10)
        yield db, server


def test_health_is_reported_while_many_heavy_requests_wait(
    served: tuple[ts.Database, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health and metrics are answered while many heavy requests wait, because heavy requests can't take all threads."""
    fetches = HeldFetches(monkeypatch)
    with ExitStack() as sockets:
        for _ in range(30):
            sockets.enter_context(connected(served[1])).sendall(EXPLAIN)
        wait_until(lambda: fetches.begun >= 4, "heavy requests to have their share of the threads")
        with client_of(served[1], "") as client:
            assert client.get("/health/ready").status_code == 200
            assert client.get("/metrics").status_code == 200
            assert client.get("/api/v5/info").status_code == 200
        assert fetches.begun == 4, "half of the threads are for heavy requests of one address"
        fetches.go_on.set()


def test_what_clients_have_asked_for_ends_when_they_go(
    served: tuple[ts.Database, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When clients disconnect, their running request ends after its next read, and waiting ones read nothing."""
    fetches = HeldFetches(monkeypatch)
    db, server = served
    assert server.http is not None
    with ExitStack() as sockets:
        made = [sockets.enter_context(connected(server)) for _ in range(30)]
        names = [one.getsockname() for one in made]
        for one in made:
            one.sendall(EXPLAIN)
        wait_until(lambda: fetches.begun >= 4, "the first to have begun")
    wait_until(lambda: not connections_of(server, *names), "the server to notice")
    with client_of(server, "") as client:
        before = sum(shard.writer.counters.reads for shard in db.storage.shards)
        fetches.go_on.set()
        assert client.get("/api/v5/messages/explain?until=1970-01-02").status_code == 200, (
            "which comes after all of them"
        )
    assert fetches.begun == 5
    assert sum(shard.writer.counters.reads for shard in db.storage.shards) <= before + 1, "that of the last request"


def submitted(threads: RequestThreads, of: Asking, call: Any) -> Future[Any]:
    """Submit a call to the request threads as work for a request."""
    token = asking.set(of)
    try:
        return threads.submit(call)
    finally:
        asking.reset(token)


def request(host: str = "a", way: Way = "heavy", *, reads: bool = True, gone: bool = False) -> Asking:
    return Asking(host=host, reads=reads, gone=lambda: gone, way=way)


def test_another_address_gets_its_turn_before_what_one_has_asked_for_at_once() -> None:
    release, order = threading.Event(), list[str]()
    with RequestThreads(2) as threads:
        held = submitted(threads, request("x"), lambda: release.wait(PATIENCE))
        first = [submitted(threads, request("many"), lambda: order.append("many")) for _ in range(10)]
        other = submitted(threads, request("other"), lambda: order.append("other"))
        release.set()
        for one in (held, *first, other):
            one.result(PATIENCE)
    assert order.index("other") <= 1


def test_too_many_requests_of_an_address_are_refused_with_a_time_to_ask_again() -> None:
    release = threading.Event()
    with RequestThreads(4) as threads:
        waiting = [submitted(threads, request(), lambda: release.wait(PATIENCE)) for _ in range(2 + 32)]
        with pytest.raises(ServiceUnavailableException) as refused:
            submitted(threads, request(), release.is_set)
        assert refused.value.headers == {"Retry-After": "1"}
        assert submitted(threads, request("b"), lambda: 1).result(PATIENCE) == 1, "another address"
        assert submitted(threads, request(way="ordinary"), lambda: 1).result(PATIENCE) == 1, "what takes no time"
        assert submitted(threads, request(way="health"), lambda: 1).result(PATIENCE) == 1
        release.set()
        assert all(one.result(PATIENCE) for one in waiting)


def test_a_write_whose_client_has_gone_is_done() -> None:
    """A write whose client has disconnected is still done; only reads are dropped."""
    with RequestThreads(2) as threads:
        assert submitted(threads, request(reads=False, gone=True), lambda: 1).result(PATIENCE) == 1
        with pytest.raises(UnwantedError):
            submitted(threads, request(gone=True), lambda: 1).result(PATIENCE)


def test_work_ends_between_two_steps_once_it_is_not_wanted(tmp_path: Path) -> None:
    """A listing of topics, a count or a replay that is no longer needed ends between two steps."""
    wanted = True
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.store([ts.Message("$a", b"x", "c")] * 10)
        with while_wanted(lambda: wanted):
            check_wanted()
            assert len([*db.replay("$a/#")]) == db.explain("$a").messages == 10
            assert [one.messages for one in db.topics("$a")] == [10]
            wanted = False
            for ask in (lambda: [*db.replay("$a")], lambda: db.topics("$a/#"), lambda: db.explain("$a"), check_wanted):
                with pytest.raises(UnwantedError):
                    ask()
        assert [one.messages for one in db.topics("$a")] == [10]
