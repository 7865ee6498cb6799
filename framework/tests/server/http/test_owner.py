"""The server's own token may write files anywhere; other administrators only where settings allow it."""

from __future__ import annotations

from pathlib import Path

import httpx


def told_why(refused: httpx.Response) -> str:
    """Return the reason of a refusal, which names the setting that would allow the request."""
    assert 403 == refused.status_code
    detail: str = refused.json()["detail"]
    return detail


def test_only_the_owner_may_write_elsewhere(http: httpx.Client, owner: dict[str, str], tmp_path: Path) -> None:
    """Without ``export_dir``, only the server's own token may start a job with a target."""
    for kind in ("export", "checkpoint"):
        asked = {"kind": kind, "target": str(tmp_path / "elsewhere")}
        assert "export_dir" in told_why(http.post("/jobs", json=asked))
    assert 202 == http.post("/jobs", json=asked, headers=owner).status_code


def test_only_the_owner_may_archive_elsewhere(http: httpx.Client, owner: dict[str, str], tmp_path: Path) -> None:
    """Without ``export_dir``, only the server's own token may set an archive directory."""
    asked = {"archive_to": str(tmp_path / "archive")}
    assert "export_dir" in told_why(http.put("/retention", json=asked))
    assert asked["archive_to"] == http.put("/retention", json=asked, headers=owner).json()["archive_to"]
    assert http.put("/retention", json={"archive_to": None}).json()["archive_to"] is None


def test_only_the_owner_may_run_sql_unless_settings_allow_it(http: httpx.Client, owner: dict[str, str]) -> None:
    """Only the server's own token may run SQL unless settings allow it for others."""
    assert "sql" in told_why(http.post("/sql", json={"statement": "select 1"}))
    assert 200 == http.post("/sql", json={"statement": "select 1"}, headers=owner).status_code
