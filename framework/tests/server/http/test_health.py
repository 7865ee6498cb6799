"""Health over HTTP: whether the server responds, and whether it can store messages."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import topicstore as ts
from topicstore.server.config.units import Size
from topicstore.server.http.routes.health import obstacles
from topicstore.server.metrics.collectors import StoreCollector
from topicstore_conformance.database.intercepting_engines import Full, replace_engine
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of


def test_a_server_that_can_work_is_ready(site: httpx.Client) -> None:
    assert site.get("/health/live").json() == {"live": True}
    answer = site.get("/health/ready")
    assert (200, {"ready": True, "reasons": []}) == (answer.status_code, answer.json())


def test_a_nearly_full_disk_is_not_ready(tmp_path: Path) -> None:
    with (
        ts.open(tmp_path / "db") as db,
        serving_http(db, min_free=Size(1 << 60)) as server,
        client_of(server, "") as site,
    ):
        answer = site.get("/health/ready")
        assert answer.status_code == 503
        (reason,) = answer.json()["reasons"]
        assert "the disk is nearly full" in reason


def test_a_clock_behind_the_last_position_is_reported(tmp_path: Path) -> None:
    """A clock that is behind the last position is reported, as after the machine's clock was set back."""
    times = [1_700_000_000_000_000]
    with ts.open(tmp_path / "db", backend="memory", clock=lambda: times[0]) as db:
        db.store([ts.Message("a", b"1", "c")])
        assert obstacles(db, min_free=0) == []
        times[0] -= 3_600_000_000
        (reason,) = obstacles(db, min_free=0)
        assert "behind the last position of shard 0" in reason


def test_a_shard_that_takes_no_writes_is_reported_without_details(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory", shards=1) as db:
        replace_engine(db, Full(db.storage.shards[0].writer.engine, "write"))
        with pytest.raises(ts.StorageFullError, match="no room"):
            db.store([ts.Message("a", b"1", "c")])
        (reason,) = obstacles(db, min_free=0)
        assert "shard 0 takes no writes" in reason
        assert "no room" not in reason


def test_a_directory_that_is_gone_is_reported(tmp_path: Path) -> None:
    """A missing directory is reported, as after its disk was unmounted; metrics are still served."""
    with ts.open(tmp_path / "db") as db, serving_http(db) as server, client_of(server, "") as site:
        (tmp_path / "db").rename(tmp_path / "gone")
        ready, metrics = site.get("/health/ready"), site.get("/metrics")
        (tmp_path / "gone").rename(tmp_path / "db")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert "can't be looked at: No such file or directory" in reason
        assert str(tmp_path) not in reason
        assert metrics.status_code == 200
        assert "\ntopicstore_disk_free_bytes " not in metrics.text


def test_sizes_that_cannot_be_found_out_are_left_out_of_metrics(tmp_path: Path) -> None:
    """While the directory is missing, metrics omit its sizes and include everything else."""
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        (tmp_path / "db").rename(tmp_path / "gone")
        found = {family.name: len(family.samples) for family in StoreCollector(db).collect()}
        (tmp_path / "gone").rename(tmp_path / "db")
    assert (0, 0, 1) == tuple(
        found[f"topicstore_{name}"] for name in ("disk_bytes", "disk_free_bytes", "shard_writable")
    )


def test_the_log_says_once_why_a_shard_takes_no_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log reports once why a shard takes no writes, until the reason changes."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server, client_of(server) as http:
        for reason in ("disk error", "another error"):
            db.storage.shards[0].writer._failure = OSError(reason)
            for _ in range(3):
                answer = http.post("/messages?store=true", json={"topic": "a", "payload": "1"})
                assert (answer.status_code, reason in answer.text) == (503, True)
            assert caplog.text.count(reason) == 1


def test_a_closed_database_is_reported(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory") as db:
        pass
    assert obstacles(db, min_free=0) == ["the database is closed"]
