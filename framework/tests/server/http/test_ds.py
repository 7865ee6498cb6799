"""Sites, storages and replicas over HTTP, in the shapes that scripts for EMQX expect."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import topicstore as ts
from topicstore.contract.errors import CorruptionError
from topicstore.server.sites import Sites, read_site


@pytest.fixture
def site(http: httpx.Client) -> str:
    """The id of the only site."""
    (site,) = http.get("/ds/sites").json()
    return site


def test_a_site_has_a_node_and_its_shards(http: httpx.Client, db: ts.Database, site: str) -> None:
    assert re.fullmatch("[0-9A-F]{16}", site)
    found = http.get(f"/ds/sites/{site}").json()
    assert found.pop("node").startswith("topicstore@")
    shards = [{"storage": "messages", "id": str(number), "status": "up"} for number in range(db.manifest.shards)]
    assert found == {"up": True, "shards": shards, "back_off": 0.0}


def test_a_storage_has_shards_with_replicas(http: httpx.Client, db: ts.Database, site: str) -> None:
    assert http.get("/ds/storages").json() == ["messages"]
    replicas = [{"site": site, "status": "up"}]
    shards = [{"id": str(number), "replicas": replicas, "transitions": []} for number in range(db.manifest.shards)]
    assert http.get("/ds/storages/messages").json() == {"name": "messages", "shards": shards}
    assert http.get("/ds/storages/messages/replicas").json() == [site]


def test_replicas_may_be_set_to_what_they_are(http: httpx.Client, site: str) -> None:
    answer = http.put("/ds/storages/messages/replicas", json=[site])
    assert (202, [site]) == (answer.status_code, answer.json())
    answer = http.put(f"/ds/storages/messages/replicas/{site}")
    assert (202, "OK") == (answer.status_code, answer.text)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("PUT", "/ds/storages/messages/replicas", [], 400, "at least one site"),
        ("PUT", "/ds/storages/messages/replicas", ["{site}", "0011223344556677"], 400, "no cluster shares the storage"),
        ("PUT", "/ds/storages/messages/replicas/0011223344556677", None, 400, "no cluster shares the storage"),
        ("DELETE", "/ds/storages/messages/replicas/{site}", None, 400, "the only replica"),
        ("DELETE", "/ds/storages/messages/replicas/0011223344556677", None, 404, "no site '0011223344556677'"),
        ("PUT", "/ds/sites/{site}/forget", None, 400, "is up"),
        ("PUT", "/ds/sites/0011223344556677/forget", None, 404, "no site"),
        ("GET", "/ds/sites/0011223344556677", None, 404, "no site"),
        ("GET", "/ds/storages/elsewhere", None, 404, "no storage 'elsewhere'"),
        ("GET", "/ds/storages/elsewhere/replicas", None, 404, "no storage"),
        ("PUT", "/ds/storages/elsewhere/replicas", ["{site}"], 404, "no storage"),
        ("PUT", "/ds/storages/elsewhere/replicas/{site}", None, 404, "no storage"),
        ("DELETE", "/ds/storages/elsewhere/replicas/{site}", None, 404, "no storage"),
    ],
)
def test_everything_else_is_refused_with_the_reason(
    http: httpx.Client, site: str, method: str, path: str, body: list[str] | None, status: int, says: str
) -> None:
    sites = None if body is None else [one.replace("{site}", site) for one in body]
    answer = http.request(method, path.replace("{site}", site), json=sites)
    assert status == answer.status_code
    assert says in answer.json()["detail"]
    assert http.get("/ds/storages/messages/replicas").json() == [site]


@pytest.mark.parametrize("body", [b"", b"[", b'{"a": 1}', b"[1]", b"\xff"])
def test_a_body_that_is_no_list_of_sites_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.put("/ds/storages/messages/replicas", content=body)
    assert (400, "Bad Request") == (answer.status_code, answer.json()["title"])


def test_the_id_is_kept_with_the_database_and_a_copy_is_another_site(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        assert read_site(tmp_path / "db") is None
        made = Sites(db, {}).this
        db.checkpoint(tmp_path / "copy")
    with ts.open(tmp_path / "db") as db:
        assert made == Sites(db, {}).this == read_site(tmp_path / "db")
    assert read_site(tmp_path / "copy") is None


def test_a_damaged_id_is_reported_and_left(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        (tmp_path / "db" / "site").write_text("nonsense\n")
        with pytest.raises(CorruptionError, match="site"):
            _ = Sites(db, {}).this
    assert (tmp_path / "db" / "site").read_text() == "nonsense\n"
