"""``topicstore sessions``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import Result

Run = Callable[..., Result]
Document = Callable[..., dict[str, Any]]
DAY = 86_400


def test_sessions_are_listed_shown_and_ended(run: Run, document: Document, path: Path) -> None:
    with ts.open(path) as db:
        session = db.sessions.open("me", expiry_interval=None)
        session.subscribe("a/#", 1, subscription_identifier=7)
        session.disconnect()
        db.sessions.open("other", expiry_interval=DAY).disconnect()
        db.publish([ts.Message("a/b", b"x", qos=1)])
    assert ["me", "other"] == [one["client_id"] for one in document("sessions", path)["sessions"]]
    listed = run("sessions", path).stdout
    assert [True, True, True] == [part in listed for part in ("never", "away", "2 sessions")]
    (subscription,) = document("sessions", "show", path, "me")["subscriptions"]
    assert ("a/#", 1, 7) == (subscription["filter"], subscription["qos"], subscription["identifier"])
    assert "a/#" in run("sessions", "show", path, "me").stdout
    assert "was not connected" in run("sessions", "kick", path, "me").stdout
    assert "needs --yes" in run("sessions", "expire", path, "me", code=2).stderr
    run("sessions", "expire", path, "me", "--yes")
    assert ["other"] == [one["client_id"] for one in document("sessions", path)["sessions"]]


@pytest.mark.parametrize("arguments", [["show"], ["kick"], ["expire", "--yes"]])
def test_a_session_that_is_not_there(run: Run, path: Path, arguments: list[str]) -> None:
    name, *more = arguments
    assert "no session of client 'me'" in run("sessions", name, path, "me", *more, code=2).stderr


def test_groups_are_listed(run: Run, document: Document, tmp_path: Path) -> None:
    """Who shares what."""
    with ts.open(tmp_path / "db") as db:
        for client in ("one", "two"):
            db.sessions.open(client, expiry_interval=None).subscribe("$share/cars/fleet/#", 1)
    found = document("sessions", "groups", tmp_path / "db")["groups"]
    assert [("cars", "fleet/#")] == [(group["name"], group["topic_filter"]) for group in found]
    assert ["one", "two"] == [member["client_id"] for member in found[0]["members"]]
    assert "one, two" in run("sessions", "groups", tmp_path / "db").output
