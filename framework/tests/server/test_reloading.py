"""New settings for a running server: immediate effects, changes that need a restart, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.server.config.model import (
    AuthenticationSettings,
    AuthorizationSettings,
    DurableSessionsSettings,
    HttpSettings,
    Limits,
    ListenerSettings,
    LogSettings,
    PersistenceSettings,
    ProtocolSettings,
    Rule,
    StorageSettings,
    ZoneSessionsSettings,
    ZoneSettings,
)
from topicstore.server.config.units import Address, Duration, Period, Quota
from topicstore_conformance.mqtt.embedded import Embedded


def reload(embedded: Embedded, **changes: Any) -> tuple[list[str], list[str]]:
    """Change settings of a server; return the changed settings and those that need a restart."""
    settings = msgspec.structs.replace(embedded.server.settings, **changes)
    reloaded = embedded.do(embedded.server.reload(settings))
    return list(reloaded.changed), list(reloaded.needs_restart)


def test_nothing_new_changes_nothing(embedded: Embedded) -> None:
    """Reloading unchanged settings changes neither listeners nor the database."""
    before = embedded.server.addresses
    assert ([], []) == reload(embedded)
    assert before == embedded.server.addresses
    assert 1 == len(embedded.db.generations())


def test_limits_hold_for_clients_that_connect(embedded: Embedded) -> None:
    """New limits apply to clients that connect afterwards; connected clients keep their limits."""
    with embedded.client() as first, embedded.client() as second:
        assert 1_000 == first.connect("first").properties["receive_maximum"]
        changed = reload(embedded, limits=Limits(in_flight=7, connections=2))
        assert (["limits.connections", "limits.in_flight"], []) == changed
        assert 7 == second.connect("second").properties["receive_maximum"]
        with embedded.client() as third:
            assert 0x97 == third.connect("third").reason
        first.ping()


def test_access_rules_hold_for_all_clients(embedded: Embedded) -> None:
    """New access rules also apply to connected clients, without authenticating them again."""
    rules = (Rule(permission="deny", action="publish", topics=("secret",)),)
    with embedded.client("before") as before, embedded.client() as after:
        changed = reload(embedded, authorization=AuthorizationSettings(rules=rules, unlisted="allow"))
        assert (["authorization.rules", "authorization.unlisted"], []) == changed
        after.connect("after")
        assert before.publish("secret").reason == 0x87
        assert after.publish("secret").reason == 0x87
        assert after.publish("open").reason in (0, 0x10)
    with embedded.client("before") as before, embedded.client() as client:
        changed = reload(embedded, authentication=AuthenticationSettings(anonymous="never"))
        assert changed[0] == ["authentication.anonymous"]
        assert client.connect("anonymous").reason == 0x87
        before.ping()


def test_what_cannot_be_used_changes_nothing(embedded: Embedded, tmp_path: Path) -> None:
    """If one new setting can't be used, none is changed.

    Examples are an invalid password file, an address in use, and an unknown layout.
    """
    before, addresses = embedded.server.settings, embedded.server.addresses
    (tmp_path / "users").write_text("no user")
    taken = ListenerSettings(listen=Address(addresses[0]))
    other = Limits(connections=3)
    for wrong in (
        {"authentication": AuthenticationSettings(password_file=tmp_path / "users")},
        {"authentication": AuthenticationSettings(plugins=("nowhere",))},
        {"listeners": {"mqtt": before.listeners["mqtt"], "other": taken}},
        {"durable_storage": {"messages": StorageSettings(layout={"type": "nowhere"})}},
        {"durable_storage": {"messages": StorageSettings(layout={"type": "block", "nowhere": 1})}},
        {"durable_storage": {"messages": StorageSettings(n_shards=2)}},
        {"durable_storage": {"messages": StorageSettings(backend="rocksdb")}},
    ):
        with pytest.raises(ts.TopicstoreError):
            reload(embedded, limits=other, **wrong)
        assert before == embedded.server.settings
        assert addresses == embedded.server.addresses
        assert 1 == len(embedded.db.generations())
    with embedded.client() as client:
        assert 0 == client.connect("still").reason


def test_a_listener_gets_another_name(embedded: Embedded) -> None:
    """A listener can be renamed; its address stays, and clients can connect."""
    address = embedded.server.addresses[0]
    renamed = {"other": ListenerSettings(listen=Address(address))}
    assert (["listeners.mqtt", "listeners.other"], []) == reload(embedded, listeners=renamed)
    assert [address] == embedded.server.addresses
    with embedded.client() as client:
        assert 0 == client.connect("here").reason


def test_listeners_open_change_and_close(embedded: Embedded) -> None:
    """Listeners are added, changed and removed; a listener whose address stays the same keeps its port.

    Clients of a removed listener stay connected.
    """
    mqtt = embedded.server.settings.listeners["mqtt"]
    free = Address("127.0.0.1:0")
    with embedded.client("stays") as client:
        added = {"mqtt": mqtt, "web": ListenerSettings(listen=free, protocol="websocket")}
        assert (["listeners.web"], []) == reload(embedded, listeners=added)
        assert [embedded.port, "ws"] == [
            Address(embedded.server.addresses[0]).port,
            embedded.server.listeners[1].via.scheme,
        ]
        changed = {**added, "web": msgspec.structs.replace(added["web"], path="/other")}
        web = embedded.server.addresses[1]
        assert (["listeners.web.path"], []) == reload(embedded, listeners=changed)
        assert [f"ws://{web}/other"] == embedded.server.listeners[1].urls
        assert (["listeners.mqtt"], []) == reload(embedded, listeners={"web": changed["web"]})
        assert [web] == embedded.server.addresses
        client.ping()
        with pytest.raises(ConnectionRefusedError):
            embedded.client()


def test_a_changed_layout_begins_a_generation(embedded: Embedded) -> None:
    """A changed layout begins a new generation; the previous generation keeps its messages."""
    db = embedded.db
    db.store([ts.Message("a", b"1", "c")])
    layout = {"type": "skipstream"}
    changed = reload(embedded, durable_storage={"messages": StorageSettings(layout=layout)})
    assert (["durable_storage.messages.layout.type"], []) == changed
    db.store([ts.Message("a", b"2", "c")])
    assert [("block", 1), ("skipstream", 1)] == [(one.layout, one.messages) for one in db.generations()]
    assert [b"1", b"2"] == [message.payload for message in db.replay("a")]
    reload(embedded)
    reload(embedded, durable_storage={"messages": StorageSettings()})
    assert 2 == len(db.generations())


def test_changed_options_of_the_layout_begin_a_generation(embedded: Embedded) -> None:
    """A changed layout option, such as `epoch_bits`, begins a new generation; an unchanged value doesn't."""
    for bits, count in ((18, 2), (18, 2), (19, 3)):
        layout = {"type": "wildcard_optimized", "epoch_bits": bits}
        reload(embedded, durable_storage={"messages": StorageSettings(layout=layout)})
        assert (count, bits) == (len(embedded.db.generations()), embedded.db.generations()[-1].options["epoch_bits"])


def test_what_the_database_keeps_changes(embedded: Embedded) -> None:
    """Retention, quota and persistence rules can be changed; settings removed from the file keep their effect.

    The reload reports such settings as kept.
    """
    sessions = DurableSessionsSettings(
        message_retention_period=Period(86_400),
        persistence=(PersistenceSettings(topic_filter="a/#", client_id="c", least_qos=1),),
    )
    storage = StorageSettings(quota=Quota(1_000_000), when_full="drop")
    reload(embedded, durable_sessions=sessions, durable_storage={"messages": storage})
    retention = embedded.db.retention.settings
    assert (86_400.0, 1_000_000, "drop") == (retention.max_age, retention.max_bytes, retention.when_full)
    assert [("a/#", "c", 1)] == [(one.topic_filter, one.client_id, one.least_qos) for one in embedded.db.persistence]
    emptied = msgspec.structs.replace(
        embedded.server.settings, durable_sessions=DurableSessionsSettings(), durable_storage={}
    )
    reloaded = embedded.do(embedded.server.reload(emptied))
    assert ((), ()) == (reloaded.changed, reloaded.needs_restart)
    assert reloaded.kept == (
        "durable_sessions.message_retention_period",
        "durable_sessions.persistence",
        "durable_storage.messages.quota",
        "durable_storage.messages.when_full",
    )
    assert retention == embedded.db.retention.settings
    assert 1 == len(embedded.db.persistence)
    endless = DurableSessionsSettings(message_retention_period=Period.read("infinity"))
    reload(
        embedded, durable_sessions=endless, durable_storage={"messages": StorageSettings(quota=Quota.read("infinity"))}
    )
    assert (None, None) == (embedded.db.retention.settings.max_age, embedded.db.retention.settings.max_bytes)


def test_what_the_database_is_already_changes_nothing(embedded: Embedded) -> None:
    """Settings that repeat the database's properties, or omit them, change nothing."""
    named = StorageSettings(n_shards=1, durability="commit", layout={"type": "block", "level": 2})
    for storage, changed, kept in (
        (named, ("layout.type", "layout.level"), ("n_shards", "durability")),
        (StorageSettings(layout={"type": "block"}), (), ("n_shards", "layout.level", "durability")),
        (StorageSettings(), (), ("layout.type",)),
    ):
        settings = msgspec.structs.replace(embedded.server.settings, durable_storage={"messages": storage})
        reloaded = embedded.do(embedded.server.reload(settings))
        places = [tuple(f"durable_storage.messages.{key}" for key in keys) for keys in (changed, kept)]
        assert places == [reloaded.changed, reloaded.kept]
        assert 2 == len(embedded.db.generations())


def test_figures_of_sessions_change(embedded: Embedded) -> None:
    """New intervals for session work take effect; the shortest interval of all zones (tables of settings) is used."""
    sessions = DurableSessionsSettings(idle_poll_interval=Duration(0.5), heartbeat_interval=Duration(3))
    zones = {"quick": ZoneSettings(durable_sessions=ZoneSessionsSettings(renew_streams_interval=Duration(0.25)))}
    changed = ["durable_sessions.idle_poll_interval", "durable_sessions.heartbeat_interval", "zones.quick"]
    assert (changed, []) == reload(embedded, durable_sessions=sessions, zones=zones)
    pace = embedded.db.sessions.pace
    assert (0.25, 3.0) == (pace.longest_pause, pace.checkpoint_interval)
    reload(embedded, protocol=ProtocolSettings(store_qos0=True))
    assert embedded.db.sessions.store_qos0


def test_what_needs_a_restart_is_said(embedded: Embedded, tmp_path: Path) -> None:
    """Settings that need a restart are reported and keep their old values; other changes take effect."""
    changed, restart = reload(
        embedded,
        http=HttpSettings(),
        log=LogSettings(level="warning", file=tmp_path / "log"),
        durable_storage={
            "messages": StorageSettings(data_dir=tmp_path, options={"memory": {}}, plugins=("x",)),
            "more": StorageSettings(data_dir=tmp_path),
        },
    )
    assert ["log.level"] == changed
    assert [
        "durable_storage.messages.data_dir",
        "durable_storage.messages.plugins",
        "durable_storage.messages.options.memory",
        "durable_storage.more",
        "http",
        "log.file",
    ] == restart
    settings = embedded.server.settings
    assert settings.http is None
    assert (settings.log.level, settings.log.file, settings.messages.data_dir) == ("warning", None, None)
    assert ["messages"] == list(settings.durable_storage)
    reload(embedded, log=LogSettings())


def test_a_server_that_has_ended_takes_no_settings(db: ts.Database) -> None:
    """A server that has ended, or that has no settings file, refuses a reload."""
    with Embedded(db) as embedded:
        with pytest.raises(ts.InvalidArgumentError, match="has no settings to read again"):
            embedded.do(embedded.server.reread())
        embedded.do(embedded.server.drain())
        with pytest.raises(ts.InvalidArgumentError, match="the server has ended"):
            reload(embedded)
