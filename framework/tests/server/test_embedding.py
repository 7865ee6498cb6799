"""A program embeds the server on a database that it continues to use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server import Address, ListenError, ListenerSettings, Server, ServerSettings
from topicstore.server.config.model import Limits
from topicstore.server.config.units import Duration
from topicstore.server.mqtt.store_thread import RequestBatch, Responses, StoreThread
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient


def test_what_the_program_publishes_comes_to_clients_and_the_other_way_round(
    db: ts.Database, embedded: Embedded
) -> None:
    with PahoClient(embedded.port, "display") as client, db.subscribe("up/#") as own:
        assert client.subscribe("down/#") == 1
        db.publish([ts.Message("down/1", b"from the program", "program", 1)])
        assert client.payloads(1) == ["from the program"]
        assert client.publish("up/1", b"from the client") == 0
        batch = own.fetch(timeout=PATIENCE)
        assert [(m.topic, m.payload, m.client_id) for m in batch.messages] == [("up/1", b"from the client", "display")]


@pytest.mark.parametrize("topic_filter", ["a/#", "$share/group/a/#"])
def test_a_client_that_was_away_for_too_long_gets_the_reason(
    db: ts.Database, caplog: pytest.LogCaptureFixture, topic_filter: str
) -> None:
    """An absent client whose unread messages were removed by retention gets one MQTT 5 reason string about that.

    The log and the session's record mention each such client.
    """
    clients = (("new", 5), ("old", 4))
    with Embedded(db) as embedded:
        for name, version in clients:
            with embedded.client(version=version) as client:
                client.connect(name, keep=True)
                client.subscribe(topic_filter.replace("group", name), "other", options=1)
                client.leave()
        db.publish([ts.Message("a/1", b"gone", "program", 1)])
        db.add_generation()
        db.publish([ts.Message("a/1", b"there", "program", 1)])
        db.drop_generation(1)
        for name, version in clients:
            with embedded.client(version=version) as client:
                reason = str(client.connect(name, keep=True).properties.get("reason_string"))
                assert (", other may have been removed by retention before they" in reason) == (version == 5)
                packet = client.expect("PUBLISH")
                assert packet.payload == b"there"
                session = db.sessions.connected(name)
                assert session is not None
                # the generation may have contained messages that match either filter
                assert {one.dropped for one in session.status().subscriptions} == {(1,)}
                client.acknowledge(packet)
                client.leave()
            with embedded.client(version=version) as client:  # the reason string is sent once
                assert "reason_string" not in client.connect(name, keep=True).properties
    assert sum("was away for too long" in one.message for one in caplog.records) == 2


def test_draining_tells_all_clients_and_keeps_their_sessions(db: ts.Database) -> None:
    """Draining sends a DISCONNECT to MQTT 5 clients, closes the others, and keeps all sessions."""
    with Embedded(db) as embedded:
        new = PahoClient(embedded.port, "new", clean=False, expiry=3600)
        old = PahoClient(embedded.port, "old", version=4, clean=False)
        for client in (new, old):
            client.subscribe("a", 1)
        assert new.publish("a", b"1") == 0
        draining = embedded.begin(embedded.server.drain())
        assert new.ended() == 0x8B
        old.ended()
        for client in (new, old):
            client.close()
        draining.result(PATIENCE)
    assert [session.client_id for session in db.sessions] == ["new", "old"]
    assert not any(session.connected for session in db.sessions)


def test_a_drained_server_lets_nobody_in(embedded: Embedded) -> None:
    embedded.do(embedded.server.drain())
    with pytest.raises(ConnectionError):
        embedded.client()


def test_a_server_ends_though_its_clients_never_rest(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server stops although every request that it serves leads to another one."""
    serve = StoreThread.serve
    with Embedded(db) as embedded, PahoClient(embedded.port, "busy") as client:
        broker = embedded.server._broker
        assert broker is not None

        async def ask() -> None:
            broker.serving.schedule()

        def busily(store: StoreThread, requests: RequestBatch) -> Responses:
            embedded.do(ask())
            return serve(store, requests)

        monkeypatch.setattr(StoreThread, "serve", busily)
        client.subscribe("a", 1)
        draining = embedded.begin(embedded.server.drain())
        assert client.ended() == 0x8B
        client.close()
        draining.result(PATIENCE)


def test_a_server_ends_though_a_client_reads_nothing(db: ts.Database, caplog: pytest.LogCaptureFixture) -> None:
    """A server stops although a client doesn't read: it waits for `stop_timeout`, then stores the session.

    The log says that not all was sent.
    """
    settings = ServerSettings(
        listeners={"mqtt": ListenerSettings(listen=Address("127.0.0.1:0"))}, limits=Limits(stop_timeout=Duration(0.5))
    )
    with Embedded(db, settings) as embedded, embedded.client() as slow:
        slow.connect("slow", keep=True)
        slow.subscribe("big", options=1)
        db.publish([ts.Message("big", bytes(1 << 20), "program", 1) for _ in range(16)])
        broker = embedded.server._broker
        assert broker is not None
        (connection,) = broker.serving.connections
        wait_until(lambda: connection.unsent, "the client's socket is full")
        embedded.do(embedded.server.drain())
    (info,) = db.sessions
    assert (info.connected, info.in_flight > 0) == (False, True)
    assert "clients have read all" in caplog.text


def test_a_server_ends_though_a_client_that_has_read_all_closes_nothing(db: ts.Database) -> None:
    """A server waits only for clients with unread data, not for idle ones that don't close their connection."""
    settings = ServerSettings(
        listeners={"mqtt": ListenerSettings(listen=Address("127.0.0.1:0"))},
        limits=Limits(stop_timeout=Duration(9_999)),
    )
    with Embedded(db, settings) as embedded, embedded.client() as idle:
        idle.connect("idle")
        embedded.do(embedded.server.drain())
        assert idle.expect("DISCONNECT").reason == 0x8B


def test_a_will_is_published_when_the_server_ends(db: ts.Database) -> None:
    with db.subscribe("wills") as own:
        with Embedded(db) as embedded:
            client = PahoClient(embedded.port, "mortal", prepared=lambda one: one.will_set("wills", b"gone", 1))
            draining = embedded.begin(embedded.server.drain())
            client.ended()
            client.close()
            draining.result(PATIENCE)
        assert [message.payload for message in own.fetch(timeout=PATIENCE).messages] == [b"gone"]


def test_closing_the_database_ends_the_server(tmp_path: Path) -> None:
    """Closing the database first ends the server, and `Server.wait` raises."""
    db = ts.open(tmp_path / "db", backend="memory")
    with Embedded(db) as embedded:
        client = PahoClient(embedded.port, "me")
        waiting = embedded.begin(embedded.server.wait())
        db.close()
        assert client.ended() == 0x8B
        client.close()
        with pytest.raises(ts.DatabaseClosedError):
            waiting.result(PATIENCE)


def test_many_may_wait_for_the_server_and_one_that_gives_up_is_nobody_elses_concern(embedded: Embedded) -> None:
    """Several tasks can wait for the server, and cancelling one of them doesn't affect the others."""

    async def wait_and_drain() -> None:
        impatient = asyncio.ensure_future(embedded.server.wait())
        patient = asyncio.ensure_future(embedded.server.wait())
        await asyncio.sleep(0)  # both tasks wait from here on
        impatient.cancel()
        await asyncio.wait((impatient,))
        assert impatient.cancelled()
        assert not patient.done()
        await embedded.server.drain()
        await patient
        await embedded.server.wait()

    embedded.do(wait_and_drain())


def test_an_address_in_use_is_an_error_and_leaves_nothing_behind(db: ts.Database) -> None:
    async def second(port: int) -> None:
        settings = ServerSettings(listeners={"mqtt": ListenerSettings(listen=Address(f"127.0.0.1:{port}"))})
        async with Server(db, settings):
            pass

    with Embedded(db) as embedded:
        with pytest.raises(ListenError, match="can't listen"):
            asyncio.run(second(embedded.port))
        with PahoClient(embedded.port) as client:
            assert client.publish("a") in (0, 0x10)


def test_stopping_at_once_is_as_if_all_connections_broke(db: ts.Database, embedded: Embedded) -> None:
    client = PahoClient(embedded.port, "me", clean=False, expiry=3600)
    client.subscribe("a", 1)
    assert client.publish("a", b"kept") == 0
    embedded.do(embedded.server.stop())
    client.ended()
    client.close()
    assert not db.sessions["me"].connected
    wait_until(lambda: db.sessions.connected("me") is None, "the session to be ended")
