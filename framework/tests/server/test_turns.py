"""One call of the store's thread serves a limited part of the requests, so that no client waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import attrs
import pytest
import topicstore as ts
from topicstore.server.mqtt.store_thread import ENDED, SESSION, RequestBatch, Responses, StoreThread
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.raw_client import RawClient

CLIENTS, FILTERS = 20, 300
MOST = 250
"""The number of filters that may change in one call, which takes about 25 ms."""


@attrs.frozen
class Turn:
    """The requests that one call serves, and the number of filters that the call adds to connected sessions."""

    requests: RequestBatch
    followed: int


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """The calls of the store's thread, in order, as a list that grows."""
    found: list[Turn] = []
    serve = StoreThread.serve

    def noted(store: StoreThread, requests: RequestBatch) -> Responses:
        before = _followed(store)
        responses = serve(store, requests)
        found.append(Turn(requests, _followed(store) - before))
        return responses

    monkeypatch.setattr(StoreThread, "serve", noted)
    return found


def _followed(store: StoreThread) -> int:
    return sum(session.filters for session in store._sessions._registry.connected.values())


@contextmanager
def crowd(embedded: Embedded) -> Iterator[list[RawClient]]:
    """Clients that have persistent sessions without subscriptions."""
    with ExitStack() as stack:
        clients = [stack.enter_context(embedded.client()) for _ in range(CLIENTS)]
        for number, client in enumerate(clients):
            client.connect(f"crowd-{number}", keep=True)
        yield clients


def filters(number: int) -> list[str]:
    return [f"crowd/{number}/{row}/+" for row in range(FILTERS)]


def storm(embedded: Embedded, clients: list[RawClient], packets: list[bytes]) -> None:
    """Send each client's packet while the store's thread is busy, so that one call can serve all packets."""
    broker, opened = embedded.server._broker, threading.Event()
    assert broker is not None
    broker._thread.submit(opened.wait, PATIENCE)
    try:
        for client, packet in zip(clients, packets, strict=True):
            client.send(packet)
        wait_until(
            lambda: _waiting(broker.serving.requests) >= len(clients) - 1, "all requests but the first wait for a turn"
        )
    finally:
        opened.set()


def _waiting(requests: RequestBatch) -> int:
    return len(requests.subscribes) + len(requests.unsubscribes)


def test_a_turn_takes_a_bounded_part_of_a_storm_of_subscriptions(db: ts.Database, turns: list[Turn]) -> None:
    """A storm of SUBSCRIBE or UNSUBSCRIBE packets is served in portions that are limited in filters.

    Each packet gets one answer.
    """
    with Embedded(db) as embedded, crowd(embedded) as clients:
        for make, kind in ((_subscribe, "SUBACK"), (_unsubscribe, "UNSUBACK")):
            turns.clear()
            storm(embedded, clients, [make(number) for number in range(CLIENTS)])
            for client in clients:
                assert len(client.expect(kind).reasons) == FILTERS
            portions = [{client: len(texts) for client, _, texts in _resubscribed(turn.requests)} for turn in turns]
            assert sum(sum(turn.values()) for turn in portions) == CLIENTS * FILTERS
            assert max(sum(turn.values()) for turn in portions) <= MOST
            assert {max(turn.values()) - min(turn.values()) for turn in portions if len(turn) == CLIENTS} == {0}


def _subscribe(number: int) -> bytes:
    return wire.subscribe(7, [(text, 1) for text in filters(number)])


def _unsubscribe(number: int) -> bytes:
    return wire.unsubscribe(8, filters(number))


def _resubscribed(requests: RequestBatch) -> list[tuple[object, object, list[object]]]:
    return [*requests.subscribes, *requests.unsubscribes]


def test_a_turn_resumes_and_ends_a_bounded_part_of_the_sessions(db: ts.Database, turns: list[Turn]) -> None:
    """Many sessions are resumed and ended in portions.

    A client's CONNACK is sent when all subscriptions of its session are active again.
    """
    with Embedded(db) as embedded:
        with crowd(embedded) as clients:
            for number, client in enumerate(clients):
                client.send(_subscribe(number))
                client.expect("SUBACK")
            turns.clear()
        broker = embedded.server._broker
        assert broker is not None
        wait_until(lambda: not broker.serving.sessions and not db.sessions.clients(connected=True), "all are lost")
        assert max(len(turn.requests.lost) for turn in turns) * (SESSION + FILTERS // ENDED) <= MOST
        turns.clear()
        with crowd(embedded):
            for number in range(CLIENTS):
                session = db.sessions.connected(f"crowd-{number}")
                assert session is not None
                assert session.filters == FILTERS
        assert 0 < max(turn.followed for turn in turns) <= MOST
