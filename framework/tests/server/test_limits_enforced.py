"""Clients that exceed a limit are refused with a reason, and other clients are unaffected."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.server.config.model import Limits, LocalWriteBuffer, ServerSettings, StorageSettings
from topicstore.server.config.units import Duration, Size
from topicstore.server.mqtt.publish import Rate
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient

both = pytest.mark.parametrize("version", [4, 5])


def storage(buffer: LocalWriteBuffer) -> dict[str, StorageSettings]:
    return {"messages": StorageSettings(local_write_buffer=buffer)}


def limited(db: ts.Database, limits: Limits) -> Embedded:
    return Embedded(db, ServerSettings(limits=limits))


@both
def test_one_client_too_many_is_refused(db: ts.Database, version: int) -> None:
    """A client above the limit on connections is refused until another one disconnects."""
    with limited(db, Limits(connections=2)) as embedded, PahoClient(embedded.port, "first") as first:
        with PahoClient(embedded.port, "second"):
            with embedded.client(version=version) as client:
                assert client.connect("third").reason == (3 if version == 4 else 0x97)
                assert client.ended() is None
            assert first.publish("a") in (0, 0x10)
        wait_until(lambda: db.sessions.connected("second") is None, "the second to be gone")
        with embedded.client(version=version) as client:
            assert client.connect("third").reason == 0


def test_clients_that_connect_at_once_are_counted_too(db: ts.Database) -> None:
    """Clients that connect at the same time count towards the limit before their CONNACK, unless they are refused."""
    with limited(db, Limits(connections=3)) as embedded:
        for _ in range(2):
            with ExitStack() as clients:
                many = [clients.enter_context(embedded.client()) for _ in range(20)]
                for number, client in enumerate(many):
                    client.send(wire.connect(f"client-{number}"))
                reasons = [client.expect("CONNACK").reason for client in many]
                assert sorted(reasons) == [0] * 3 + [0x97] * 17
            wait_until(lambda: not embedded.server.traffic.connected, "all of them to be gone")


@both
def test_names_that_are_too_long_are_refused(db: ts.Database, version: int) -> None:
    """Client ids and user names above their limits in bytes are refused."""
    refused = (2, 4) if version == 4 else (0x85, 0x86)
    with limited(db, Limits(client_id_length=24, user_name_length=8)) as embedded:
        for client_id, user, reason in (
            ("\u00e4" * 12, "\u00e4" * 4, 0),
            ("\u00e4" * 12 + "a", "ann", refused[0]),
            ("x" * 60_000, "ann", refused[0]),
            ("x", "\u00e4" * 4 + "a", refused[1]),
            ("x", "x" * 60_000, refused[1]),
        ):
            with embedded.client(version=version) as client:
                assert client.connect(client_id, user_name=user, password=b"").reason == reason
    with limited(db, Limits()) as embedded:
        for length, reason in ((1_024, 0), (1_025, refused[0])):
            with embedded.client(version=version) as client:
                assert client.connect("x" * length).reason == reason


@both
@pytest.mark.parametrize("limits", [Limits(stored_sessions=2), Limits(stored_sessions_per_user=2)])
def test_one_stored_session_too_many_is_refused(db: ts.Database, limits: Limits, version: int) -> None:
    """A session above the limit on stored sessions is refused.

    Stored sessions can still be resumed, and sessions in memory opened; when a stored session ends, another can be
    opened.
    """
    kept = {"clean": False} | ({} if version == 4 else {"session_expiry_interval": 3600})
    with limited(db, limits) as embedded:

        def connected(client_id: str, **how: Any) -> int:
            with embedded.client(version=version) as client:
                return int(client.connect(client_id, **how).reason)

        assert [0, 0] == [connected(client_id, **kept) for client_id in ("one", "two")]
        assert connected("three", **kept) == (3 if version == 4 else 0x97)
        assert [0, 0] == [connected("one", **kept), connected("four")]
        db.sessions.expire("two")
        assert connected("three", **kept) == 0


@both
def test_one_filter_too_many_is_refused(db: ts.Database, version: int) -> None:
    """A filter above the limit is refused alone; existing subscriptions may be changed.

    The subscriptions of a resumed session count towards the limit.
    """
    refused = 0x80 if version == 4 else 0x97
    with limited(db, Limits(subscriptions=3)) as embedded:
        with embedded.client("me", keep=True, version=version) as client:
            assert client.subscribe("a", "b", options=1) == (1, 1)
            assert client.subscribe("a", "c", "d", options=1) == (1, 1, refused)
            assert client.subscribe("b", options=2) == (2,)
            assert client.subscribe("d", "c", options=1) == (refused, 1)
            client.send(wire.unsubscribe(90, ["a"], version=version))
            client.expect("UNSUBACK")
            assert client.subscribe("d", options=1) == (1,)
        with embedded.client(version=version) as client:
            assert client.connect("me", keep=True).present
            assert [client.subscribe("e"), client.subscribe("d")] == [(refused,), (0,)]


@both
def test_topics_with_too_many_levels_are_refused(db: ts.Database, version: int) -> None:
    """Topics with too many levels are refused.

    In MQTT 3.1.1 such a PUBLISH ends the connection at any QoS, because no acknowledgement can refuse it.
    """
    with (
        limited(db, Limits(topic_levels=3)) as embedded,
        embedded.client(version=version) as client,
        PahoClient(embedded.port) as reader,
    ):
        reader.subscribe("#")
        client.connect("me")
        if version == 5:
            assert client.publish("a/b/c/d", b"too deep").reason == 0x90
        for qos in (0, 1, 2) if version == 4 else ():
            with embedded.client("other", version=version) as other:
                other.send(wire.publish("a/b/c/d", b"too deep", qos=qos, packet_id=qos, version=version))
                assert other.ended() is None
        client.publish("a/b/c", b"deep")
        assert reader.payloads(1) == ["deep"]
        assert client.subscribe("a/b/c/d", "a/b/c") == (0x80 if version == 4 else 0x8F, 0)
        assert client.subscribe("$share/g/a/b/c") == (0,)


@both
def test_a_packet_that_is_too_large_ends_its_connection(db: ts.Database, version: int) -> None:
    """A packet above the size limit ends its connection, and the packets before it are processed."""
    with limited(db, Limits(packet_size=Size(1_000))) as embedded, embedded.client(version=version) as client:
        db.persistence.add("#")
        client.connect("me")
        client.send(
            wire.publish("a", b"kept", qos=1, packet_id=1, version=version),
            wire.publish("a", bytes(1_000), qos=1, packet_id=2, version=version),
        )
        last = client.farewell()  # in MQTT 3.1.1 the server may still send the PUBACK of the first packet
        assert version == 4 or last == ("DISCONNECT", 0x95)
        wait_until(lambda: [one.payload for one in db.replay("#")] == [b"kept"], "the first message to be stored")


def test_an_older_client_may_have_any_number_in_flight(db: ts.Database) -> None:
    with limited(db, Limits(in_flight=2)) as embedded, embedded.client("me", version=4) as client:
        client.send(*[wire.publish("a", b"x", qos=1, packet_id=number, version=4) for number in range(1, 101)])
        assert [client.expect("PUBACK").packet_id for _ in range(100)] == list(range(1, 101))


@both
def test_a_client_is_sent_as_many_as_it_may_be(db: ts.Database, version: int) -> None:
    """A client has at most `in_flight_out` unacknowledged messages; later messages wait in the store."""
    with limited(db, Limits(in_flight_out=2)) as embedded, embedded.client("me", version=version) as client:
        client.subscribe("a", options=1)
        db.publish([ts.Message("a", b"%d" % number, "program", 1) for number in range(5)])
        first, second = client.publishes(2)
        client.ping()
        client.acknowledge(first)
        [third] = client.publishes(1)
        client.ping()
        client.acknowledge(second)
        client.acknowledge(third)
        assert [packet.payload for packet in (first, second, third, *client.publishes(2))] == [
            b"%d" % number for number in range(5)
        ]


def test_whoever_publishes_too_fast_is_disconnected_if_the_settings_say_so(db: ts.Database) -> None:
    limits = Limits(publish_rate=10, over_rate="disconnect")
    with limited(db, limits) as embedded, embedded.client("me") as client, PahoClient(embedded.port) as other:
        client.send(*[wire.publish("a", b"x") for _ in range(11)])
        assert client.farewell() == ("DISCONNECT", 0x96)
        assert other.publish("a") in (0, 0x10)


@pytest.mark.parametrize("limits", [Limits(publish_rate=50), Limits(publish_bytes=Size(5_000))])
def test_whoever_publishes_too_fast_is_slowed_down(db: ts.Database, limits: Limits) -> None:
    """A client that publishes too fast is slowed down without losing messages; other clients aren't slowed down.

    A client that the server slows down doesn't count as silent.
    """
    with limited(db, limits) as embedded, embedded.client() as client, PahoClient(embedded.port) as other:
        client.connect("me", keep_alive=1)
        payload = bytes(97)
        client.send(*[wire.publish("a", payload, qos=1, packet_id=number) for number in range(1, 121)])
        assert [client.expect("PUBACK").packet_id for _ in range(120)] == list(range(1, 121))
        assert embedded.held() == 1
        client.send(wire.PINGREQ)
        for _ in range(10):
            assert other.publish("b") in (0, 0x10)
        assert embedded.held() == 1
        client.expect("PINGRESP")
        assert embedded.held() == 0


def test_a_connection_without_a_connect_is_closed_in_time(db: ts.Database) -> None:
    """A connection without a complete CONNECT is closed after the connect timeout."""
    with limited(db, Limits(connect_timeout=Duration(0.05))) as embedded:
        with embedded.client() as client:
            assert client.ended() is None
        with embedded.client() as client:
            client.send(wire.connect("me")[:-1])
            assert client.ended() is None


def test_a_commit_has_a_bounded_number_of_messages(db: ts.Database) -> None:
    """A commit has a limited number of messages; later ones wait in their sockets."""
    settings = ServerSettings(durable_storage=storage(LocalWriteBuffer(max_items=7)))
    with Embedded(db, settings) as embedded:
        db.persistence.add("#")
        clients = [embedded.client() for _ in range(10)]
        for number, client in enumerate(clients):
            client.connect(f"client-{number}")
            client.send(*[wire.publish("a", b"x", qos=1, packet_id=one) for one in range(1, 201)])
        for client in clients:
            assert [client.expect("PUBACK").packet_id for _ in range(200)] == list(range(1, 201))
            client.close()
    assert sum(1 for _ in db.replay("#")) == 2_000


def test_a_busy_server_may_wait_for_more(db: ts.Database) -> None:
    """With ``flush_interval``, a busy server collects messages at most until the next flush, and loses none."""
    settings = ServerSettings(durable_storage=storage(LocalWriteBuffer(flush_interval=Duration(0.01))))
    with Embedded(db, settings) as embedded, PahoClient(embedded.port) as client:
        for _ in range(20):
            assert client.publish("a", b"x") in (0, 0x10)


def test_a_server_that_waits_for_more_waits_no_longer_than_until_a_commit_is_full(db: ts.Database) -> None:
    buffer = LocalWriteBuffer(max_items=5, flush_interval=Duration(3_600))
    with Embedded(db, ServerSettings(durable_storage=storage(buffer))) as embedded, embedded.client("me") as client:
        client.send(*[wire.publish("a", b"x", qos=1, packet_id=one) for one in range(1, 6)])
        assert [client.expect("PUBACK").packet_id for _ in range(5)] == list(range(1, 6))
        client.send(*[wire.publish("a", b"x", qos=1, packet_id=one) for one in range(1, 3)])
        client.ping()  # these messages have arrived, and wait in the server
        client.send(*[wire.publish("a", b"x", qos=1, packet_id=one) for one in range(3, 6)])
        assert [client.expect("PUBACK").packet_id for _ in range(5)] == list(range(1, 6))
        client.send(wire.disconnect())
        assert client.ended() is None


# --- rates ---


def test_a_second_has_so_many_messages_and_bytes() -> None:
    """A rate limit counts messages and bytes per second: after a burst, the sender must wait; None means no limit."""
    rate = Rate(10, None)
    assert rate.take(10, 0, now=100.0) == 0.0
    assert rate.take(1, 0, now=100.5) == 0.5
    assert rate.take(10, 0, now=101.0) == 1.0  # one message was taken half a second early, and delays the next ones
    assert rate.take(9, 0, now=105.0) == 0.0
    rate = Rate(None, 1_000)
    assert rate.take(1, 5_500, now=0.0) == 5.0
    assert rate.take(0, 0, now=5.0) == 0.0
    assert rate.take(1, 501, now=5.0) == 1.0
    assert Rate(None, None).take(10**9, 10**12, now=0.0) == 0.0


def test_what_waits_for_a_session_is_bounded(db: ts.Database, caplog: pytest.LogCaptureFixture) -> None:
    """An absent client gets the newest ``max_queued`` messages; dropped ones are counted, in ``$SYS`` too, and logged.

    The messages stay stored. A reload changes the limit.
    """
    db.persistence.add("#")
    with limited(db, Limits()) as embedded:
        with embedded.client("away", keep=True) as client:
            assert (1,) == client.subscribe("a", options=1)
        with embedded.client("writer") as writer:
            for number in range(10):
                writer.publish("a", b"%d" % number)
        wait_until(lambda: db.sessions.connected("away") is None, "the client to be gone")
        embedded.do(
            embedded.server.reload(msgspec.structs.replace(embedded.server.settings, limits=Limits(max_queued=3)))
        )
        wait_until(lambda: db.sessions.counts().skipped.messages == 7, "the oldest to be dropped")
        with embedded.client("away", keep=True) as client:
            assert [b"7", b"8", b"9"] == [one.payload for one in client.publishes(3)]
        with embedded.client("watcher") as watcher:
            assert (0,) == watcher.subscribe("$SYS/broker/publish/messages/dropped")
            assert b"7" == watcher.publishes(1)[0].payload
        assert 10 == sum(1 for _ in db.replay("a"))
    logged = [getattr(one, "fields", {}) for one in caplog.records if "too many waited" in one.getMessage()]
    assert [{"client_id": "away", "messages": 7, "payload_bytes": 7}] == logged
