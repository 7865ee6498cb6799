"""Waiting for sessions that are ready, and retries after failures, which affect no other session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.requests import ReadRequest, ReadResult
from topicstore.plugins import registry
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.notifier import Notifier, ThreadWaiter
from topicstore.sessions import Publish, Session, Sessions
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, running, wait_until

Publishing = Callable[..., None]


def payloads(items: object) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]  # type: ignore[attr-defined]


def subscribed(sessions: Sessions, client_id: str = "client", topic_filter: str = "a/#", qos: int = 1) -> Session:
    session = sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, qos)
    sessions.deliver()
    return session


# --- waiting ---


def test_waiting_ends_with_a_message_and_only_for_whom_it_is(sessions: Sessions, publish: Publishing) -> None:
    """A wait ends with a message for a session; sessions whose filters don't match aren't ready."""
    session = subscribed(sessions)
    other = subscribed(sessions, "other", "b/#")
    publish("1", topic="c")
    assert not sessions.wait(0)
    publish("2")
    assert sessions.wait(0)
    assert [(session, ["2"])] == [(who, payloads(items)) for who, items in sessions.deliver()]
    assert not sessions.wait(0)
    assert other.ended is None


def test_a_subscription_that_begins_at_the_end_takes_no_turn(db: ts.Database, sessions: Sessions) -> None:
    """A new subscription makes its session ready and changed only if there are messages to read.

    So a client that merely connects causes no delivery and no checkpoint.
    """
    db.store([ts.Message("a/1", b"before", "publisher")])
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#")
    assert not sessions.wait(0)
    sessions.deliver()
    assert not session._dirty
    session.subscribe("+/1", start="beginning")
    assert sessions.wait(0)
    assert ["before"] == payloads(session.deliver())
    db.publish([ts.Message("a/1", b"after", "publisher", 1)])
    assert ["after", "after"] == payloads(session.deliver())


def blocked(notifier: Notifier) -> bool:
    """Return whether a thread is waiting for a notification by this notifier."""
    return any(one._notifier is notifier for one in running(ThreadWaiter.wait))


def waiting(sessions: Sessions) -> Future[bool]:
    """Call `Sessions.wait` in a thread; return its future once the thread waits."""
    future = begin(sessions.wait)
    wait_until(lambda: blocked(sessions._dispatcher.notifier), "a thread to wait for the sessions")
    return future


def test_a_thread_that_waits_is_woken_by_another(sessions: Sessions, publish: Publishing) -> None:
    """A thread that waits without a timeout wakes when another thread publishes a message."""
    session = subscribed(sessions)
    found = waiting(sessions)
    publish("1")
    assert found.result(PATIENCE)
    assert ["1"] == payloads(session.deliver())


def test_an_event_loop_is_woken_from_a_thread(sessions: Sessions, publish: Publishing) -> None:
    """An event loop that waits for sessions is woken from a thread, and runs other tasks meanwhile."""
    session = subscribed(sessions)

    async def follow() -> list[str]:
        assert not await sessions.wait_async(0)
        waits = asyncio.create_task(sessions.wait_async(PATIENCE))
        await asyncio.sleep(0)  # until the task waits
        await asyncio.get_running_loop().run_in_executor(None, publish, "1")
        assert await waits
        return payloads(session.deliver())

    assert ["1"] == asyncio.run(follow())


def test_who_asked_for_it_is_notified_when_there_may_be_something(sessions: Sessions, publish: Publishing) -> None:
    """A `notify` callback runs after messages arrive, and after acknowledgements that allow further deliveries."""
    session = sessions.open("narrow", receive_maximum=2)
    session.subscribe("a/#", 1)
    sessions.deliver()
    calls: list[str] = []
    with sessions.notify(lambda: calls.append("rung")):
        publish("1", "2", "3")
        assert calls
        first, second = [packet for packet in session.deliver() if isinstance(packet, Publish)]
        assert not sessions.wait(0)
        calls.clear()
        session.puback(first.packet_id)
        assert calls
        assert ["3"] == payloads(session.deliver())
        sessions.wait(0)
        session.puback(second.packet_id)
        sessions.deliver()
        calls.clear()
        session.puback(3)
        assert not calls
    publish("4")
    assert not calls


def test_waiting_ends_with_the_database(tmp_path: Path) -> None:
    """Closing the database ends waits in threads and in event loops with an error."""
    db = ts.open(tmp_path / "db", backend="memory")
    sessions = db.sessions
    found = waiting(sessions)
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        found.result(PATIENCE)
    with pytest.raises(ts.DatabaseClosedError):
        asyncio.run(sessions.wait_async())
    for act in (sessions.deliver, sessions.tick, lambda: sessions.open("client")):
        with pytest.raises(ts.DatabaseClosedError):
            act()


# --- cost of idle sessions ---


def test_sessions_at_the_same_place_share_one_read(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """A hundred sessions at the same position cost as many reads as one."""
    for number in range(100):
        subscribed(sessions, f"client-{number}")
    publish(*map(str, range(50)))
    reads = sum(shard.writer.counters.reads for shard in db.storage.shards)
    assert 5_000 == sum(len(items) for _, items in sessions.deliver())
    assert sum(shard.writer.counters.reads for shard in db.storage.shards) - reads <= 4


# --- failures ---


class Failing:
    """A plugin that fails to read the given shards."""

    shards: tuple[int, ...] = ()
    failures = 0

    @ts.hookimpl(wrapper=True)
    def topicstore_read(self, request: ReadRequest) -> Generator[None, ReadResult, ReadResult]:
        if request.cursor.shard in self.shards:
            self.failures += 1
            raise ts.StorageFullError("not now")
        return (yield)


@pytest.fixture
def plugin() -> Failing:
    return Failing()


@pytest.fixture(params=[2])
def failing(
    request: pytest.FixtureRequest, tmp_path: Path, plugin: Failing, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ts.Database]:
    """A database that is opened with the plugin `Failing`."""
    monkeypatch.setitem(registry().plugins, "failing", plugin)
    with ts.open(tmp_path / "db", backend="memory", shards=request.param, clock=clock, plugins=["failing"]) as db:
        yield db


def one_publisher_a_shard(db: ts.Database) -> list[str]:
    return [next(f"p{n}" for n in range(100) if db.shard_of(f"p{n}") == shard) for shard in range(2)]


def store(db: ts.Database, payload: str, client_id: str) -> None:
    db.publish([ts.Message("a/b", payload.encode(), client_id, 1)])


def test_a_shard_that_cannot_be_read_holds_up_no_other(failing: ts.Database, plugin: Failing) -> None:
    """If one shard can't be read, a session continues with the others, and reports the failure.

    The session catches up at a tick once the shard can be read.
    """
    db, sessions = failing, failing.sessions
    session = subscribed(sessions)
    plugin.shards = (0,)
    for payload, client_id in zip("12", one_publisher_a_shard(db), strict=True):
        store(db, payload, client_id)
    assert [["2"]] == [payloads(items) for _, items in sessions.deliver()]
    assert "not now" == session.status().waits_for
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    sessions.tick()
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    plugin.shards = ()
    sessions.tick()
    assert [["1"]] == [payloads(items) for _, items in sessions.deliver()]
    assert session.failure is None
    assert session.puback(1, 2)


def test_a_session_that_could_not_be_opened_is_opened_later(failing: ts.Database, plugin: Failing) -> None:
    """A session that failed to open delays no other session; opened later, it gets its messages exactly once."""
    db, sessions = failing, failing.sessions
    here = next(name for name in map(str, range(100)) if db.shard_of(name) == 0)
    db.publish([ts.Message(here, b"kept", "p", 1, retain=True)])
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    session.subscribe(here, 1)
    session.disconnect()
    plugin.shards = (0,)
    with pytest.raises(ts.StorageFullError):
        sessions.open("client", expiry_interval=None)
    assert sessions.connected("client") is None
    plugin.shards = ()
    store(db, "1", "p")
    assert not sessions.wait(0)
    assert [] == sessions.deliver()
    sessions.open("client", expiry_interval=None)
    assert {"kept", "1"} == {payload for _, items in sessions.deliver() for payload in payloads(items)}


def test_what_cannot_be_read_again_is_sent_again_later(failing: ts.Database, plugin: Failing) -> None:
    """A read error isn't mistaken for a vanished message: the message in flight is redelivered later."""
    db = failing
    publisher = one_publisher_a_shard(db)[0]
    session = subscribed(db.sessions)
    store(db, "1", publisher)
    session.deliver()
    session.lost()
    plugin.shards = (0,)
    session = db.sessions.open("client", expiry_interval=None)
    assert [] == db.sessions.deliver()
    assert not db.sessions.wait(0)
    with pytest.raises(ts.StorageFullError, match="not now"):
        session.deliver()
    plugin.shards = ()
    assert [(1, True)] == [(item.packet_id, item.dup) for item in session.deliver()]  # type: ignore[union-attr]


def received(session: Session) -> list[str]:
    """Deliver and acknowledge everything; return the payloads."""
    found: list[str] = []
    while items := session.deliver():
        found += payloads(items)
        session.puback(*[item.packet_id for item in items])
    return found


@pytest.mark.parametrize("failing", [1], indirect=True)
def test_a_session_rests_while_retained_messages_cannot_be_read(failing: ts.Database, plugin: Failing) -> None:
    """While retained messages can't be read, a session isn't ready before the next tick.

    Otherwise a server would retry the read in a busy loop.
    """
    failing.publish([ts.Message("a/b", b"retained", "publisher", 1, retain=True)])
    session = failing.sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1)
    plugin.shards = (0,)
    for reads in (1, 2):
        assert [] == failing.sessions.deliver()
        assert isinstance(session.failure, ts.RecoverableError)
        assert not failing.sessions.wait(0)
        assert reads == plugin.failures
        failing.sessions.tick()
    plugin.shards = ()
    assert ["retained"] == received(session)


@pytest.mark.parametrize("failing", [1], indirect=True)
def test_a_session_rests_while_what_came_back_to_its_group_cannot_be_read(
    failing: ts.Database, plugin: Failing
) -> None:
    """While returned messages of a shared subscription can't be read, its sessions aren't ready before the next tick.

    Once the returned messages can be read, they are delivered before newer messages.
    """
    first, other = (failing.sessions.open(client, expiry_interval=None) for client in ("first", "other"))
    first.subscribe("$share/group/a/#", 1)
    failing.publish([ts.Message("a/b", b"1", "publisher", 1)])
    assert ["1"] == payloads(first.deliver())
    other.subscribe("$share/group/a/#", 1)
    first.unsubscribe("$share/group/a/#")
    first.disconnect(expiry_interval=0)
    failing.sessions.tick()
    failing.publish([ts.Message("a/b", b"2", "publisher", 1)])
    plugin.shards = (0,)
    for reads in (1, 2):
        assert [] == failing.sessions.deliver()
        assert isinstance(other.failure, ts.RecoverableError)
        assert not failing.sessions.wait(0)
        assert reads == plugin.failures
        failing.sessions.tick()
    plugin.shards = ()
    assert ["1", "2"] == received(other)


def failing_writes(db: ts.Database, client_id: str, error: BaseException) -> AbstractContextManager[object]:
    """Make all writes to a client's shard fail."""
    return patch.object(db.storage.shards[db.shard_of(client_id)].writer, "submit", side_effect=error)


@pytest.mark.parametrize("qos", [1, 2])
def test_what_cannot_be_committed_is_not_handed_out(db: ts.Database, sessions: Sessions, qos: int) -> None:
    """Messages whose commit fails are not handed out, and arrive once after a later commit.

    Sessions of other shards are unaffected.
    """
    here, there = one_publisher_a_shard(db)
    session, other = subscribed(sessions, here, qos=qos), subscribed(sessions, there, qos=qos)
    store(db, "1", "publisher")
    with failing_writes(db, here, ts.StorageFullError("disk full")):
        assert [other] == [who for who, _ in sessions.deliver()]
        assert "disk full" == session.status().waits_for
        assert not sessions.wait(0)
        calls = session.deliver, lambda: session.subscribe("a/#", 0), lambda: session.unsubscribe("a/#")
        for call in (*calls, session.disconnect):
            with pytest.raises(ts.StorageFullError):
                call()
    sessions.tick()
    assert [(session, ["1"])] == [(who, payloads(items)) for who, items in sessions.deliver()]
    assert qos == session.status().subscriptions[0].options.qos
    assert 1 == session.status().in_flight


def test_an_interruption_loses_nothing(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Ctrl-C during a delivery's commit loses nothing: the messages are read again."""
    session = subscribed(sessions)
    publish("1")
    for deliver in (sessions.deliver, session.deliver):
        with failing_writes(db, "client", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            deliver()
    assert ["1"] == payloads(session.deliver())


def test_a_checkpoint_that_fails_is_made_up_for(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """After a failed checkpoint, acknowledgements stay pending until the next checkpoint."""
    session = subscribed(sessions)
    publish("1")
    session.deliver()
    session.puback(1)
    for checkpoint in (sessions.checkpoint, session.checkpoint):
        with failing_writes(db, "client", ts.StorageFullError("disk full")), pytest.raises(ts.StorageFullError):
            checkpoint()
    assert 1 == sessions["client"].in_flight
    sessions.checkpoint()
    assert 0 == sessions["client"].in_flight


def test_what_is_stored_during_a_scan_is_not_missed(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Messages stored during a scan are not missed, although waiting sessions were woken before the scan ended."""
    db.store([ts.Message("a/b", b"1", "publisher", 1)])
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1, start="beginning")
    assert sessions.wants("a/b")  # loads the filters first; otherwise publishing waits for all other calls
    scan, stored = Feed._scan, list[str]()

    def scanned(self: Feed, *args: Any) -> Any:
        result = scan(self, *args)
        if len(result[0].positions) and not stored:
            stored.append("2")
            begin(lambda: (publish("2"), sessions.wait(0))).result(PATIENCE)
        return result

    with patch.object(Feed, "_scan", scanned):
        found = [text for _, packets in sessions.deliver() for text in payloads(packets)]
    assert ["2"] == stored
    while sessions.wait(0):
        found += [text for _, packets in sessions.deliver() for text in payloads(packets)]
    assert ["1", "2"] == found
