"""``topicstore bans`` and ``topicstore rules``: with a running server and without one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server.config.load import read_settings
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import serving

from .conftest import document, run

SETTINGS = """[durable_storage.messages]
data_dir = "db"
[listeners.mqtt]
listen = "127.0.0.1:0"
[authorization]
unlisted = "deny"       # all else
[flapping_detect]
enable = true
max_count = 3
[http]
listen = "127.0.0.1:0"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "server.toml").write_text(SETTINGS)
    return tmp_path / "server.toml"


def test_bans_without_a_server(tmp_path: Path) -> None:
    """Bans are kept beside the database: added, listed and lifted; invalid arguments are refused."""
    db = tmp_path / "db"
    ts.open(db).close()
    at = ("--database", db)
    added = run("bans", "add", "client", "one", *at, "--for", "1h", "--reason", "noise").stdout
    assert added.startswith("banned client one until 2")
    run("bans", "add", "address", "2001:DB8::/32", *at)
    lines = run("bans", "list", *at).stdout.splitlines()
    assert "address 2001:db8::/32 until it is lifted" == lines[0]
    assert lines[1].endswith(": noise")
    assert ["address", "client"] == [one["kind"] for one in document("bans", "list", *at)["bans"]]
    assert "lifted the ban of client one" in run("bans", "remove", "client", "one", *at).stdout
    for arguments in (
        ("remove", "client", "one"),
        ("add", "address", "somewhere"),
        ("add", "client", "one", "--for", "long"),
    ):
        run("bans", *arguments, *at, code=2)
    run("bans", "list", "--database", tmp_path, code=3)


def test_rules_without_a_server(config: Path) -> None:
    """Rules are added, listed and removed in the settings, whose other lines stay; wrong rules change nothing."""
    at = ("--config", config)
    assert "no server" in run("rules", "add", "allow", "a/#", "b/+", *at).stderr
    run("rules", "add", "deny", "a/secret", *at, "--user", "ann", "--action", "publish", "--before", "1")
    shown = ["1  deny publish a/secret  (users ann)", "2  allow a/# b/+"]
    assert shown == run("rules", "list", *at).stdout.splitlines()
    before = config.read_text()
    run("rules", "add", "allow", "a/#/b", *at, code=2)
    run("rules", "remove", "3", *at, code=2)
    assert before == config.read_text()
    assert [["a/#", "b/+"]] == [one["topics"] for one in document("rules", "remove", "1", *at)["rules"]]
    run("rules", "remove", "1", *at)
    assert () == read_settings(config, {}).authorization.rules
    assert SETTINGS.splitlines() == [line for line in config.read_text().splitlines() if line]


def test_beside_a_server(config: Path, tmp_path: Path) -> None:
    """A running server reads changed rules and bans at once; its bans of flapping clients are listed and lifted."""
    at = ("--database", tmp_path / "db")
    with serving(None, "--config", str(config), listen=False) as server:
        port = int(server.ready["mqtt"][0].rpartition(":")[2])

        def answer(client_id: str) -> int:
            with RawClient(port) as client:
                client.send(wire.connect(client_id))
                return client.expect("CONNACK").reason

        assert "the running server has read them" in run("rules", "add", "allow", "a/#", "--config", config).stderr
        with RawClient(port) as client:
            client.connect("one")
            assert (0, 0x87) == client.subscribe("a/#", "b/#")
            run("bans", "add", "client", "one", *at)
            assert ("DISCONNECT", 0x98) == client.farewell()
        assert 0x8A == answer("one")
        run("bans", "remove", "client", "one", *at)
        wait_until(lambda: answer("flap") == 0x8A, "the client to be banned")
        [found] = document("bans", "list", *at)["bans"]
        assert ("flap", True) == (found["value"], found["flapping"])
        run("bans", "remove", "client", "flap", *at)
        assert 0 == answer("flap")
        server.signal(signal.SIGTERM)
        wait_until(lambda: not server.alive, "the server to end")
        server.stop()
