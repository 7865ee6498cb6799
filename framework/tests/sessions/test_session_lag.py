"""The lag of connected and disconnected sessions, by filter: the messages and seconds they are behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.sessions import SessionEndedError, Sessions
from topicstore.storage.counting.lag import Lag
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000
NONE = Lag(messages=0, exact=True, seconds=0.0)


def behind(messages: int, seconds: float) -> Lag:
    return Lag(messages=messages, exact=True, seconds=seconds)


def published(publish: Publishing, clock: Clock, count: int, topic: str = "a/b", client_id: str = "publisher") -> None:
    """Publish messages one second apart."""
    for number in range(count):
        clock.now += SECOND
        publish(str(number), topic=topic, client_id=client_id)


def test_each_filter_has_its_own(sessions: Sessions, publish: Publishing, clock: Clock, crash: Crash) -> None:
    """Each filter has its own lag; delivered messages don't count, whether acknowledged or not.

    The lag is the same after a disconnect and after a crash.
    """
    session = sessions.open("client", expiry_interval=None)
    for topic_filter in ("a/#", "a/b", "c"):
        session.subscribe(topic_filter, 1)
    assert {"a/#": NONE, "a/b": NONE, "c": NONE} == session.lag()
    published(publish, clock, 5)
    published(publish, clock, 2, topic="a/c")
    assert {"a/#": behind(7, 6), "a/b": behind(5, 6), "c": NONE} == session.lag()
    assert {"client": session.lag()} == sessions.lag() == sessions.lag("client")
    left = 12 - len(session.deliver(limit=4))
    lags = session.lag()
    assert left == sum(lag.messages for lag in lags.values())
    assert {"client": lags} == crash().lag()
    session.disconnect()
    assert {"client": lags} == sessions.lag("client")
    with pytest.raises(SessionEndedError):
        session.lag()
    published(publish, clock, 1, topic="c")
    assert behind(1, 0) == sessions.lag()["client"]["c"]
    session = sessions.open("client", expiry_interval=None)
    while session.deliver():
        pass
    assert {NONE} == set(session.lag().values())


def test_nobody_waits_for_what_is_not_to_be_delivered(
    db: ts.Database, sessions: Sessions, publish: Publishing, clock: Clock
) -> None:
    """Messages that won't be delivered don't count: own messages with No Local, and QoS 0 while the client is away."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1, no_local=True)
    session.subscribe("+/b", 0)
    published(publish, clock, 3, client_id="client")
    published(publish, clock, 2)
    assert {"a/#": behind(2, 1), "+/b": behind(5, 4)} == session.lag()
    session.disconnect()
    assert {"a/#": behind(2, 1), "+/b": NONE} == sessions.lag("client")["client"]
    db.delete("#")
    assert {NONE} == set(sessions.lag("client")["client"].values())


def test_a_subscription_may_begin_behind(sessions: Sessions, publish: Publishing, clock: Clock) -> None:
    """A subscription with a start lags by the messages since this start."""
    sessions.open("keeper", expiry_interval=None).subscribe("#", 1)
    published(publish, clock, 10)
    late = sessions.open("late", expiry_interval=None)
    late.subscribe("a/b", 1, start=clock.now - 3 * SECOND)
    late.subscribe("a/#", 1)
    assert {"a/b": behind(4, 3), "a/#": NONE} == late.lag()


def test_a_shared_subscription_has_one_as_a_whole(
    sessions: Sessions, publish: Publishing, clock: Clock, crash: Crash
) -> None:
    """A shared subscription has one lag for all members; messages that a member returned count again."""
    text = "$share/group/a/#"
    members = [sessions.open(name, expiry_interval=60) for name in ("one", "two")]
    for member in members:
        member.subscribe(text, 1)
    for number in range(8):
        published(publish, clock, 1, topic=f"a/{number}")
    assert [{text: behind(8, 7)}] * 2 == list(sessions.lag().values()) == list(crash().lag().values())
    revoked = len(members[0].deliver())
    assert 8 - revoked == sessions.lag()["two"][text].messages
    assert 8 - revoked - len(members[1].deliver()) == sessions.lag("one")["one"][text].messages == 0
    sessions.expire("one")
    assert revoked == sessions.lag("two")["two"][text].messages
    assert [revoked] == [group.returned for group in sessions.groups]


def test_a_failure_to_read_is_reported(
    db: ts.Database, sessions: Sessions, publish: Publishing, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error while counting the lag is raised, and the next count is correct."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("#", 1)
    published(publish, clock, 1)

    def fails(*_: object, **__: object) -> None:
        raise ts.EngineError("the disk is gone")

    with monkeypatch.context() as failing:
        failing.setattr(db.storage, "plan_shard", fails)
        with pytest.raises(ts.EngineError):
            session.lag()
    assert {"#": behind(1, 0)} == session.lag()


@pytest.mark.parametrize("how", ["deleted", "dropped"])
def test_messages_that_came_back_and_are_gone_do_not_count(tmp_path: Path, how: str) -> None:
    """Messages that a member returned and that were then removed don't count in a shared subscription's lag."""
    with ts.open(tmp_path / "db", backend="memory", shards=1) as db:
        one, two = (db.sessions.open(name, expiry_interval=None) for name in ("one", "two"))
        one.subscribe("$share/g/#", 1)
        db.store([ts.Message(f"t/{number}", b"x", "p", qos=1) for number in range(10)])
        assert 10 == len(one.deliver())
        two.subscribe("$share/g/#", 1)
        two.disconnect()
        one.disconnect(expiry_interval=0)
        assert 10 == db.sessions.lag("two")["two"]["$share/g/#"].messages
        if how == "deleted":
            assert 10 == db.delete("#")
        else:
            db.add_generation()
            db.drop_generation(1)
        assert 0 == db.sessions.lag("two")["two"]["$share/g/#"].messages
        two = db.sessions.open("two", expiry_interval=None)
        assert [] == two.deliver()
        two.disconnect()
        assert [0] == [group.returned for group in db.sessions.groups]
        assert 0 == db.sessions.lag("two")["two"]["$share/g/#"].messages
