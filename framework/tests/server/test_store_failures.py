"""Errors in the store's thread: the server continues, and no response says that a failed request succeeded."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import topicstore as ts
from topicstore.server.access.access import Access
from topicstore.server.mqtt.connection import MqttConnection
from topicstore.server.mqtt.store_thread import StoreThread
from topicstore.sessions import Sessions
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded


class Failing:
    """A patch that makes a method raise a number of times, after which it works again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception) -> None:
        self.times = 0
        method = getattr(owner, name)

        def instead(this: Any, *arguments: Any, **values: Any) -> Any:
            if self.times:
                self.times -= 1
                raise error
            return method(this, *arguments, **values)

        monkeypatch.setattr(owner, name, instead)


CONNECT, PUBLISH = wire.connect("me"), wire.publish("a", b"x", qos=1, packet_id=1)
PUBREL, PUBREC = wire.acknowledgement("PUBREL", 1), wire.acknowledgement("PUBREC", 1)
SUBSCRIBE, UNSUBSCRIBE = wire.subscribe(1, [("a", 1)]), wire.unsubscribe(1, ["a"])
UNSERVED, UNANSWERED = "requests could not be served", "a client could not be answered"


@pytest.mark.parametrize(
    ("owner", "step", "packet", "logged"),
    [
        (StoreThread, "_connect", CONNECT, UNSERVED),
        (StoreThread, "_publish", PUBLISH, UNSERVED),
        (StoreThread, "_pubrel", PUBREL, UNSERVED),
        (StoreThread, "_pubrec", PUBREC, UNSERVED),
        (StoreThread, "_subscribe", SUBSCRIBE, UNSERVED),
        (StoreThread, "_unsubscribe", UNSUBSCRIBE, UNSERVED),
        (MqttConnection, "opened", CONNECT, UNANSWERED),
        (MqttConnection, "published", PUBLISH, UNANSWERED),
        (MqttConnection, "released", PUBREL, UNANSWERED),
        (MqttConnection, "unknown", PUBREC, UNANSWERED),
        (MqttConnection, "subscribed", SUBSCRIBE, UNANSWERED),
        (MqttConnection, "unsubscribed", UNSUBSCRIBE, UNANSWERED),
        (MqttConnection, "send", wire.publish("b", b"x"), UNANSWERED),
        (Access, "authenticate", CONNECT, "a client could not be served"),
    ],
)
def test_a_fault_ends_only_the_client_whom_it_concerns(
    embedded: Embedded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    step: str,
    packet: bytes,
    logged: str,
) -> None:
    """An unexpected error ends only the connection of the client concerned, with a reason code, and is logged.

    The client's session can be opened again, and other clients are served.
    """
    failing = Failing(monkeypatch, owner, step, RuntimeError("a fault"))
    with embedded.client() as client, embedded.client("other") as other:
        if packet is not CONNECT:
            client.connect("me", session_expiry_interval=3600)
            client.subscribe("b", options=1)
        failing.times = 1
        client.send(packet)
        assert client.farewell() == ("CONNACK" if packet is CONNECT else "DISCONNECT", 0x80)
        assert other.subscribe("a", options=1) == (1,)
        assert [one.message for one in caplog.records if one.levelno == logging.ERROR] == [logged]
        with embedded.client() as again:
            assert again.connect("me").reason == 0
            assert again.subscribe("b", options=1) == (1,)


def test_a_goodbye_that_failed_is_said_later(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed DISCONNECT is repeated later, so that the session doesn't stay connected."""
    failing = Failing(monkeypatch, StoreThread, "_disconnect", RuntimeError("a fault"))
    with embedded.client("me", session_expiry_interval=3600) as client:
        failing.times = 1
        client.send(wire.disconnect())
        client.ended()
    wait_until(lambda: embedded.db.sessions.connected("me") is None, "the connection to end")


def test_a_session_that_was_opened_for_nobody_is_closed(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose CONNACK reports a failure is closed."""
    failing = Failing(monkeypatch, StoreThread, "_deliver", RuntimeError("a fault"))
    with embedded.client("other"):
        failing.times = 1
        with embedded.client() as late:
            assert late.connect("me").reason == 0x80
    wait_until(lambda: embedded.db.sessions.connected("me") is None, "the connection to end")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ts.QuotaExceededError("full"), 0x97),
        (ts.StorageFullError("full"), 0x97),
        (ts.ShardReadOnlyError("read only"), 0x97),
        (ts.EngineError("broken"), 0x80),
        (ts.TooManyOpenFilesError("too many"), 0x80),
    ],
)
def test_an_error_of_the_store_reaches_the_client(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, error: ts.TopicstoreError, code: int
) -> None:
    """The client gets a reason code for each error of the store."""
    failing = Failing(monkeypatch, Sessions, "publish", error)
    with embedded.client("me") as client:
        failing.times = 3
        for qos in (1, 2, 1):
            assert client.publish("a", b"x", qos).reason == code
        answer = client.publish("a", b"x", 2)
        assert (answer.kind, answer.reason) == ("PUBCOMP", 0)


def test_a_failure_that_lasts_is_a_line_and_its_end_another(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(monkeypatch, Sessions, "publish", ts.StorageFullError("no room"))
    with embedded.client("me") as client:
        failing.times = 5
        for _ in range(6):
            client.publish("a", b"x")
    lines = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert lines == ["storing failed: no room", "storing works again"]


def test_a_shard_that_moves_needs_no_operator(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure because a shard moves to another site is logged as information, and every other one as a warning."""
    caplog.set_level(logging.INFO)
    moved = ts.ShardMovedError("site a is releasing shard 1")
    failing = Failing(monkeypatch, Sessions, "publish", moved)
    ticks = Failing(monkeypatch, Sessions, "tick", ExceptionGroup("two", [moved, ExceptionGroup("more", [moved])]))  # type: ignore[arg-type]
    with embedded.client("me") as client:
        failing.times, ticks.times = 1, 1
        client.send(wire.publish("a", b"x", qos=1, packet_id=1))
        client.ended()
    with embedded.client("me") as client:
        assert client.publish("a", b"x", 1).reason < 0x80
        wait_until(lambda: not ticks.times, "a tick")
        client.publish("a", b"x", 1)
    lines = [(one.levelno, one.message) for one in caplog.records if one.message.startswith(("storing", "what is due"))]
    assert {logging.INFO} == {level for level, _ in lines}
    assert {"storing failed: site a is releasing shard 1", "storing works again"} <= {text for _, text in lines}
    assert any(text.startswith("what is due failed") for _, text in lines)


def test_a_client_that_can_not_be_opened_gets_the_reason(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, Sessions, "open_many", ts.StorageFullError("no room"))
    for version, code in ((4, 3), (5, 0x97)):
        with embedded.client(version=version) as client:
            failing.times = 1
            assert client.connect("me").reason == code
            assert client.ended() is None


@pytest.mark.parametrize(
    "error", [ts.StorageFullError, ts.ShardReadOnlyError, ts.EngineError, ts.TooManyOpenFilesError]
)
def test_clients_do_not_learn_where_the_server_keeps_its_files(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """Responses don't contain paths of the server's files; the log does."""
    caplog.set_level(logging.INFO)
    opening = Failing(monkeypatch, Sessions, "open_many", error("/srv/db/shard-0000: no"))
    with embedded.client() as client:
        opening.times = 1
        refused = client.connect("me")
        client.ended()
    subscribing = Failing(monkeypatch, Sessions, "subscribe", error("/srv/db/shard-0000: no"))
    freeing = Failing(monkeypatch, Sessions, "pubrel", error("/srv/db/shard-0000: no"))
    with embedded.client("me") as client:
        subscribing.times = freeing.times = 1
        client.send(wire.subscribe(1, [("a", 1)]))
        denied = client.expect("SUBACK")
        client.send(wire.acknowledgement("PUBREL", 1))
        ended = client.ended()
    assert ended is not None
    for packet in (refused, denied, ended):
        assert packet.properties["reason_string"]
        assert "shard" not in str(packet.properties["reason_string"])
    assert "/srv/db/shard-0000: no" in caplog.text


def test_deliveries_that_failed_are_made_later(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, Sessions, "deliver_batches", ts.StorageFullError("not now"))
    with embedded.client("me") as client:
        client.subscribe("a", options=1)
        failing.times = 3
        embedded.db.publish([ts.Message("a", b"late", "program", 1)])
        assert [packet.payload for packet in client.publishes(1)] == [b"late"]
