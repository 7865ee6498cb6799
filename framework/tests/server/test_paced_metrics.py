"""Metrics that are expensive to compute are renewed rarely and report their age.

A fake clock replaces `time.monotonic`.
"""

from __future__ import annotations

import time

import pytest
import topicstore as ts
from topicstore.server.metrics import paced as session_lag
from topicstore.server.metrics.collectors import Averages
from topicstore.server.metrics.paced import LagTotals, Paced, SessionLag


class Clock:
    """The time that `time.monotonic` returns to the code under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def counting(clock: Clock, seconds: float) -> Paced[int]:
    found: list[int] = []

    def find_out() -> int:
        clock.now += seconds
        found.append(1)
        return len(found)

    return Paced(find_out)


def test_what_is_cheap_is_always_fresh(clock: Clock) -> None:
    paced = counting(clock, 0)
    assert [paced.value(), paced.value(), paced.value()] == [1, 2, 3]


def test_what_is_dear_takes_a_thousandth_of_the_time(clock: Clock) -> None:
    paced = counting(clock, 0.02)
    assert paced.value() == 1
    for _ in range(19):
        clock.now += 1
        paced.renew()
        assert paced.value() == 1
    assert paced.age == pytest.approx(19.02)
    clock.now += 1
    assert paced.value() == 1  # a caller never waits until the metrics are renewed
    paced.renew()
    assert paced.value() == 2
    assert paced.age == pytest.approx(0.02)


def test_an_error_is_raised_and_the_next_call_tries_again() -> None:
    failures = [OSError("not now")]

    def find_out() -> str:
        if failures:
            raise failures.pop()
        return "found"

    paced = Paced(find_out)
    with pytest.raises(OSError, match="not now"):
        paced.value()
    assert paced.value() == "found"


def lagging(db: ts.Database, sessions: int) -> int:
    """Create disconnected sessions, the n-th with n waiting messages; return the number of these messages."""
    for number in range(sessions):
        session = db.sessions.open(f"client-{number}", expiry_interval=None)
        session.subscribe(f"of/{number}", qos=1)
        session.disconnect()
        db.store([ts.Message(f"of/{number}", b"", "writer", 1)] * number)
    return sum(range(sessions))


def test_the_lag_of_many_sessions_is_counted_in_pieces(
    db: ts.Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lag of many sessions is counted in portions, and totals are those of complete rounds.

    Each portion takes 4 ms on the fake clock, so that a call counts two portions.
    """
    wanted = lagging(db, 20)
    lag, looked = SessionLag(db), []
    found = db.sessions.lag

    def slow(*clients: str) -> object:
        clock.now += 0.004
        looked.append(len(clients))
        return found(*clients)

    monkeypatch.setattr(db.sessions, "lag", slow)
    assert lag.totals() == (LagTotals(), pytest.approx(0.008))
    rounds = 0
    while sum(looked) < 20:
        done = len(looked)
        lag.renew()
        assert len(looked) == done, "it is too early to go on"
        clock.now += 1.601
        lag.renew()
        assert len(looked) == done + 2 or sum(looked) == 20
        rounds += 1
    totals, age = lag.totals()
    assert totals == LagTotals(
        sessions=20, lagging=19, messages=wanted, most_messages=19, most_seconds=totals.most_seconds
    )
    assert rounds > 5
    assert age == pytest.approx(rounds * 1.601 + len(looked) * 0.004)


def test_while_a_person_looks_the_lag_is_counted_more_often(
    db: ts.Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Totals of twelve sessions, which take 50 ms each to count, are at most 30 seconds old while a person watches.

    Otherwise the totals may be minutes old.
    """
    lagging(db, 12)
    found = db.sessions.lag

    def slow(*clients: str) -> object:
        clock.now += 0.05 * len(clients)
        return found(*clients)

    monkeypatch.setattr(db.sessions, "lag", slow)
    ages = {}
    for watched in (False, True):
        lag = SessionLag(db)
        oldest = 0.0
        for _ in range(300):
            if watched:
                lag.watch()
            lag.renew()
            clock.now += 1
            oldest = max(oldest, lag.totals()[1])
        ages[watched] = oldest
    assert ages[True] < 30 < 100 < ages[False]


def test_sessions_that_have_ended_or_cannot_be_read(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that ended or can't be read don't prevent the others from being counted."""
    wanted = lagging(db, 6)
    found, clients = db.sessions.lag, db.sessions.clients

    def failing(*clients: str) -> object:
        if "client-5" in clients:
            raise ts.CorruptionError("it is damaged")
        return found(*clients)

    monkeypatch.setattr(db.sessions, "lag", failing)
    monkeypatch.setattr(db.sessions, "clients", lambda: [*clients(), "gone"])
    monkeypatch.setattr(session_lag, "_PIECE", 60.0)
    lag = SessionLag(db)
    lag.renew()
    totals, _ = lag.totals()
    assert (totals.sessions, totals.unknown, totals.messages) == (6, 1, wanted - 5)


def test_rolling_averages(db: ts.Database, clock: Clock) -> None:
    """Rolling averages cover ten seconds and five minutes, sampled each second."""
    averages = Averages(db.storage.shards)
    latencies = db.storage.shards[0].writer.latencies.store
    for second in range(400):
        latencies.observe(0.001 if second < 390 else 0.003)
        averages.sample()
        clock.now += 1
    found = averages.microseconds("store")
    assert found[0, "current"] == pytest.approx(3_000)
    assert found[0, "last5m"] == pytest.approx((290 * 1_000 + 10 * 3_000) / 300, rel=0.01)
    clock.now += 1_000
    averages.sample()
    clock.now += 11
    averages.sample()
    assert averages.microseconds("store") == {(0, "current"): 0.0, (0, "last5m"): pytest.approx(0.0)}
