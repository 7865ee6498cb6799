"""Figures of the database over HTTP."""

from __future__ import annotations

import httpx
import topicstore as ts


def test_info_has_what_the_database_says(http: httpx.Client, db: ts.Database) -> None:
    db.store([ts.Message("info/a", b"1", "c")])
    answer = http.get("/info")
    assert answer.status_code == 200
    assert answer.json()["messages"] == db.info().messages
    assert answer.json()["id"] == db.info().id
