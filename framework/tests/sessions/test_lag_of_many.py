"""The lag of many sessions, counted in one pass, equals the lag counted for each session alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from topicstore.sessions import lag as lagging
from topicstore.sessions.records import Keys
from topicstore.sessions.session_store import encode_session
from topicstore.shard.state import FrameworkWrite, ShardState

FILTERS = ("a/#", "+/1", "a/1", "#", "$own/#", "b/+", "none/#", "$share/group/a/#")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database with connected and absent sessions, opened at different times, with all kinds of filters."""
    with ts.open(tmp_path / "db", backend="memory", shards=3) as db:
        for number in range(24):
            session = db.sessions.open(f"c{number:02}", expiry_interval=None)
            session.subscribe(FILTERS[number % len(FILTERS)], no_local=number == 8)
            if number % 3:
                session.disconnect()
            db.store([ts.Message(topic, b"1", f"c{number:02}", 1) for topic in ("a/1", "b/1", "a/2", "$own/x")])
        yield db


def one_by_one(db: ts.Database) -> dict[str, dict[str, object]]:
    """Return the lag of each session, counted for this session alone."""
    return {client_id: dict(db.sessions.lag(client_id)[client_id]) for client_id in db.sessions.clients()}


@pytest.mark.parametrize("many", [1, 1_000])
@pytest.mark.parametrize("together", [50_000, 10])
def test_the_lag_of_all_is_that_of_each(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch, many: int, together: int
) -> None:
    """The lag counted for all sessions at once equals each session's own lag, even if one pass isn't enough."""
    expected = one_by_one(db)
    monkeypatch.setattr(lagging, "_MANY", many)
    monkeypatch.setattr(lagging, "_TOGETHER", together)
    assert expected == db.sessions.lag()


@pytest.mark.parametrize("limit", [1, 5, 100])
def test_the_longest_behind_come_first(db: ts.Database, limit: int) -> None:
    """`longest_behind` orders clients by the seconds of their lag, and omits those without waiting messages."""
    seconds = {
        client_id: max((lag.seconds for lag in lags.values() if lag.messages), default=-1.0)
        for client_id, lags in db.sessions.lag().items()
    }
    expected = sorted((one for one in seconds if seconds[one] >= 0), key=lambda one: (-seconds[one], one))
    assert 5 < len(expected) < len(seconds)
    assert expected[:limit] == db.sessions.longest_behind(db.sessions.clients(), limit)


def test_where_much_waits_places_decide(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """If many messages wait, `longest_behind` still omits sessions that have nothing to read."""
    whole = set(db.sessions.longest_behind(db.sessions.clients(), 100))
    monkeypatch.setattr(lagging, "_TOGETHER", 10)
    assert whole == set(db.sessions.longest_behind(db.sessions.clients(), 100))


def test_clients_are_chosen_by_connection(db: ts.Database) -> None:
    """`clients` selects connected or disconnected clients; both selections together are all clients."""
    connected, away = db.sessions.clients(connected=True), db.sessions.clients(connected=False)
    assert [f"c{number:02}" for number in range(0, 24, 3)] == connected
    assert sorted((*connected, *away)) == db.sessions.clients()


def test_sessions_are_counted_in_one_scan_of_each_shard(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting all sessions takes one scan of each shard and no key look-up; a session being removed isn't counted."""
    assert 24 == len(db.sessions)
    states = db.sessions._registry.states
    found = states.find("c01")
    assert found is not None
    ending = encode_session("c01", msgspec.structs.replace(found.record, ending=True))
    states.states[states.shard_of("c01")].write([FrameworkWrite(Keys("c01").session, ending.stored)])
    assert "c01" not in db.sessions
    scans: list[int] = []
    scan = ShardState.scan

    def counted(self: ShardState, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        scans.append(1)
        return scan(self, prefix)

    def refused(self: ShardState, keys: Sequence[bytes]) -> list[bytes | None]:
        raise AssertionError(self, keys)

    monkeypatch.setattr(ShardState, "scan", counted)
    monkeypatch.setattr(ShardState, "get_many", refused)
    assert (23, 3) == (len(db.sessions), len(scans))
