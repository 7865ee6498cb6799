"""Who has something to do is found by events; what fails is tried again and harms nobody else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore import plugins
from topicstore.contract.state import StateWrite
from topicstore.plugins import Registry
from topicstore.pubsub.bell import Bell, ListeningThread
from topicstore.pubsub.feed import Feed
from topicstore.sessions import Publish, Session, Sessions
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, running, wait_until

Publishing = Callable[..., None]
SECOND = 1_000_000


def payloads(items: object) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]  # type: ignore[attr-defined]


def subscribed(sessions: Sessions, client_id: str = "client", topic_filter: str = "a/#", qos: int = 1) -> Session:
    session = sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, qos)
    sessions.deliver()
    return session


# --- waiting ---


def test_waiting_ends_with_a_message_and_only_for_whom_it_is(sessions: Sessions, publish: Publishing) -> None:
    """Who does not match has nothing to do."""
    session = subscribed(sessions)
    other = subscribed(sessions, "other", "b/#")
    publish("1", topic="c")
    assert not sessions.wait(0)
    publish("2")
    assert sessions.wait(0)
    assert [(session, ["2"])] == [(who, payloads(items)) for who, items in sessions.deliver()]
    assert not sessions.wait(0)
    assert other.ended is None


def blocked(bell: Bell) -> bool:
    """Say whether a thread waits for a bell at this moment."""
    return any(one._bell is bell for one in running(ListeningThread.wait))


def waiting(sessions: Sessions) -> Future[bool]:
    """Wait for the sessions in a thread; return when it does."""
    future = begin(sessions.wait)
    wait_until(lambda: blocked(sessions._dispatcher.bell), "a thread to wait for the sessions")
    return future


def test_a_thread_that_waits_is_woken_by_another(sessions: Sessions, publish: Publishing) -> None:
    """However long it would have waited."""
    session = subscribed(sessions)
    found = waiting(sessions)
    publish("1")
    assert found.result(PATIENCE)
    assert ["1"] == payloads(session.deliver())


def test_an_event_loop_is_woken_from_a_thread(sessions: Sessions, publish: Publishing) -> None:
    """And goes on meanwhile."""
    session = subscribed(sessions)

    async def follow() -> list[str]:
        assert not await sessions.wait_async(0)
        waits = asyncio.create_task(sessions.wait_async(PATIENCE))
        await asyncio.sleep(0)  # until it waits
        await asyncio.get_running_loop().run_in_executor(None, publish, "1")
        assert await waits
        return payloads(session.deliver())

    assert ["1"] == asyncio.run(follow())


def test_who_asked_for_it_is_notified_when_there_may_be_something(sessions: Sessions, publish: Publishing) -> None:
    """Of messages, of acknowledgements that make room, and not of acknowledgements that change nothing."""
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
    """By an error, in threads and in event loops."""
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


def test_publishers_and_a_deliverer_in_threads_lose_nothing(sessions: Sessions, db: ts.Database) -> None:
    """Every publisher's messages come to every session in its order, and everything is acknowledged."""
    clients = [subscribed(sessions, f"client-{number}") for number in range(4)]
    got: dict[Session, list[str]] = {session: [] for session in clients}

    def store(publisher: str) -> None:
        for number in range(50):
            db.publish([ts.Message("a/b", f"{publisher}-{number}".encode(), publisher, 1)])

    storing = [begin(partial(store, f"p{number}")) for number in range(3)]
    while min(map(len, got.values())) < 150:
        assert sessions.wait(PATIENCE)
        for session, items in sessions.deliver(limit_each=7):
            got[session] += payloads(items)
            assert len(items) == session.puback(*[item.packet_id for item in items])
    for stored in storing:
        stored.result(PATIENCE)
    for messages in got.values():
        for publisher in ("p0", "p1", "p2"):
            mine = [f"{publisher}-{number}" for number in range(50)]
            assert mine == [message for message in messages if message.startswith(publisher)]


# --- what idle sessions cost ---


def test_idle_sessions_are_not_read_for(db: ts.Database, sessions: Sessions) -> None:
    """Each has a filter of its own; while others have traffic."""
    busy = subscribed(sessions, "busy", "busy")
    for number in range(300):
        sessions.open(f"idle-{number}", expiry_interval=None).subscribe(f"idle/{number}/#", 1)
    while sessions.wait(0):
        sessions.deliver()
    reads = sum(shard.counters.reads for shard in db.storage.shards)
    db.publish([ts.Message("busy", b"%d" % number, "publisher", 1) for number in range(100)])
    assert [busy] == [session for session, _ in sessions.deliver()]
    assert sum(shard.counters.reads for shard in db.storage.shards) - reads <= 4


def test_sessions_at_the_same_place_share_one_read(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """A hundred cost as many reads as one."""
    for number in range(100):
        subscribed(sessions, f"client-{number}")
    publish(*map(str, range(50)))
    reads = sum(shard.counters.reads for shard in db.storage.shards)
    assert 5_000 == sum(len(items) for _, items in sessions.deliver())
    assert sum(shard.counters.reads for shard in db.storage.shards) - reads <= 4


# --- what fails ---


FAILING = """
import topicstore as ts
shard = None
@ts.hookimpl(wrapper=True)
def topicstore_read(request):
    if request.cursor.shard == shard:
        raise ts.StorageFullError("not now")
    return (yield)
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[tuple[ts.Database, ModuleType]]:
    """Return a database with a plugin that can't read the shard that it is told."""
    built_in = [EntryPoint(name, f"topicstore_{name}.plugin", plugins.GROUP) for name in ("backends", "layouts")]
    (tmp_path / "failing_.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry([*built_in, EntryPoint("failing_", "failing_", plugins.GROUP)])
    monkeypatch.setattr("topicstore.storage.opening.registry", lambda: registry)
    with ts.open(tmp_path / "db", backend="memory", shards=2, clock=clock, plugins=["failing_"]) as db:
        yield db, sys.modules["failing_"]
    del sys.modules["failing_"]


def one_publisher_a_shard(db: ts.Database) -> list[str]:
    return [next(f"p{n}" for n in range(100) if db.shard_of(f"p{n}") == shard) for shard in range(2)]


def store(db: ts.Database, payload: str, client_id: str) -> None:
    db.publish([ts.Message("a/b", payload.encode(), client_id, 1)])


def test_a_shard_that_cannot_be_read_holds_up_no_other(failing: tuple[ts.Database, ModuleType]) -> None:
    """The session goes on with the others, says what is wrong, and catches up at a tick when that is over."""
    db, plugin = failing
    sessions = db.sessions
    session = subscribed(sessions)
    plugin.shard = 0
    for payload, client_id in zip("12", one_publisher_a_shard(db), strict=True):
        store(db, payload, client_id)
    assert [["2"]] == [payloads(items) for _, items in sessions.deliver()]
    assert "not now" == session.status().waits_for
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    sessions.tick()
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    plugin.shard = None
    sessions.tick()
    assert [["1"]] == [payloads(items) for _, items in sessions.deliver()]
    assert session.failure is None
    assert session.puback(1, 2)


def test_a_session_that_could_not_be_opened_is_opened_later(failing: tuple[ts.Database, ModuleType]) -> None:
    """What it followed by then holds up no other, and is delivered once."""
    db, plugin = failing
    sessions = db.sessions
    here = next(name for name in map(str, range(100)) if db.shard_of(name) == 0)
    db.publish([ts.Message(here, b"kept", "p", 1, retain=True)])
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    session.subscribe(here, 1)
    session.disconnect()
    plugin.shard = 0
    with pytest.raises(ts.StorageFullError):
        sessions.open("client", expiry_interval=None)
    assert sessions.connected("client") is None
    plugin.shard = None
    store(db, "1", "p")
    assert not sessions.wait(0)
    assert [] == sessions.deliver()
    sessions.open("client", expiry_interval=None)
    assert {"kept", "1"} == {payload for _, items in sessions.deliver() for payload in payloads(items)}


def test_what_cannot_be_read_again_is_sent_again_later(failing: tuple[ts.Database, ModuleType]) -> None:
    """Nothing in flight is taken for vanished because of an error."""
    db, plugin = failing
    publisher = one_publisher_a_shard(db)[0]
    session = subscribed(db.sessions)
    store(db, "1", publisher)
    session.deliver()
    session.lost()
    plugin.shard = 0
    session = db.sessions.open("client", expiry_interval=None)
    assert [] == db.sessions.deliver()
    assert not db.sessions.wait(0)
    with pytest.raises(ts.StorageFullError, match="not now"):
        session.deliver()
    plugin.shard = None
    assert [(1, True)] == [(item.packet_id, item.dup) for item in session.deliver()]  # type: ignore[union-attr]


def refuse(_: object) -> None:
    raise ts.StorageFullError("disk full")


@pytest.mark.parametrize("qos", [1, 2])
def test_what_cannot_be_committed_is_not_handed_out(db: ts.Database, sessions: Sessions, qos: int) -> None:
    """It comes, once, when it can; sessions of other shards don't notice."""
    here, there = one_publisher_a_shard(db)
    session, other = subscribed(sessions, here, qos=qos), subscribed(sessions, there, qos=qos)
    store(db, "1", "publisher")
    shard = db.storage.shards[db.shard_of(here)]
    original = shard._writes.write_state
    shard._writes.write_state = refuse  # type: ignore[method-assign, assignment]
    assert [other] == [who for who, _ in sessions.deliver()]
    assert "disk full" == session.status().waits_for
    assert not sessions.wait(0)
    with pytest.raises(ts.StorageFullError):
        session.deliver()
    with pytest.raises(ts.StorageFullError):
        session.subscribe("a/#", 0)
    with pytest.raises(ts.StorageFullError):
        session.unsubscribe("a/#")
    with pytest.raises(ts.StorageFullError):
        session.disconnect()
    shard._writes.write_state = original  # type: ignore[method-assign]
    sessions.tick()
    assert [(session, ["1"])] == [(who, payloads(items)) for who, items in sessions.deliver()]
    assert qos == session.status().subscriptions[0].options.qos
    assert 1 == session.status().in_flight


def test_an_interruption_loses_nothing(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Ctrl-C while it is committed: what was read is read again."""
    session = subscribed(sessions)
    publish("1")

    def interrupt(_: Sequence[StateWrite]) -> None:
        raise KeyboardInterrupt

    shard = db.storage.shards[db.shard_of("client")]
    original = shard._writes.write_state
    shard._writes.write_state = interrupt  # type: ignore[method-assign, assignment]
    for deliver in (sessions.deliver, session.deliver):
        with pytest.raises(KeyboardInterrupt):
            deliver()
    shard._writes.write_state = original  # type: ignore[method-assign]
    assert ["1"] == payloads(session.deliver())


def test_a_checkpoint_that_fails_is_made_up_for(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """What was acknowledged stays to be committed."""
    session = subscribed(sessions)
    publish("1")
    session.deliver()
    session.puback(1)
    shard = db.storage.shards[db.shard_of("client")]
    original = shard._writes.write_state
    shard._writes.write_state = refuse  # type: ignore[method-assign, assignment]
    for checkpoint in (sessions.checkpoint, session.checkpoint):
        with pytest.raises(ts.StorageFullError):
            checkpoint()
    shard._writes.write_state = original  # type: ignore[method-assign]
    assert 1 == sessions["client"].in_flight
    sessions.checkpoint()
    assert 0 == sessions["client"].in_flight


def test_what_is_stored_during_a_scan_is_not_missed(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Though those who waited for it were woken while the scan, which had seen the end, held no lock."""
    db.store([ts.Message("a/b", b"1", "publisher", 1)])
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1, start="beginning")
    assert sessions.wants("a/b")  # the filters are read first, for which publishing waits for all other calls
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
