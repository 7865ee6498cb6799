"""Streamed responses: slow readers, clients that disconnect, and read errors."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import topicstore as ts
from topicstore.contract.batch import MessageBatch
from topicstore.server import Server
from topicstore.server.config.units import Size
from topicstore.server.http.formats.response_bodies import WRITTEN, written
from topicstore.server.http.streaming import Measured, ThreadedPieces
from topicstore.server.http.threads import RequestThreads
from topicstore.storage.reading.pages import ReplayPlace
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, wait_until
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import connected, connections_of

_BATCHES, _ROWS = 40, 16
_PAYLOAD = b"x" * (128 << 10)
_REQUEST = b"GET /api/v5/messages?order=any HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """A database of 80 MB, of which a replay reads about 8 MB at a time."""
    with ts.open(tmp_path_factory.mktemp("large") / "db", backend="memory") as db:
        for _ in range(_BATCHES):
            db.store([ts.Message("a", _PAYLOAD, "c")] * _ROWS)
        yield db


@pytest.fixture
def large(stored: ts.Database) -> Iterator[tuple[ts.Database, Server]]:
    """A server of the 80 MB database, for one client at a time."""
    with serving_http(stored, connections=1) as server:
        yield stored, server


def asked(server: Server) -> socket.socket:
    """Request a replay of everything on a connection with a small buffer, and read nothing yet."""
    made = connected(server, 64 << 10)
    made.sendall(_REQUEST)
    return made


def held_up(server: Server, client: socket.socket) -> bool:
    """Return whether the server waits until a client reads more."""
    return any(one.flow.write_paused for one in connections_of(server, client.getsockname()))


def left(server: Server) -> bool:
    """Return whether a disconnected client's connection is closed, so that another client is accepted."""
    return httpx.get(f"{server.urls_of_http[0]}/health/live", trust_env=False).status_code == 200


class Watched:
    """A patch of replays that records their end, and lets a test delay or fail the second batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.second, self.go_on, self.closed = threading.Event(), threading.Event(), threading.Event()
        batches = ReplayPlace.batches

        def watched(place: ReplayPlace, *arguments: Any, **named: Any) -> Generator[MessageBatch, None, None]:
            try:
                for number, batch in enumerate(batches(place, *arguments, **named)):
                    if number == 1:
                        self.second.set()
                        self.go_on.wait()
                        if error is not None:
                            raise error
                    yield batch
            finally:
                self.closed.set()

        monkeypatch.setattr(ReplayPlace, "batches", watched)


def test_a_slow_reader_holds_up_little_and_gets_everything(large: tuple[ts.Database, Server]) -> None:
    db, server = large

    def read() -> int:
        return sum(shard.writer.counters.read_messages for shard in db.storage.shards)

    before = read()
    with asked(server) as client:
        wait_until(lambda: held_up(server, client), "the server to wait for its client")
        assert (read() - before) * len(_PAYLOAD) <= 20 << 20, "of 80 MB"
        answer = client.makefile("rb").read()
    assert read() - before == _BATCHES * _ROWS
    assert answer.count(_PAYLOAD) == _BATCHES * _ROWS


def test_what_is_held_for_a_slow_reader_is_given_back_when_it_leaves(
    large: tuple[ts.Database, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    watched.go_on.set()
    with asked(large[1]) as client:
        wait_until(lambda: held_up(large[1], client), "the server to wait for its client")
        assert not watched.closed.is_set()
    assert watched.closed.wait(PATIENCE)
    wait_until(lambda: left(large[1]), "the connection to be gone")


def test_a_client_that_leaves_while_its_messages_are_read_holds_nothing_after_that(
    large: tuple[ts.Database, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a client disconnects during a read, the server finishes that batch and reads no other."""
    watched = Watched(monkeypatch)
    with asked(large[1]) as client:
        while not watched.second.is_set():
            if select.select([client], [], [], MOMENT)[0]:
                client.recv(1 << 20)
    assert not watched.closed.is_set()
    watched.go_on.set()
    assert watched.closed.wait(PATIENCE)
    wait_until(lambda: left(large[1]), "the connection to be gone")


def test_all_clients_that_take_nothing_have_one_bound(stored: ts.Database) -> None:
    """The memory held for all clients that don't read has one limit.

    Above it, the connections without progress for longest are closed; a client that reads gets everything.
    """
    with serving_http(stored, memory=Size(24 << 20), body_size=Size(1 << 20)) as server, ExitStack() as clients:
        stalled = [clients.enter_context(asked(server)) for _ in range(8)]
        budget = server.budgets["http"]
        wait_until(lambda: budget.broken_off >= 4, "those to be ended that hold too much")
        url = f"{server.urls_of_http[0]}/api/v5/messages?order=any"
        assert httpx.get(url, trust_env=False, timeout=PATIENCE).content.count(_PAYLOAD) == _BATCHES * _ROWS
        assert budget.held <= 24 << 20
        for one in stalled:
            one.close()
        wait_until(lambda: budget.held == 0, "all to be released")


def test_bodies_that_are_not_whole_have_one_bound(tmp_path: Path) -> None:
    """Incomplete bodies share one memory limit: the request that exceeds it is answered with 503, others are served."""
    head = b"POST /api/v5/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        serving_http(db, memory=Size(4 << 20), body_size=Size(2 << 20)) as server,
        ExitStack() as clients,
    ):
        begun = [clients.enter_context(connected(server)) for _ in range(8)]
        for one in begun:
            one.sendall(head + b"Content-Length: 2000000\r\n\r\n" + b"x" * 1_000_000)
        wait_until(lambda: server.budgets["http"].broken_off >= 4, "some to be refused")
        ready, _, _ = select.select(begun, [], [], PATIENCE)
        answer = ready[0].recv(1_000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer.lower()
        url = f"{server.urls_of_http[0]}/api/v5/messages?store=true"
        small = httpx.post(url, json={"topic": "a", "payload": "1"}, trust_env=False, timeout=PATIENCE)
        assert small.status_code == 200


def test_a_body_that_cannot_be_ended_is_broken_off_and_the_reason_is_logged(
    large: tuple[ts.Database, Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch, ts.CorruptionError("a flipped bit", "somewhere"))
    watched.go_on.set()
    url = f"{large[1].urls_of_http[0]}/api/v5/messages"
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        httpx.get(url, trust_env=False, timeout=60)
    assert watched.closed.is_set()
    assert "a flipped bit" in caplog.text


@pytest.mark.parametrize("media_type", WRITTEN)
def test_pieces_are_small_also_where_payloads_are_large(media_type: str) -> None:
    """Pieces of a response stay small with large payloads, although a zero byte takes six bytes in JSON."""
    batch = MessageBatch.from_messages([ts.Message("a", bytes(100_000), "c") for _ in range(200)])
    pieces = list(written([batch], media_type))
    assert max(map(len, pieces)) < 7 << 20


def test_a_piece_that_was_sent_is_not_kept() -> None:
    """The producer of a response doesn't keep a piece that was sent, even before the next one is requested."""
    made: list[weakref.ref[memoryview]] = []

    def piece() -> memoryview:
        found = memoryview(bytes(2 << 20))
        made.append(weakref.ref(found))
        return found

    async def send(threads: RequestThreads) -> None:
        pieces = ThreadedPieces(threads, (piece() for _ in range(3)), Measured(batch for batch in ()))
        for _ in range(3):
            assert len(await anext(pieces)) == 2 << 20
            async with asyncio.timeout(PATIENCE):
                while any(one() for one in made):  # until the thread and the event loop have released the piece
                    await asyncio.sleep(MOMENT)
        await pieces.aclose()

    with RequestThreads(1) as threads:
        asyncio.run(send(threads))
