"""Messages that can't be stored are refused with a reason, and subscribers still receive earlier messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server.codec.reason import ReasonCode
from topicstore.server.mqtt.acknowledgements import answer_publishes
from topicstore.server.mqtt.publish import Pending
from topicstore.server.mqtt.store_thread import PublishedPart
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient


@pytest.fixture
def full(db: ts.Database) -> Iterator[Embedded]:
    """A server whose database has reached its quota, with a disconnected session that has two messages waiting."""
    with Embedded(db) as embedded:
        with PahoClient(embedded.port, "away", clean=False, expiry=3600) as client:
            client.subscribe("kept/#", 2)
        with PahoClient(embedded.port, "early") as client:
            assert client.publish("kept/1", b"1", 1) == 0
            assert client.publish("kept/2", b"2", 2) == 0
        db.retention.set(max_bytes=1)
        yield embedded


def test_a_client_gets_the_reason_that_there_is_no_room(full: Embedded) -> None:
    """A client that gets 0x97, quota exceeded, stays connected, and can publish when space is free again."""
    with full.client("me", receive_maximum=10) as client:
        for qos in (1, 2) * 3:
            answer = client.publish("kept/3", b"3", qos)
            assert (answer.kind, answer.reason) == ("PUBACK" if qos == 1 else "PUBREC", 0x97)
        client.ping()
        assert [message.payload for message in full.db.replay("#")] == [b"1", b"2"]
        full.db.retention.set(max_bytes=None)
        assert client.publish("kept/3", b"3").reason == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_a_client_of_3_1_1_is_disconnected_instead(full: Embedded, qos: int) -> None:
    """An MQTT 3.1.1 client is disconnected if the quota is exceeded, because its acknowledgements can't report that."""
    with full.client("me", version=4) as client, full.client("other", version=4) as other:
        client.send(wire.publish("kept/3", b"3", qos=qos, packet_id=1, version=4))
        assert client.ended() is None
        other.ping()


def test_who_was_away_gets_what_there_is(full: Embedded) -> None:
    """At the quota, a returning client still gets its messages, because only small packet ids are written."""
    with PahoClient(full.port, "away", clean=False, expiry=3600) as client:
        assert client.payloads(2) == ["1", "2"]
        assert client.subscribe("more") == 1


def test_what_need_not_be_stored_is_passed_on(full: Embedded) -> None:
    """At the quota, messages that needn't be stored are still routed, even beside messages that are refused."""
    with PahoClient(full.port, "live") as reader, full.client() as writer:
        reader.subscribe("live/#", 0)
        writer.connect("writer")
        writer.send(
            wire.publish("live/0", b"0"), wire.publish("kept/3", b"3", qos=1, packet_id=1), wire.publish("live/1", b"1")
        )
        assert writer.expect("PUBACK").reason == 0x97
        assert reader.payloads(2) == ["0", "1"]


FILLED = """
import contextlib, os
import topicstore as ts
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded

directory, options = arguments[0], {"rocksdb": {"write_buffer_bytes": 4 << 20}}
with open(directory + "/others", "wb") as others:
    others.write(bytes(16 << 20))
full = contextlib.suppress(ts.StorageFullError, ts.EngineError)  # as closing says, too
with full, ts.open(directory + "/db", options=options) as db, Embedded(db) as embedded:
    with embedded.client("reader", session_expiry_interval=3600) as reader:
        reader.subscribe("kept", options=1)
    with embedded.client("live") as live, embedded.client() as writer, embedded.client() as other:
        live.subscribe("live", options=0)
        writer.connect("writer")
        other.connect("other")
        acknowledged = 0
        for number in range(2_000):
            answer = writer.publish("kept", b"%08d" % number + os.urandom(100_000))
            if answer.reason:
                break
            acknowledged += 1
        say(answer.kind, hex(answer.reason), acknowledged > 100)
        other.send(wire.publish("live", b"still there"))
        say(live.expect("PUBLISH").payload.decode())
        answer = other.publish("kept", os.urandom(100_000))
        say(hex(answer.reason))
        other.ping()
    with embedded.client() as late:
        say(hex(late.connect("late").reason))  # its session needs no room
    with embedded.client() as late:
        say(hex(late.connect("lasting", session_expiry_interval=3600).reason))
os.remove(directory + "/others")
with ts.open(directory + "/db", options=options) as db:
    say(sum(1 for _ in db.replay("kept")) >= acknowledged)
"""


@pytest.mark.slow
def test_a_full_disk_refuses_messages_and_serves_who_listens(tmp_path: Path) -> None:
    """On a full disk messages are refused, subscribers are served, and no acknowledged message is lost.

    A client whose session would have to be stored can't connect.
    """
    need("rocksdb")
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    said = namespaces.run_mounted(namespaces.SMALL, tmp_path, 96 << 20, FILLED, tmp_path)
    assert said == [["PUBACK", "0x97", True], ["still there"], ["0x97"], ["0x0"], ["0x97"], [True]]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_publish_that_failed_with_another_client_s_shard_ends_the_connection(
    db: ts.Database, version: int, qos: int
) -> None:
    """If a moving shard fails a whole batch, the server also disconnects clients whose own shard has not moved.

    Their sessions don't end with the moving shard, so without a disconnect these clients would wait forever.
    """
    session, pending = db.sessions.open("stays"), Pending()
    (pending.ids1 if qos == 1 else pending.ids2).append(7)
    moved = ts.ShardMovedError("site a is releasing shard 1")
    rows = [(session, ts.Message("t", b"", "stays", qos=qos), 7)]
    part = PublishedPart(client=None, what=pending, rows=rows, matched=[False], refused={0: moved})  # type: ignore[arg-type]
    answer = answer_publishes(version, part)
    assert (b"", str(moved), ReasonCode.USE_ANOTHER_SERVER) == (answer.data, answer.end, answer.reason)
