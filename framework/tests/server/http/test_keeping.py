"""Persistence rules, generations and retention over HTTP, and the permissions to change them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[ts.Database, httpx.Client]]:
    """A new database for each test, with archives below ``out``, and a client of its server."""
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        serving_http(db, export_dir=tmp_path / "out") as server,
        client_of(server) as client,
    ):
        yield db, client


def test_rules_are_added_listed_and_removed(http: httpx.Client, db: ts.Database) -> None:
    """A persistence rule that is added holds until it is removed; each change is listed."""
    rule = {"topic_filter": "rule/#", "client_id": None, "least_qos": 1}
    added = http.post("/persistence", json={"topic_filter": "rule/#", "least_qos": 1})
    assert added.json() == rule
    assert rule in http.get("/persistence").json()["items"]
    assert db.publish([ts.Message("rule/x", b"1", qos=1)]).stored == 1
    assert http.delete("/persistence", params={"topic_filter": "rule/#"}).status_code == 404
    assert http.delete("/persistence", params={"topic_filter": "rule/#", "least_qos": 1}).json() == rule
    assert db.publish([ts.Message("rule/x", b"1", qos=1)]).stored == 0
    assert http.post("/persistence", json={"topic_filter": "a/#/b"}).status_code == 400
    assert http.post("/persistence", json={"least_qos": 3}).status_code == 400


def test_generations_are_added_and_dropped(own: tuple[ts.Database, httpx.Client]) -> None:
    """Generations can be added, with a layout whose options are checked, and dropped, except the current one."""
    db, http = own
    db.store([ts.Message("a", b"1")])
    added = http.post("/generations", json={"layout": "reference"})
    assert (added.status_code, added.json()["number"], added.json()["layout"]) == (201, 2, "reference")
    assert [(one["number"], one["messages"]) for one in http.get("/generations").json()["items"]] == [(1, 1), (2, 0)]
    assert http.post("/generations", json={"layout": "nothing"}).status_code == 400
    assert http.post("/generations", json={"options": {"nothing": 1}}).status_code == 400
    assert [http.delete("/generations/1").json()["dropped"] for _ in range(2)] == [True, False]
    assert http.delete("/generations/2").status_code == 409
    assert http.delete("/generations/x").status_code == 404
    assert list(db.replay("#")) == []


def test_retention_is_shown_changed_and_run(own: tuple[ts.Database, httpx.Client]) -> None:
    """Changing some retention limits keeps the others; a retention run drops generations that exceed a limit."""
    db, http = own
    db.store([ts.Message("a", b"1")])
    db.add_generation()
    assert http.put("/retention", json={"max_age": 3600, "filters": {"a/#": None}}).json()["filters"] == {"a/#": None}
    changed = http.put("/retention", json={"max_bytes": 1, "when_full": "drop", "filters": {}}).json()
    assert (changed["max_age"], changed["max_bytes"], changed["when_full"]) == (3600.0, 1, "drop")
    shown = http.get("/retention").json()
    assert (shown["generations"], shown["live_bytes"] > 0) == (2, True)
    assert [one["what"] for one in shown["outlook"]][:2] == ["generation 1", "generation 2"]
    assert http.post("/retention/run").json()["dropped"] == [1]
    assert http.put("/retention", json={"max_age": None}).json()["max_age"] is None


def test_wrong_limits_change_nothing(own: tuple[ts.Database, httpx.Client]) -> None:
    """Invalid limits are refused with 400, and change nothing."""
    db, http = own
    before = db.retention.settings
    wrong = [{"max_age": 0}, {"when_full": "x"}, {"filters": {"#/a": 1}}, {"age": 1}, {"max_bytes": "x"}]
    for change in (*wrong, {"max_bytes": 1 << 64}):
        answer = http.put("/retention", json=change)
        assert (change, answer.status_code, db.retention.settings) == (change, 400, before)


def test_archives_lie_where_the_settings_allow(own: tuple[ts.Database, httpx.Client], tmp_path: Path) -> None:
    """Archives may be written only below the export directory of the settings."""
    _, http = own
    for wrong in ("../elsewhere", "/etc", "a/../../b", "", "."):
        assert http.put("/retention", json={"archive_to": wrong}).status_code == 400
    assert http.put("/retention", json={"archive_to": "a"}).json()["archive_to"] == str(tmp_path / "out" / "a")
    assert http.put("/retention", json={"archive_to": None}).json()["archive_to"] is None


def test_sql_answers_with_rows(tmp_path: Path) -> None:
    """An SQL query returns rows, with payloads as text.

    A statement that writes or is invalid is refused. Any backend will do.
    """
    with ts.open(tmp_path / "rows", backend="duckdb", layout="table") as db, serving_http(db, sql=True) as server:
        db.store([ts.Message("a", b"1"), ts.Message("b", b"2")])
        with client_of(server) as http:
            asked = {
                "statement": "select topic, payload from messages where topic >= ? order by 1",
                "parameters": ["a"],
            }
            answer = http.post("/sql", json=asked, params={"limit": 1})
            assert answer.json() == {
                "columns": ["topic", "payload"],
                "types": ["string", "binary"],
                "rows": [["a", "1"]],
                "more": True,
            }
            stream = http.post("/sql", json=asked, headers={"Accept": "application/vnd.apache.arrow.stream"})
            assert pa.ipc.open_stream(stream.content).read_all()["payload"].to_pylist() == [b"1", b"2"]
            either = {"Accept": "application/json;q=0.5, application/vnd.apache.arrow.stream"}
            assert http.post("/sql", json=asked, headers=either).content == stream.content
            assert http.post("/sql", json=asked, headers={"Accept": "text/csv"}).status_code == 406
            assert http.post("/sql", json={"statement": "drop table messages"}).status_code == 400
            assert http.post("/sql", json={"statement": "select"}).status_code == 400
    other = ts.open(tmp_path / "other", backend="memory")
    with other as db, serving_http(db, sql=True) as server, client_of(server) as http:
        db.store([ts.Message("a", b"1")])
        assert [["a", 1]] == http.post("/sql", json={"statement": "select topic, messages from topics"}).json()["rows"]
