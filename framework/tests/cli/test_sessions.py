"""``topicstore sessions``: the lag that it shows."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts

from .conftest import document, run

DAY = 86_400


def test_lag_is_shown_by_filter(path: Path) -> None:
    """`sessions` shows the lag of each filter in messages and seconds, and the sum for each session in the list."""
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
