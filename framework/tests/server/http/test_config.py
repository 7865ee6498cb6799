"""Settings over HTTP: showing the settings in force, and reloading them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.config.load import read_settings
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of

FILE = """
[listeners.mqtt]
listen = "127.0.0.1:0"
[http]
listen = "127.0.0.1:0"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "server.toml").write_text(FILE)
    return tmp_path / "server.toml"


@pytest.fixture
def client(db: ts.Database, file: Path) -> Iterator[httpx.Client]:
    """A client of a server whose settings come from a file."""
    with serving_http(db, read=lambda: read_settings(file, {})) as server, client_of(server) as client:
        yield client


def test_the_settings_in_force_are_shown(http: httpx.Client, served: tuple[ts.Database, Server]) -> None:
    """``/config`` shows all settings in force, defaults included, written as in the file."""
    answer = http.get("/config")
    assert answer.status_code == 200
    found = answer.json()
    assert list(found) == list(msgspec.structs.asdict(served[1].settings))
    assert found["durable_sessions"]["heartbeat_interval"] == "15s"
    assert found["durable_storage"]["messages"]["local_write_buffer"] == {"max_items": 20_000, "flush_interval": "0s"}
    assert found["listeners"]["mqtt"]["listen"] == "127.0.0.1:0"


def test_what_a_changed_file_changes_is_said(client: httpx.Client, file: Path) -> None:
    """A reload reports which changed settings took effect and which need a restart.

    `/config` shows new values only of the settings that took effect.
    """
    assert client.post("/config/reload").json() == {"changed": [], "kept": [], "needs_restart": []}
    file.write_text(f'{FILE}anonymous = "never"\n[limits]\nconnections = 9\n[log]\nfile = "server.log"\n')
    assert client.post("/config/reload").json() == {
        "changed": ["limits.connections"],
        "kept": [],
        "needs_restart": ["http.anonymous", "log.file"],
    }
    assert client.get("/config").json()["limits"]["connections"] == 9
    assert client.get("/config").json()["http"]["anonymous"] == "loopback"


def test_a_bad_file_changes_nothing(client: httpx.Client, file: Path) -> None:
    """A bad file changes nothing, and the response names the mistake and its line."""
    before = client.get("/config").json()
    file.write_text("[limits]\nconections = 9\n")
    answer = client.post("/config/reload")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert "server.toml, line 2: limits has no key 'conections'; is 'connections' meant?" in answer.json()["detail"]
    assert before == client.get("/config").json()


def test_settings_of_a_program_are_not_read_again(http: httpx.Client) -> None:
    """A reload is refused if a program passed the settings, because there is no file."""
    answer = http.post("/config/reload")
    assert answer.status_code == 400
    assert "a program has made them" in answer.json()["detail"]


def test_further_storages_are_listed(db: ts.Database, tmp_path: Path) -> None:
    """A server's additional storages are listed, each with its shards."""
    with (
        ts.open(tmp_path / "more", backend="memory", shards=3) as more,
        serving_http(db, storages={"messages": db, "more": more}) as server,
        client_of(server) as client,
    ):
        assert ["messages", "more"] == client.get("/ds/storages").json()
        assert ["0", "1", "2"] == [shard["id"] for shard in client.get("/ds/storages/more").json()["shards"]]
        answer = client.get("/ds/storages/other")
        assert answer.status_code == 404
        assert "there is 'messages', 'more'" in answer.json()["detail"]
