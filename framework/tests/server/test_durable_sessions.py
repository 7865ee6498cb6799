"""The effects of durable session settings on MQTT clients: general settings, and those of a listener's zone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.server.config.model import DurableSessionsSettings, ServerSettings, ZoneSessionsSettings, ZoneSettings
from topicstore.server.config.units import Duration
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.wire import Will

both = pytest.mark.parametrize("version", [4, 5])


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(durable_sessions=DurableSessionsSettings(**values))


@both
def test_sessions_that_are_not_durable_end_with_the_connection(db: ts.Database, version: int) -> None:
    """With durable sessions disabled, a session ends with its connection and isn't stored.

    The CONNACK tells an MQTT 5 client that its session expires at once.
    """
    with Embedded(db, settings(enable=False)) as embedded:
        with embedded.client(version=version) as client:
            answer = client.connect("c", keep=True)
            assert not answer.present
            if version == 5:
                assert answer.properties["session_expiry_interval"] == 0
            client.subscribe("a/#", options=1)
            assert [] == [info.client_id for info in db.sessions if not info.connected]
            client.leave()
        with pytest.raises(ts.SessionNotFoundError):
            db.sessions["c"]
        with embedded.client(version=version) as client:
            assert not client.connect("c", keep=True).present


def test_a_will_of_a_session_that_is_not_durable_is_published(db: ts.Database) -> None:
    """The will of a session that isn't durable is published when its connection breaks."""
    with Embedded(db, settings(enable=False)) as embedded, embedded.client("other") as other:
        other.subscribe("will", options=1)
        with embedded.client() as client:
            client.connect("c", will=Will(topic="will", payload=b"gone", qos=1), keep=True)
        assert b"gone" == other.expect("PUBLISH").payload


def test_what_was_kept_ends_when_the_client_comes_to_sessions_that_are_not_durable(db: ts.Database) -> None:
    """A stored session ends when its client connects after durable sessions were disabled."""
    with Embedded(db) as embedded:
        with embedded.client("c", keep=True) as client:
            client.subscribe("a/#", options=1)
            client.leave()
        assert ["c"] == [info.client_id for info in db.sessions]
        off = DurableSessionsSettings(enable=False)
        embedded.do(embedded.server.reload(msgspec.structs.replace(embedded.server.settings, durable_sessions=off)))
        with embedded.client() as client:
            assert not client.connect("c", keep=True).present
            client.leave()
        assert [] == list(db.sessions)


def test_a_zone_has_settings_of_its_own(db: ts.Database) -> None:
    """A listener may name a zone, a table of settings; the general settings apply to all that this table omits."""
    with Embedded(db, settings(batch_size=50)) as embedded:
        own = ZoneSessionsSettings(enable=False, batch_size=3)
        before = embedded.server.settings
        mqtt = before.listeners["mqtt"]
        with embedded.client("general", keep=True) as client:
            assert 50 == batch_size(db, "general")
            changed = msgspec.structs.replace(
                before,
                zones={"away": ZoneSettings(durable_sessions=own)},
                listeners={"mqtt": msgspec.structs.replace(mqtt, zone="away")},
            )
            reloaded = embedded.do(embedded.server.reload(changed))
            assert ("zones.away", "listeners.mqtt.zone") == reloaded.changed
            with embedded.client() as second:
                assert second.connect("zoned", keep=True).properties["session_expiry_interval"] == 0
                assert 3 == batch_size(db, "zoned")
            client.ping()


def batch_size(db: ts.Database, client_id: str) -> int | None:
    """Return the batch size of a client's session."""
    session = db.sessions.connected(client_id)
    assert session is not None
    return session.batch_size


def test_a_session_that_takes_little_at_once_gets_everything(db: ts.Database) -> None:
    """A session with a small batch size gets all messages in order."""
    with Embedded(db, settings(batch_size=2)) as embedded, embedded.client("c") as client:
        client.subscribe("a", options=1)
        db.publish([ts.Message("a", str(number).encode(), "p", qos=1) for number in range(9)])
        payloads = [packet.payload for packet in client.publishes(9)]
        assert [str(number).encode() for number in range(9)] == payloads


def test_messages_wake_a_session_however_long_it_may_sleep(db: ts.Database) -> None:
    """A message wakes a session at once, even if the polling intervals are an hour."""
    hour = Duration(3_600)
    slow = settings(idle_poll_interval=hour, renew_streams_interval=hour, session_gc_interval=hour)
    with Embedded(db, slow) as embedded, embedded.client("c") as client:
        client.subscribe("a/#", options=1)
        for number in range(3):
            db.publish([ts.Message(f"a/{number}", b"new stream", "p", qos=1)])
            assert f"a/{number}" == client.expect("PUBLISH").topic
        assert 3_600.0 == db.sessions.pace.longest_pause
