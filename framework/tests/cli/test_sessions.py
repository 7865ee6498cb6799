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


def test_what_is_behind_is_told_by_filter(run: Run, document: Document, path: Path) -> None:
    """In messages and in seconds, summed in the list."""
    with ts.open(path) as db:
        session = db.sessions.open("display", expiry_interval=None)
        for topic_filter in ("a/#", "a/b", "b"):
            session.subscribe(topic_filter, 1)
        db.store([ts.Message(f"a/{'bc'[number % 2]}", b"", "p", 1) for number in range(1_500)])
        session.disconnect()
    shown = document("sessions", "show", path, "display")["subscriptions"]
    counted = {one["filter"]: (one["lag"]["messages"], one["lag"]["exact"]) for one in shown}
    assert {"a/#": (1_500, True), "a/b": (750, True), "b": (0, True)} == counted
    listed = next(one for one in document("sessions", path)["sessions"] if one["client_id"] == "display")
    assert shown == listed["subscriptions"]
    assert "2,250" in run("sessions", path).stdout
    assert "behind" not in run("sessions", "list", "--no-lag", path).stdout
    assert {None} == {
        subscription["lag"]
        for one in document("sessions", "list", "--no-lag", path)["sessions"]
        for subscription in one["subscriptions"]
    }
    assert [True, True] == [part in run("sessions", "show", path, "display").stdout for part in ("1,500", "750")]
