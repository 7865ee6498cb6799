"""Limits on the number of stored sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.sessions import Connect, Session, Sessions


def opened(sessions: Sessions, *clients: str, user: str = "") -> list[str]:
    """Open sessions in one call; return the clients that weren't refused."""
    rows = [Connect(client_id=client, expiry_interval=None, user=user) for client in clients]
    results = sessions.open_many(rows, partial=True)
    assert all(isinstance(one, Session | ts.QuotaExceededError) for one in results)
    return [one.client_id for one in results if isinstance(one, Session)]


def test_one_session_too_many_is_an_error(tmp_path: Path) -> None:
    """A session above the limit is refused and not stored; sessions in memory don't count.

    The end of any stored session lets another one be opened.
    """
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        db.sessions.bounds.in_all = 3
        assert ["a", "b", "c"] == opened(db.sessions, "a", "b", "c", "d")
        with pytest.raises(ts.QuotaExceededError, match="3 sessions are stored, and 3 may be"):
            db.sessions.open("e", expiry_interval=None)
        assert ["a", "b", "c"] == db.sessions.clients()
        assert db.sessions.open("m", clean_start=True, in_memory=True)
        assert ["a"] == opened(db.sessions, "a")
        db.sessions.open("a", clean_start=True, expiry_interval=0).disconnect()
        assert ["d"] == opened(db.sessions, "d", "e")
    with ts.open(tmp_path / "db") as db:
        db.sessions.bounds.in_all = 3
        assert ["b"] == opened(db.sessions, "b", "e")


def test_each_user_has_a_bound(tmp_path: Path) -> None:
    """A session counts towards its creator's limit, even after a restart; sessions without a user share one limit."""
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        db.sessions.bounds.each_user = 1
        assert ["a"] == opened(db.sessions, "a", "b", user="u")
        assert ["a"] == opened(db.sessions, "a", user="v")
        assert ["c"] == opened(db.sessions, "c", "d", user="v")
        assert ["e"] == opened(db.sessions, "e", "f")
    with ts.open(tmp_path / "db") as db:
        db.sessions.bounds.each_user = 1
        assert [] == opened(db.sessions, "b", user="u")
        db.sessions.expire("a")
        assert ["b"] == opened(db.sessions, "b", user="u")


def test_a_bound_is_a_number_from_one(tmp_path: Path) -> None:
    """A limit must be an integer of at least 1, or None for no limit."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        for bad in (0, 1.5, "1"):
            with pytest.raises(ts.InvalidArgumentError):
                db.sessions.bounds.in_all = bad  # type: ignore[assignment]
        db.sessions.bounds.in_all = None
