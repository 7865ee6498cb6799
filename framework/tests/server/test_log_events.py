"""Events in the log of a running server: its start, connects, refused logins, denied requests, and its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from topicstore.server.access.passwords import PasswordFile
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import serving

SETTINGS = """
[listeners.mqtt]
listen = "127.0.0.1:0"
[authentication]
password_file = "users"
anonymous = "never"
[[authorization.rules]]
permission = "allow"
topics = ["%u/#"]
"""


@pytest.mark.parametrize("version", [4, 5])
def test_what_a_server_logs(tmp_path: Path, version: int) -> None:
    """The log has start, connect, refused login, denied publish and subscription, the connection's end, and the stop.

    No line contains a password or a payload.
    """
    PasswordFile(tmp_path / "users").put("ann", b"pw-ann")
    config = tmp_path / "server.toml"
    config.write_text(SETTINGS)
    with serving(tmp_path / "db", "--config", str(config), listen=False) as server:
        port = int(server.ready["mqtt"][0].rpartition(":")[2])
        for number in range(3):
            with RawClient(port, version=version) as stranger:
                stranger.send(wire.connect(f"guess-{number}", user_name="ann", password=b"pw-bad", version=version))
                assert stranger.expect("CONNACK").reason
                stranger.ended()
        with RawClient(port, version=version) as client:
            client.connect("meter", user_name="ann", password=b"pw-ann")
            for _ in range(3):
                client.publish("bob/x", b"secret", 1)
            assert [0x80 if version == 4 else 0x87, 0] == list(client.subscribe("bob/#", "ann/#"))
            client.publish("ann/x", b"secret", 1)
        assert 0 == server.stop()
        log = server.log()
    lines = [json.loads(line) for line in log.splitlines()]
    events = [line["event"] for line in lines]
    order = ("the server serves", "client connected", "access denied", "the server stops", "the server has stopped")
    assert sorted(order, key=events.index) == list(order)
    by = {event: [line for line in lines if line["event"] == event] for event in set(events)}
    [connected], refused, denied = by["client connected"], by["login refused"], by["access denied"]
    who = {"client_id": "meter", "user": "ann", "listener": "mqtt", "version": version}
    assert who == {name: connected[name] for name in who}
    assert ["meter"] == [line["client_id"] for line in by["connection ended"]]
    assert {"guess-0", "guess-1", "guess-2"} == {line["client_id"] for line in refused}
    assert all(line["address"].startswith("127.0.0.1:") and line["code"] == 0x86 for line in refused)
    logged = [(line["action"], line["topics"], line["client_id"], line["user"]) for line in denied]
    assert [("publish", ["bob/x"], "meter", "ann")] * 3 + [("subscribe", ["bob/#"], "meter", "ann")] == logged
    assert "pw-" not in log
    assert "secret" not in log
