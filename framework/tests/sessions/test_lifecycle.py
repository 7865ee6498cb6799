"""Opening, takeover, expiry and end of sessions: sessions expire and wills are published on time, never early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.state import StateWrite
from topicstore.sessions import (
    Ended,
    SessionEndedError,
    SessionNotFoundError,
    Sessions,
    SessionTakenOverError,
    SubscribeOptions,
    Will,
)
from topicstore.sessions.session_store import SessionState
from topicstore.shard.state import OWN
from topicstore.shard.writer import PendingWrite
from topicstore_conformance.faults.clock import START, Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000


def session_keys(db: ts.Database) -> list[bytes]:
    return [
        key[1:]
        for shard in range(len(db.storage.shards))
        for key, _ in db.state(shard).scan(OWN)
        if key[1:2] in b"sitk"
    ]


def wills(db: ts.Database) -> list[str]:
    return [message.payload.decode() for message in db.replay("will")]


@pytest.fixture
def will(sessions: Sessions) -> Will:
    """Return a will, and subscribe to its topic so that the will is stored."""
    sessions.open("listener", expiry_interval=None).subscribe("will", 1)
    return Will(ts.Message("will", b"gone", "client", 1), delay=10)


@pytest.mark.parametrize("longest", [0xFFFFFFFF, float(0xFFFFFFFF), timedelta(seconds=0xFFFFFFFF)])
def test_the_longest_expiry_of_mqtt_is_never(sessions: Sessions, clock: Clock, longest: Any) -> None:
    """An expiry interval of 0xFFFFFFFF means that the session never expires (MQTT 5, section 3.1.2.11.2).

    The value has this meaning both when a session is opened and in a DISCONNECT.
    """
    sessions.open("opened", expiry_interval=longest).lost()
    sessions.open("changed", expiry_interval=1).disconnect(expiry_interval=longest)
    sessions.open("ends", expiry_interval=0xFFFFFFFE).lost()
    clock.now += 150 * 365 * 24 * 3_600 * SECOND
    sessions.tick()
    assert ["changed", "opened"] == sessions.clients()
    for client_id in sessions.clients():
        assert (None, None) == (sessions[client_id].expiry_interval, sessions[client_id].expires)


def test_a_disconnect_may_change_the_expiry(sessions: Sessions) -> None:
    """A DISCONNECT may change the expiry interval, but not from 0 (MQTT 5, section 3.14.2.2.2).

    Such a change is refused, and the session stays open.
    """
    session = sessions.open("client")
    for interval in (5, None):
        with pytest.raises(ts.InvalidArgumentError, match=r"3\.14\.2\.2\.2"):
            session.disconnect(expiry_interval=interval)
    assert session.ended is None
    assert sessions["client"].connected
    session.disconnect(expiry_interval=0)
    assert [] == list(sessions)
    sessions.open("client", expiry_interval=1).disconnect(expiry_interval=5)
    assert START + 5 * SECOND == sessions["client"].expires
    sessions.open("client", expiry_interval=5).disconnect(expiry_interval=None)
    assert sessions["client"].expires is None
    sessions.open("client", expiry_interval=None).disconnect(expiry_interval=0)
    assert [] == list(sessions)


@pytest.mark.parametrize(
    "arguments",
    [
        {"client_id": ""},
        {"client_id": "a\0b"},
        {"client_id": "x", "receive_maximum": 0},
        {"client_id": "x", "expiry_interval": -1},
        {"client_id": "x", "keep_alive": float("nan")},
        {"client_id": "x", "will": Will(ts.Message("w", b""), delay=-1)},
        {"client_id": "x", "will": Will(ts.Message("w/+", b""))},
        {"client_id": "x", "will": Will(ts.Message("w", b""), delay=2**32)},
        {"client_id": "x", "will": Will(ts.Message("w", bytes(2**16)))},
        {"client_id": "x", "expiry_interval": 2**32},
        {"client_id": "x", "expiry_interval": timedelta(seconds=2**32)},
        {"client_id": "x", "keep_alive": 2**16},
    ],
)
def test_openings_that_make_no_sense_are_refused(sessions: Sessions, arguments: dict[str, object]) -> None:
    """Opening a session with arguments out of range raises, and creates nothing."""
    with pytest.raises(ts.InvalidArgumentError):
        sessions.open(**arguments)  # type: ignore[arg-type]
    assert [] == list(sessions)


# --- takeover ---


def test_an_older_owner_elsewhere_commits_nothing(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """After a takeover by another process, the first write of the previous owner fails and notifies that owner.

    Other sessions in the same commit are unaffected.
    """
    notified: list[Ended] = []
    older = sessions.open("client", expiry_interval=None, on_end=lambda _, why: notified.append(why))
    older.subscribe("a/#")
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("a/#")
    newer = crash().open("client", expiry_interval=None)
    publish("1")
    assert [other] == [session for session, _ in sessions.deliver()]
    assert [Ended.TAKEN_OVER] == notified
    with pytest.raises(SessionTakenOverError):
        older.deliver()
    assert [1] == [item.packet_id for item in newer.deliver()]


@pytest.mark.parametrize("act", ["subscribe", "unsubscribe", "pubrel", "disconnect", "deliver"])
def test_whatever_an_older_owner_writes_is_refused(
    sessions: Sessions, publish: Publishing, crash: Crash, act: str
) -> None:
    """Every write of an owner that another process replaced is refused, and changes nothing."""
    older = sessions.open("client", expiry_interval=None)
    older.subscribe("a/#")
    older.publish([ts.Message("x", b"", "client", 2)], [3])
    newer = crash().open("client", expiry_interval=None)
    before = newer.status(), sessions["client"]
    publish("1")
    acts = {
        "subscribe": lambda: older.subscribe("b", 2),
        "unsubscribe": lambda: older.unsubscribe("a/#"),
        "pubrel": lambda: older.pubrel(3),
        "disconnect": older.disconnect,
        "deliver": older.deliver,
    }
    with pytest.raises(SessionTakenOverError):
        acts[act]()
    assert older.ended is Ended.TAKEN_OVER
    after = crash()["client"]
    assert (before[1].subscriptions, 0, 1) == (after.subscriptions, after.in_flight, after.awaiting_pubrel)


# --- expiring ---


def test_expired_sessions_are_removed_in_time(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """`tick` removes a session when it expires and not before, and returns the seconds until the next call."""
    session = sessions.open("client", expiry_interval=0.5)
    session.subscribe("a/#")
    assert 1.0 == sessions.tick()
    session.disconnect()
    assert 0.5 == sessions.tick()
    clock.now += SECOND // 2 - 1
    assert 1e-6 == sessions.tick()
    assert 1 == len(sessions)
    clock.now += 1
    assert 1.0 == sessions.tick()
    assert [] == session_keys(db)


def test_a_session_that_came_back_is_not_reaped(sessions: Sessions, clock: Clock, crash: Crash) -> None:
    """A session that reconnected isn't removed by an old timer, or by a process that had read its old record."""
    sessions.open("client", expiry_interval=10).disconnect()
    other = crash()
    found = other._registry.states.find("client")
    assert found is not None
    session = sessions.open("client", expiry_interval=10)
    session.subscribe("a")
    clock.now += 100 * SECOND
    sessions.tick()
    assert not other._registry.states.remove(found)
    assert session.ended is None
    session.deliver()
    assert 1 == len(sessions["client"].subscriptions)


@pytest.mark.parametrize("finish", ["tick", "open"])
@pytest.mark.parametrize("interval", [10, None])
def test_a_removal_that_was_interrupted_is_finished(
    db: ts.Database, sessions: Sessions, crash: Crash, finish: str, interval: float | None
) -> None:
    """The next tick or the next opening of the session finishes an interrupted removal."""
    session = sessions.open("client", expiry_interval=interval)
    options = SubscribeOptions(1, retain_handling=2)
    sessions.subscribe([(session, f"f/{number}", options) for number in range(1_500)])
    session.disconnect()
    shard = db.storage.shards[db.shard_of("client")]
    original, writes = shard.writer.submit, iter([True])

    def only_once(given: PendingWrite) -> PendingWrite:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        return original(given)

    shard.writer.submit = only_once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        sessions.expire("client")
    shard.writer.submit = original  # type: ignore[method-assign]
    sessions = crash()
    assert [] == list(sessions)
    assert 500 < len(session_keys(db))
    if finish == "tick":
        sessions.tick()
        assert [] == session_keys(db)
    else:
        assert not sessions.open("client").present
        assert () == sessions["client"].subscriptions


# --- keep-alive ---


def test_a_silent_client_is_lost(db: ts.Database, sessions: Sessions, clock: Clock, will: Will) -> None:
    """A client is disconnected after one and a half keep alives without a packet; every kind of packet counts."""
    notified: list[Ended] = []
    session = sessions.open("client", keep_alive=10, will=will, on_end=lambda _, why: notified.append(why))
    for act in (session.alive, lambda: session.puback(1), lambda: session.subscribe("x")):
        clock.now += 15 * SECOND - 1
        sessions.tick()
        act()
    clock.now += 15 * SECOND - 1
    sessions.tick()
    assert [] == notified
    clock.now += 1
    sessions.tick()
    assert [Ended.KEEP_ALIVE] == notified
    assert ["gone"] == wills(db)
    with pytest.raises(SessionEndedError, match="silent"):
        session.deliver()


# --- setting the clock ---


@pytest.mark.parametrize("days", [(1, -1), (-1, 1), (20_000,), (-10_000,)])
def test_connected_clients_mind_no_clock_that_is_set(
    sessions: Sessions, clock: Clock, publish: Publishing, crash: Crash, days: tuple[int, ...]
) -> None:
    """Setting the wall clock changes neither when silent clients are disconnected nor when PUBACKs are committed."""
    talks, silent = (sessions.open(name, expiry_interval=60, keep_alive=10) for name in ("talks", "silent"))
    talks.subscribe("a/#")
    publish("1", "2")
    talks.deliver()
    for day in days:
        clock.jump(day * 86_400 * SECOND)
        sessions.tick()
    talks.puback(1)
    for seconds, ended, in_flight in ((14, None, 2), (2, Ended.KEEP_ALIVE, 1)):
        for _ in range(seconds):
            clock.now += SECOND
            sessions.tick()
            talks.alive()
        assert (None, ended, in_flight) == (talks.ended, silent.ended, crash()["talks"].in_flight)


# --- listing, kicking and expiring ---


def test_sessions_are_looked_at_kicked_and_expired(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Stored sessions can be listed, disconnected by `kick`, and removed by `expire`."""
    notified: list[Ended] = []
    sessions.open("b", expiry_interval=60).disconnect()
    session = sessions.open("a", expiry_interval=None, on_end=lambda _, why: notified.append(why))
    session.subscribe("a/#", 2)
    publish("1", qos=2)
    session.deliver()
    assert [("a", True, None), ("b", False, 60.0)] == [
        (info.client_id, info.connected, info.expiry_interval) for info in sessions
    ]
    info = sessions["a"]
    assert ([("a/#", 2)], 1) == ([(name, options.qos) for name, options in info.subscriptions], info.in_flight)
    assert sessions.kick("a")
    assert not sessions.kick("a")
    assert [Ended.KICKED] == notified
    session = sessions.open("a", on_end=lambda _, why: notified.append(why))
    sessions.expire("a")
    sessions.expire("b")
    assert [Ended.KICKED, Ended.EXPIRED] == notified
    assert [] == session_keys(db)
    for act in (sessions.__getitem__, sessions.lag, sessions.kick, sessions.expire):
        with pytest.raises(SessionNotFoundError):
            act("a")  # type: ignore[operator]


def test_sessions_are_a_collection(sessions: Sessions) -> None:
    """`Sessions` is a collection ordered by client id; iteration skips sessions that vanish meanwhile."""
    assert 0 == len(sessions)
    for name in ("b", "a", "c"):
        sessions.open(name, expiry_interval=60).subscribe("x", 1)
    assert 3 == len(sessions)
    assert "a" in sessions
    assert "d" not in sessions
    found = iter(sessions)
    assert sessions["a"] == next(found)
    sessions.expire("b")
    assert [sessions["c"]] == list(found)
    assert (("x", SubscribeOptions(1)),) == sessions["c"].subscriptions


def test_lengths_of_time_may_be_timedeltas(sessions: Sessions, clock: Clock) -> None:
    """Durations may be given as timedelta or as seconds."""
    will = Will(ts.Message("gone", b""), delay=timedelta(seconds=5))
    session = sessions.open("client", expiry_interval=timedelta(minutes=1), keep_alive=timedelta(seconds=30), will=will)
    assert 30 == session.keep_alive
    assert 60 == sessions["client"].expiry_interval
    session.disconnect(expiry_interval=timedelta(hours=1), send_will=True)
    info = sessions["client"]
    assert (3_600, clock.now + 3_600 * SECOND, clock.now + 5 * SECOND) == (
        info.expiry_interval,
        info.expires,
        info.will_due,
    )
    assert not sessions.wait(timedelta(0))
    sessions.groups.slow_after, sessions.groups.handover_after = timedelta(seconds=2), timedelta(minutes=1)
    assert (2, 60) == (sessions.groups.slow_after, sessions.groups.handover_after)
    sessions.groups.handover_after = None
    assert sessions.groups.handover_after is None


@pytest.mark.parametrize("wrong", [-1, timedelta(-1), True, "60", float("nan"), float("inf"), 1e10])
def test_an_invalid_duration_is_refused(sessions: Sessions, wrong: Any) -> None:
    """A duration that is invalid is refused, and nothing changes."""
    calls: list[Callable[[], object]] = [
        lambda: sessions.open("client", expiry_interval=wrong),
        lambda: sessions.open("client", keep_alive=wrong),
        lambda: sessions.open("client", will=Will(ts.Message("a", b""), delay=wrong)),
        lambda: setattr(sessions.groups, "slow_after", wrong),
        lambda: setattr(sessions.groups, "handover_after", wrong),
    ]
    for call in calls:
        with pytest.raises(ts.InvalidArgumentError, match=r"a timedelta, a number of seconds, or a text|has no unit"):
            call()
    assert [] == list(sessions)
    assert (5, 60) == (sessions.groups.slow_after, sessions.groups.handover_after)


def test_a_session_that_a_crash_left_open_can_be_kicked(
    db: ts.Database, sessions: Sessions, crash: Crash, will: Will
) -> None:
    """Kicking a session that a crash left open ends its connection and publishes its will."""
    sessions.open("client", expiry_interval=60, will=Will(will.message))
    sessions = crash()
    assert sessions["client"].connected
    assert sessions.kick("client")
    assert ["gone"] == wills(db)
    assert not sessions.kick("client")
    assert START + 60 * SECOND == sessions["client"].expires


# --- closing ---


def test_closing_commits_once_for_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the database commits once for each shard, however many sessions there are."""
    db = ts.open(tmp_path / "db", backend="memory", shards=2)
    for number in range(50):
        session = db.sessions.open(f"client-{number}", expiry_interval=10)
        session.subscribe("a", 1)
    db.publish([ts.Message("a", b"", "publisher", 1)])
    for session, items in db.sessions.deliver():
        session.puback(*[item.packet_id for item in items])
    db.sessions.tick()  # records the clock's reading
    written: list[int] = []
    commit = SessionState.commit

    def counted(self: SessionState, by_shard: Mapping[int, Sequence[StateWrite]]) -> Mapping[int, ts.TopicstoreError]:
        written.extend(by_shard)
        return commit(self, by_shard)

    monkeypatch.setattr(SessionState, "commit", counted)
    db.close()
    assert [0, 1] == sorted(written)
