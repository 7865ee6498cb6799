"""The settings over HTTP: reading the active settings and reloading the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.settings_file import read_settings
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
    """A client of a server that has a settings file."""
    with serving_http(db, read=lambda: read_settings(file, {})) as server, client_of(server) as client:
        yield client


def test_the_settings_in_force_are_shown(http: httpx.Client, served: tuple[ts.Database, Server]) -> None:
    """The active settings, including all defaults, are returned in the form that a settings file has."""
    answer = http.get("/config")
    assert answer.status_code == 200
    found = answer.json()
    assert list(found) == list(msgspec.structs.asdict(served[1].settings))
    assert found["durable_sessions"]["heartbeat_interval"] == "15s"
    assert found["durable_storage"]["messages"]["local_write_buffer"] == {"max_items": 20_000, "flush_interval": "0s"}
    assert found["listeners"]["mqtt"]["listen"] == "127.0.0.1:0"


def test_what_a_changed_file_changes_is_said(client: httpx.Client, file: Path) -> None:
    """A reload reports the settings that took effect and the settings that need a restart."""
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
    """Reloading an invalid file changes no setting, and the response says where the mistake is."""
    before = client.get("/config").json()
    file.write_text("[limits]\nconections = 9\n")
    answer = client.post("/config/reload")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert "server.toml, line 2: limits has no key 'conections'; is 'connections' meant?" in answer.json()["detail"]
    assert before == client.get("/config").json()


def test_settings_of_a_program_are_not_read_again(http: httpx.Client) -> None:
    """A server that was configured by a program, without a file, refuses to reload its settings."""
    answer = http.post("/config/reload")
    assert answer.status_code == 400
    assert "a program has made them" in answer.json()["detail"]


def test_further_storages_are_listed(db: ts.Database, tmp_path: Path) -> None:
    """Each additional storage is listed with its number of shards."""
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
