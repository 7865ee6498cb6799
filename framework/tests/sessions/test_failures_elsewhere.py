"""Failures that stores of this kind are known for: each test is named by the property that rules one out."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore import plugins
from topicstore.contract.errors import EngineError
from topicstore.contract.positions import first_position
from topicstore.plugins import Registry
from topicstore.sessions import Publish, PubRel, Session, Sessions
from topicstore.sessions.records import Keys
from topicstore.sessions.session_state import SessionState, encode_session
from topicstore.shard.state import FrameworkWrite
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000


def payloads(items: list[Publish | PubRel]) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]


def everything(session: Session) -> list[str]:
    """Return all there is to deliver; each message is acknowledged."""
    found: list[str] = []
    while items := session.deliver():
        found += payloads(items)
        session.puback(*[item.packet_id for item in items])
    return found


def test_packet_ids_are_unique_over_the_whole_window(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """Also behind the last one, where they begin anew among those still in use, and after a crash there."""
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1)
    publish(*map(str, range(50)))
    waiting = {item.packet_id for item in session.deliver()} - set(range(1, 40))
    session.puback(*range(1, 40))
    for _ in range(14):
        publish(*map(str, range(5_000)))
        while items := session.deliver(5_000):
            ids = [item.packet_id for item in items]
            assert len(ids) == len(set(ids))
            assert waiting.isdisjoint(ids)
            session.puback(*ids)
    session.checkpoint()
    session = crash().open("subscriber", expiry_interval=None)
    assert waiting == {item.packet_id for item in session.deliver()}
    publish("new")
    assert waiting.isdisjoint(item.packet_id for item in session.deliver())


def test_replays_go_by_the_options_of_their_time(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """What was stored before a change of options comes by those before, though a crash lies between."""
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 2, subscription_identifier=1)
    publish("1", qos=2)
    session.subscribe("a/#", 1, subscription_identifier=2)
    publish("2", qos=2)
    for resumed in (crash(), crash()):
        session = resumed.open("subscriber", expiry_interval=None)
        found = [(i.message.payload, i.qos, i.subscription_identifiers) for i in session.deliver()]  # type: ignore[union-attr]
        assert [(b"1", 2, (1,)), (b"2", 1, (2,))] == found


@pytest.mark.parametrize("layout", ["block", "skipstream"])
def test_what_was_learned_of_topics_is_as_durable_as_messages(tmp_path: Path, clock: Clock, layout: str) -> None:
    """Sessions find all messages of a generation that inherited it, after a crash and a restart."""
    topics = [f"fleet/{number}/speed" for number in range(150)]
    messages = [ts.Message(topic, topic.encode(), "publisher", 1) for topic in topics]
    with ts.open(tmp_path / "db", layout=layout, clock=clock, auto_compact=False) as db:
        session = db.sessions.open("subscriber", expiry_interval=None)
        session.subscribe("fleet/+/speed", 1)
        db.publish(messages)
        db.add_generation()
        db.publish(messages)
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
    for path in ("copy", "db", "db"):
        with ts.open(tmp_path / path, clock=clock) as db:
            session = db.sessions.open("subscriber", expiry_interval=None)
            session.subscribe("fleet/+/speed", 1, start=0)
            assert sorted(topics * 2) == sorted(everything(session))
            session.subscribe("fleet/149/speed", 1, start=0)
            assert ["fleet/149/speed"] * 2 == everything(session)


def test_dropping_a_generation_is_idempotent_and_ends_no_stream_by_guess(
    db: ts.Database, sessions: Sessions, publish: Publish
) -> None:
    """Nothing read yet, empty in between, dropped twice: what follows is delivered."""
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1)
    publish("1")
    db.add_generation()
    db.add_generation()
    assert ["1"] == everything(session)
    assert [] == everything(session)
    assert db.drop_generation(1)
    assert not db.drop_generation(1)
    publish("2")
    db.add_generation()
    publish("3")
    assert ["2", "3"] == everything(session)
    session.checkpoint()
    session = sessions.open("subscriber", expiry_interval=None)
    assert [] == everything(session)


def test_a_start_is_inclusive(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """A message exactly at it is delivered, whether it is a time or a place."""
    for number in range(3):
        clock.now = START + number
        db.store([ts.Message("a/b", b"%d" % number, "publisher", 1)])
    shard = db.shard_of("publisher")
    for number, start in enumerate((START + 1, {shard: first_position(START + 1) - 1})):
        session = sessions.open(f"subscriber-{number}", expiry_interval=None)
        session.subscribe("a/b", 1, start=start)
        assert ["1", "2"] == everything(session)


def test_wildcards_do_not_match_topics_of_the_system(sessions: Sessions, publish: Publishing) -> None:
    """A filter that begins with a wildcard gets nothing of ``$SYS``, stored or live; one that names it does."""
    publish("system", topic="$SYS/a", qos=1)
    sessions.open("system", expiry_interval=None).subscribe("$SYS/#", 1)
    for text in ("#", "+/a", "+/#"):
        for qos in (0, 1):
            session = sessions.open(f"{text}-{qos}", expiry_interval=None)
            session.subscribe(text, qos, start=0)
    publish("stored", topic="$SYS/a")
    assert [("system", ["stored"])] == [(session.client_id, payloads(items)) for session, items in sessions.deliver()]


@pytest.mark.parametrize("layout", ["block", "skipstream", "reference", "wildcard_optimized"])
def test_empty_levels_are_levels(tmp_path: Path, layout: str) -> None:
    """Topics that differ by one are told apart, by every layout."""
    topics = ["a", "/a", "a/", "/", "//", "a//b", "a/b", "/a/b"]
    options = {layout: {"epoch_bits": 0}} if layout == "wildcard_optimized" else None
    with ts.open(tmp_path / "db", backend="memory", layout=layout, options=options) as db:
        db.store([ts.Message(topic, topic.encode(), "publisher", 1) for topic in topics])
        for text in [*topics, "+", "+/+", "/+", "+/", "a/+/b", "+/+/+"]:
            session = db.sessions.open("subscriber", clean_start=True)
            session.subscribe(text, 1, start=0)
            wanted = sorted(topic for topic in topics if ts.matches(text, topic))
            found: list[str] = []
            while len(found) < len(wanted) and db.sessions.wait(PATIENCE):
                found += everything(session)
            assert wanted == sorted(found)


def test_no_stream_blocks_a_session_for_ever(sessions: Sessions, publish: Publishing) -> None:
    """A full window is seen, and ends with any acknowledgement; other sessions and QoS 0 go on meanwhile."""
    stuck = sessions.open("stuck", expiry_interval=None, receive_maximum=1)
    stuck.subscribe("a/#", 1)
    stuck.subscribe("live", 0)
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("a/#", 1)
    publish("1", "2")
    assert ["1"] == payloads(stuck.deliver())
    assert START == stuck.status().stuck_since
    publish("3", topic="live")
    assert ["3"] == payloads(stuck.deliver())
    assert ["1", "2"] == everything(other)
    assert stuck.puback(1)
    assert sessions.wait(0)
    assert ["2"] == everything(stuck)
    assert stuck.status().stuck_since is None


def test_idle_sessions_cost_nothing_and_equal_ones_one_read(
    db: ts.Database, sessions: Sessions, publish: Publish
) -> None:
    """Traffic that doesn't concern them isn't looked at for them; what concerns all is read once."""
    sessions.open("busy", expiry_interval=None).subscribe("busy", 1)
    for number in range(100):
        sessions.open(f"idle-{number}", expiry_interval=None).subscribe("a/#", 1)
    while sessions.wait(0):
        sessions.deliver()
    reads = sum(shard.counters.reads for shard in db.storage.shards)
    publish(*map(str, range(50)), topic="busy")
    assert ["busy"] == [session.client_id for session, _ in sessions.deliver()]
    publish("1")
    assert 100 == len(sessions.deliver())
    assert not sessions.wait(0)
    assert sum(shard.counters.reads for shard in db.storage.shards) - reads <= 2 * len(db.storage.shards)


def test_a_message_is_visible_as_soon_as_it_is_stored(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """By the layout that a database has by default: no epoch is waited for, though the clock stands still."""
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/+", 1)
    assert "block" == db.manifest.layout
    for number in range(5):
        publish(str(number))
        assert sessions.wait(0)
        assert [str(number)] == payloads(session.deliver())


@pytest.mark.parametrize("way", ["tick", "recovery"])
def test_clean_up_is_fenced(sessions: Sessions, clock: Clock, publish: Publishing, crash: Crash, way: str) -> None:
    """A session that came back is not reaped by who found it expired, nor by a timer of its former absence."""
    session = sessions.open("subscriber", expiry_interval=10)
    session.subscribe("a/#", 1)
    if way == "tick":
        session.disconnect()
    other = crash()
    clock.now += 1
    session = sessions.open("subscriber", expiry_interval=10)
    clock.now += 100 * SECOND
    found = other._states.find("subscriber")
    assert found is not None
    session = sessions.open("subscriber", expiry_interval=10)
    assert not other._states.remove(found)
    sessions.tick()
    publish("1")
    assert ["1"] == everything(session)


FAILING = """
import topicstore as ts
fails, failures = False, 0
@ts.hookimpl(wrapper=True)
def topicstore_read(request):
    global failures
    if fails:
        failures += 1
        raise ts.StorageFullError("not now")
    return (yield)
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[ts.Database]:
    """A database that can't be read while its plugin says so."""
    built_in = [EntryPoint(name, f"topicstore_{name}.plugin", plugins.GROUP) for name in ("backends", "layouts")]
    (tmp_path / "failing_reads.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry([*built_in, EntryPoint("failing_reads", "failing_reads", plugins.GROUP)])
    monkeypatch.setattr("topicstore.storage.opening.registry", lambda: registry)
    with ts.open(tmp_path / "db", backend="memory", clock=clock, plugins=["failing_reads"]) as db:
        yield db
    del sys.modules["failing_reads"]


def test_a_recoverable_error_ends_no_session(failing: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and what it kept from being read is delivered when it is over."""
    ended: list[object] = []
    session = failing.sessions.open("subscriber", expiry_interval=None, on_end=lambda *what: ended.append(what))
    session.subscribe("a/#", 1)
    monkeypatch.setattr("failing_reads.fails", True)
    failing.publish([ts.Message("a/b", b"1", "publisher", 1)])
    for _ in range(3):
        assert [] == failing.sessions.deliver()
        assert isinstance(session.failure, ts.RecoverableError)
        failing.sessions.tick()
    monkeypatch.setattr("failing_reads.fails", False)
    failing.sessions.tick()
    assert ["1"] == everything(session)
    assert [] == ended


def test_a_session_rests_while_retained_messages_cannot_be_read(
    failing: ts.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read fails, and nothing is ready before the next tick, or a server would read without end."""
    failing.publish([ts.Message("a/b", b"retained", "publisher", 1, retain=True)])
    session = failing.sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1)
    monkeypatch.setattr("failing_reads.fails", True)
    for reads in (1, 2):
        assert [] == failing.sessions.deliver()
        assert isinstance(session.failure, ts.RecoverableError)
        assert not failing.sessions.wait(0)
        assert reads == importlib.import_module("failing_reads").failures
        failing.sessions.tick()
    monkeypatch.setattr("failing_reads.fails", False)
    assert ["retained"] == everything(session)


def test_a_session_rests_while_what_came_back_to_its_group_cannot_be_read(
    failing: ts.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of a member that has left are delivered when they can be read, before newer ones."""
    first, other = (failing.sessions.open(client, expiry_interval=None) for client in ("first", "other"))
    first.subscribe("$share/group/a/#", 1)
    failing.publish([ts.Message("a/b", b"1", "publisher", 1)])
    assert ["1"] == payloads(first.deliver())
    other.subscribe("$share/group/a/#", 1)
    first.unsubscribe("$share/group/a/#")
    first.disconnect(expiry_interval=0)
    failing.sessions.tick()
    failing.publish([ts.Message("a/b", b"2", "publisher", 1)])
    monkeypatch.setattr("failing_reads.fails", True)
    for reads in (1, 2):
        assert [] == failing.sessions.deliver()
        assert isinstance(other.failure, ts.RecoverableError)
        assert not failing.sessions.wait(0)
        assert reads == importlib.import_module("failing_reads").failures
        failing.sessions.tick()
    monkeypatch.setattr("failing_reads.fails", False)
    assert ["1", "2"] == everything(other)


def test_empty_shards_take_hardly_any_room(tmp_path: Path) -> None:
    """Neither on disk nor for what follows: many shards with a session each are small."""
    with ts.open(tmp_path / "db", shards=16) as db:
        for number in range(16):
            db.sessions.open(f"client-{number}", expiry_interval=None).subscribe("#", 1)
    files = [path.stat() for path in (tmp_path / "db").rglob("*") if path.is_file()]
    assert sum(file.st_blocks * 512 for file in files) < 16 * 1_000_000


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_effective_qos_never_exceeds_the_subscriptions(
    db: ts.Database, sessions: Sessions, publish: Publishing, wanted: int
) -> None:
    """Live, replayed, retained, or sent again."""
    for qos in (0, 1, 2):
        db.publish([ts.Message(f"a/{qos}", b"retained", "publisher", qos, retain=True)])
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", wanted, start=0)
    for qos in (0, 1, 2):
        publish("live", topic=f"a/{qos}", qos=qos)
    first = session.deliver()
    assert {min(wanted, qos) for qos in (0, 1, 2)} == {item.qos for item in first if isinstance(item, Publish)}
    session.lost()
    again = sessions.open("subscriber", expiry_interval=None).deliver()
    assert sum(item.packet_id > 0 for item in first) == len(again)
    assert all(item.qos <= wanted for item in again if isinstance(item, Publish))


@pytest.mark.parametrize("failure", [EngineError, KeyboardInterrupt])
def test_a_session_that_was_stored_as_open_and_is_not_expires(
    sessions: Sessions, clock: Clock, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """Its client was refused, and may never come again: otherwise messages would be stored for it for ever."""
    for client in ("client", "other"):
        session = sessions.open(client, expiry_interval=10)
        session.subscribe(f"{client}/#", 1)
        session.lost()
    sessions.tick()

    def fail(_states: SessionState, _client_id: str) -> None:
        raise failure("not now")

    with monkeypatch.context() as patches:
        patches.setattr(SessionState, "places", fail)
        with pytest.raises(failure):
            sessions.open("client", expiry_interval=10)
    other = sessions.open("other", expiry_interval=10)
    assert sessions["client"].connected
    sessions.tick()
    assert not sessions["client"].connected
    clock.now += 11 * SECOND
    sessions.tick()
    assert "client" not in sessions
    assert not sessions.wants("client/1")
    assert other.ended is None
    assert sessions["other"].connected


@pytest.mark.parametrize("after", ["overtaken", "committed"])
def test_a_session_whose_end_fails_is_not_waited_for(
    sessions: Sessions, clock: Clock, publish: Publishing, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """A silent client's end that fails, before or after it was committed, leaves nothing that is ready for ever."""
    silent = sessions.open("silent", keep_alive=10, expiry_interval=None)
    silent.subscribe("a/#", 1)
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("a/#", 1)
    assert [] == sessions.deliver()
    states = sessions._states
    if after == "overtaken":
        found = states.find("silent")
        assert found is not None
        elsewhere = encode_session("silent", msgspec.structs.replace(found.record, guard=found.record.guard + 5))
        states.states[states.shard_of("silent")].write([FrameworkWrite(Keys("silent").session, elsewhere.stored)])
    else:
        timers, failing = SessionState.timers, [EngineError("the disk is gone")]

        def fail_once(self: SessionState, shard: int) -> Any:
            if failing and silent.ended is not None:
                raise failing.pop()
            return timers(self, shard)

        monkeypatch.setattr(SessionState, "timers", fail_once)
    for _ in range(3):
        clock.now += 30 * SECOND
        sessions.tick()
    assert silent.ended is not None
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    publish("new")
    assert ["new"] == payloads([item for _, items in sessions.deliver() for item in items])


@pytest.mark.parametrize("kept", ["mark", "timer"])
def test_a_session_that_can_not_be_read_keeps_no_other_waiting(
    sessions: Sessions, clock: Clock, crash: Crash, kept: str
) -> None:
    """Others that a crash left open, or that expire, are dealt with; the damage is told, and looked at once more."""
    for number in range(3):
        sessions.open(f"client-{number}", expiry_interval=5)
        if kept == "timer":
            sessions.open(f"client-{number}", expiry_interval=5).lost()
    damaged, state = Keys("client-1").session, sessions._states.states[sessions._states.shard_of("client-1")]
    whole = state.get(damaged)
    state.write([FrameworkWrite(damaged, b"\xff")])
    if kept == "mark":
        sessions = crash()
        with pytest.raises(ts.CorruptionError):
            sessions.tick()
        assert [False] * 2 == [sessions[f"client-{number}"].connected for number in (0, 2)]
    clock.now += 6 * SECOND
    with pytest.raises((ts.CorruptionError, ExceptionGroup)):
        sessions.tick()
    for number in (0, 2):
        with pytest.raises(ts.SessionNotFoundError):
            sessions[f"client-{number}"]
    state.write([FrameworkWrite(damaged, whole)])
    for _ in range(2):  # first its connection is lost
        clock.now += 6 * SECOND
        assert 0 < sessions.tick()
    with pytest.raises(ts.SessionNotFoundError):
        sessions["client-1"]


def test_failing_timers_keep_no_later_one_waiting(
    sessions: Sessions, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many fail: each tick goes on behind those that the one before tried."""
    monkeypatch.setattr("topicstore.sessions.timers._CHUNK", 3)
    damaged = [f"client-{number}" for number in range(16)]
    for client_id in (*damaged, *"abcdefgh"):
        sessions.open(client_id, expiry_interval=5 if client_id in damaged else 6).lost()
    states = sessions._states
    whole = {client_id: states.states[states.shard_of(client_id)].get(Keys(client_id).session) for client_id in damaged}
    for client_id in damaged:
        states.write_for(client_id, [FrameworkWrite(Keys(client_id).session, b"\xff")])
    clock.now += 6 * SECOND
    for _ in range(len(damaged)):
        with contextlib.suppress(ts.CorruptionError, ExceptionGroup):
            sessions.tick()
        clock.now += SECOND
    assert set(damaged) == set(states.clients())
    for client_id, stored in whole.items():
        states.write_for(client_id, [FrameworkWrite(Keys(client_id).session, stored)])
    for _ in range(len(damaged)):
        clock.now += SECOND
        sessions.tick()
    assert [] == list(sessions)


@pytest.mark.parametrize(("method", "left_open"), [("timers", False), ("left_open", True), ("write", True)])
def test_what_is_due_is_done_after_an_error_of_the_engine(
    sessions: Sessions, clock: Clock, crash: Crash, monkeypatch: pytest.MonkeyPatch, method: str, *, left_open: bool
) -> None:
    """Of reading timers or sessions that a crash left open, or of writing: the next tick does it."""
    session = sessions.open("client", expiry_interval=5)
    if left_open:
        sessions = crash()
    else:
        session.lost()
        clock.now += 5 * SECOND
    works = getattr(SessionState, method)
    failing = [EngineError("the disk is gone")] * 2

    def fail(*arguments: Any) -> Any:
        if failing:
            raise failing.pop()
        return works(*arguments)

    with monkeypatch.context() as patches:
        patches.setattr(SessionState, method, fail)
        with pytest.raises((EngineError, ExceptionGroup)):
            sessions.tick()
        failing.clear()
        for _ in range(2):
            clock.now += 5 * SECOND
            sessions.tick()
    assert [] == list(sessions)
