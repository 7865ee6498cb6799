"""Messages stored only for sessions are removed once no session needs them, and no other messages are removed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from topicstore.contract.checksums import add_checksum
from topicstore.contract.columns import to_list
from topicstore.contract.engine import STATE
from topicstore.contract.requests import StoreRequest
from topicstore.pubsub.publish import PERSIST
from topicstore.sessions import delivered_removal
from topicstore.sessions.model import Publish
from topicstore.sessions.records import IN_FLIGHT
from topicstore.sessions.shared.records import REVOKED
from topicstore.shard.interest_records import Span
from topicstore.storage.maintenance import delete_local
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.striking import Fault, faults, kills, striking
from topicstore_conformance.faults.threads import PATIENCE, begin, held_elsewhere, wait_until

SECOND, MINUTE = 1_000_000, 60_000_000


def opened(path: Path | str, clock: Clock, **arguments: object) -> ts.Database:
    """Open a database that removes messages stored only for sessions after a minute, with its tracking started."""
    db = ts.open(path, clock=clock, **arguments)  # type: ignore[arg-type]
    db.retention.set(delivered="1m")
    db.sessions.load_filters()
    return db


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    with opened(tmp_path / "db", clock) as found:
        yield found


def stored(db: ts.Database) -> list[bytes]:
    return sorted(message.payload for message in db.replay("#"))


def publish(db: ts.Database, *payloads: bytes, topic: str = "a/b", **fields: object) -> None:
    db.publish([ts.Message(topic, payload, "c", qos=1, **fields) for payload in payloads])  # type: ignore[arg-type]


def acknowledge(session: ts.Session, limit: int = 100) -> int:
    """Deliver messages, acknowledge them, and commit the acknowledgements; return the number of messages."""
    packets = session.deliver(limit)
    for packet in packets:
        session.puback(packet.packet_id)
    session.checkpoint()
    return len(packets)


def reader(db: ts.Database, client_id: str = "reader", topic_filter: str = "#") -> ts.Session:
    session = db.sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, 1)
    return session


def test_a_message_goes_once_it_is_delivered_and_old_enough(db: ts.Database, clock: Clock) -> None:
    """A message stored only for a session is removed once it is acknowledged and old enough, and not before."""
    session = reader(db)
    publish(db, b"1", b"2")
    clock.now += 2 * MINUTE
    assert (0, [b"1", b"2"]) == (db.sessions.remove_delivered(), stored(db))
    assert 2 == acknowledge(session)
    publish(db, b"3")
    assert 1 == acknowledge(session)
    assert (2, [b"3"]) == (db.sessions.remove_delivered(), stored(db))
    clock.now += 2 * MINUTE
    assert (1, []) == (db.sessions.remove_delivered(), stored(db))


def test_what_is_in_flight_stays(db: ts.Database, clock: Clock) -> None:
    """A removal keeps a message that was sent but not acknowledged, and later messages; the session redelivers it."""
    session = reader(db)
    publish(db, b"1", b"2")
    assert 1 == acknowledge(session, 1)
    assert [b"2"] == [packet.message.payload for packet in session.deliver(1)]  # type: ignore[union-attr]
    session.disconnect()
    clock.now += 2 * MINUTE
    assert (1, [b"2"]) == (db.sessions.remove_delivered(), stored(db))
    again = db.sessions.open("reader", clean_start=False, expiry_interval=None)
    assert [b"2"] == [packet.message.payload for packet in again.deliver()]  # type: ignore[union-attr]


def test_a_session_that_is_away_holds_back_what_it_waits_for(db: ts.Database, clock: Clock) -> None:
    """A message that one of several sessions has not received yet is not removed until that session has ended."""
    near, _ = reader(db), reader(db, "away", "a/+").disconnect()
    publish(db, b"1", topic="b")
    publish(db, b"2", topic="a/x")
    assert 2 == acknowledge(near)
    clock.now += 2 * MINUTE
    assert (1, [b"2"]) == (db.sessions.remove_delivered(), stored(db))
    db.sessions.expire("away")
    assert (1, []) == (db.sessions.remove_delivered(), stored(db))


def test_what_else_asked_for_it_stays(db: ts.Database, clock: Clock) -> None:
    """A removal keeps messages that a rule, the publisher or a program stored, whatever was stored before or after."""
    session = reader(db)
    db.persistence.add("keep/#")
    publish(db, b"session 1")
    publish(db, b"rule", topic="keep/a")
    publish(db, b"asked", properties=ts.Properties(user_properties=((PERSIST, "1"),)))
    publish(db, b"session 2")
    db.store([ts.Message("a", b"program")])
    publish(db, b"session 3")
    acknowledge(session)
    clock.now += 2 * MINUTE
    assert 3 == db.sessions.remove_delivered()
    assert [b"asked", b"program", b"rule"] == stored(db)


def test_a_rule_that_was_removed_keeps_what_it_stored(db: ts.Database, clock: Clock) -> None:
    """A removal keeps messages that a removed rule had stored, and earlier messages that a new rule matches."""
    session = reader(db)
    rule = db.persistence.add("x")
    publish(db, b"old rule", topic="x")
    db.persistence.remove(rule)
    publish(db, b"no rule", topic="x")
    publish(db, b"new rule", topic="y")
    db.persistence.add("y")
    acknowledge(session)
    clock.now += 2 * MINUTE
    assert 1 == db.sessions.remove_delivered()
    assert [b"new rule", b"old rule"] == stored(db)


def test_without_the_setting_everything_stays(tmp_path: Path, clock: Clock) -> None:
    """Without the setting ``delivered``, messages that were stored only for sessions are kept like all others."""
    with ts.open(tmp_path / "db", clock=clock) as db:
        session = reader(db)
        publish(db, b"1")
        acknowledge(session)
        clock.now += 100 * MINUTE
        assert (0, [b"1"]) == (db.sessions.remove_delivered(), stored(db))


def test_it_holds_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    """After a restart, messages that were stored only for sessions are removed, and a program's messages stay."""
    with opened(tmp_path / "db", clock) as db:
        session = reader(db)
        publish(db, b"1")
        acknowledge(session)
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.store([ts.Message("a", b"program")])
    with opened(tmp_path / "db", clock) as db:
        clock.now += 2 * MINUTE
        assert (1, [b"program"]) == (db.sessions.remove_delivered(), stored(db))


def test_a_tick_removes_in_the_background(db: ts.Database, clock: Clock) -> None:
    """`tick` begins the removal in the background."""
    session = reader(db)
    publish(db, b"1")
    acknowledge(session)
    clock.now += 2 * MINUTE
    db.sessions.tick()
    wait_until(lambda: not stored(db), "the message is removed")
    assert db.sessions.removal_failure is None


def test_stored_forms_of_the_first_versions_are_read(tmp_path: Path) -> None:
    """Records of spans of interest in version 1, and of retention limits without ``delivered``, can still be read."""
    ended, going_on = bytes.fromhex("93010991a3612f23"), bytes.fromhex("9301c090")  # [1, 9, ["a/#"]], [1, nil, []]
    limits = bytes.fromhex("9701cf00000025b7f3d400c0c0a6726566757365c080")  # max_age of 45 hours; no other limit
    with ts.open(tmp_path / "db") as db:
        keys = b"\1pi" + bytes(7) + b"\5", b"\1pi" + bytes(7) + b"\x0c", b"\1ps"
        for key, value in zip(keys, (ended, going_on, limits), strict=True):
            put(db.storage.shards[0].writer.open_engine(), STATE, {key: add_checksum(key, value)})
    with ts.open(tmp_path / "db") as db:
        assert (Span(5, 9, ("a/#",)), Span(12, None, ())) == db.storage.interest.of_shard(0)
        assert ts.RetentionSettings(max_age=162_000) == db.retention.settings
        assert [] == db.verify().damages


class _Gate:
    """A plugin that blocks the messages of a program before they are stored, until the test sets ``open``."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    @ts.hookimpl(wrapper=True)
    def topicstore_store(self, request: StoreRequest):  # type: ignore[no-untyped-def]
        if self.open.is_set() or "program" not in to_list(request.batch.topics):
            return (yield)
        self.reached.set()
        assert self.open.wait(PATIENCE)
        return (yield)


def test_a_write_that_is_under_way_when_tracking_begins_stays(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal keeps the messages of a write that began before ``delivered`` was set, and ended afterwards."""
    gate = _Gate()
    monkeypatch.setattr(type(ts.plugins.registry()), "wrapper", lambda _registry, _name: gate)
    with ts.open(tmp_path / "db", clock=clock, plugins=["gate"]) as db:
        session = reader(db)
        db.store([ts.Message("first", b"first")])
        storing = begin(lambda: db.store([ts.Message("program", b"program")]))
        assert gate.reached.wait(PATIENCE)
        db.retention.set(delivered="1m")
        clock.now += 2 * MINUTE
        publish(db, b"beside")
        gate.open.set()
        storing.result(PATIENCE)
        publish(db, b"after")
        acknowledge(session)
        clock.now += 2 * MINUTE
        assert 1 == db.sessions.remove_delivered()
        assert [b"beside", b"first", b"program"] == stored(db)


def test_a_span_that_could_not_end_covers_nothing_later(tmp_path: Path, clock: Clock) -> None:
    """A span of interest that can't end because its shard takes no writes never covers later messages of a program.

    Until it has ended, the program's stores are refused.
    """
    with opened(tmp_path / "db", clock, shards=2) as db:
        session = reader(db)
        clients = {db.storage.shard_of(one): one for one in map(str, range(20))}
        for client in clients.values():
            db.publish([ts.Message("a", client.encode(), client, qos=1)])
        acknowledge(session)
        broken = patch.object(db.storage.shards[1].writer.engine, "write", side_effect=ts.StorageFullError("no room"))
        with broken, pytest.raises(ts.StorageFullError):
            db.publish([ts.Message("a", b"lost", clients[1], qos=1)])
        db.store([ts.Message("a", b"near", clients[0])])
        assert db.storage.interest.may_be_open
        with pytest.raises(ts.ShardReadOnlyError):
            db.store([ts.Message("a", b"refused", one) for one in clients.values()])
        assert [1] == db.recover()
        db.store([ts.Message("a", b"far", clients[1])])
        assert not db.storage.interest.may_be_open
        acknowledge(session)
        clock.now += 2 * MINUTE
        assert 2 == db.sessions.remove_delivered()
        assert [b"far", b"near"] == stored(db)


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_messages_that_change_hands_while_needs_are_read_stay(tmp_path: Path, clock: Clock, backend: str) -> None:
    """A removal keeps a message of a shared subscription, even if it goes to a member and comes back meanwhile."""
    with opened(tmp_path / "db", clock, backend=backend, shards=1) as db:
        group = "$share/g/a/#"
        first, second, idle = (db.sessions.open(name, expiry_interval=None) for name in ("first", "second", "idle"))
        first.subscribe(group, 1)
        publish(db, b"1")
        assert 1 == len(first.deliver())
        second.subscribe(group, 1)
        idle.subscribe(group, 1)
        idle.disconnect()
        first.disconnect()
        db.sessions.expire("first")
        clock.now += 2 * MINUTE

        engine = db.storage.shards[0].writer.open_engine()
        scan, steps = engine.scan, [(IN_FLIGHT, list), (REVOKED, second.deliver), (IN_FLIGHT, second.disconnect)]

        def scanned(keyspace: Any, start: Any = None, *more: Any, **named: Any) -> Any:
            """Move the message to the second member after the first scan of messages in flight, and back after it."""
            if steps and start == steps[0][0]:
                step = steps.pop(0)[1]
                step()
                if not steps:
                    db.sessions.expire("second")
            return scan(keyspace, start, *more, **named)

        with patch.object(engine, "scan", scanned):
            assert 0 == db.sessions.remove_delivered()
        assert not steps
        assert [b"1"] == stored(db)
        again = db.sessions.open("idle", clean_start=False, expiry_interval=None)
        assert [b"1"] == [packet.message.payload for packet in again.deliver()]  # type: ignore[union-attr]


def test_a_subscription_that_begins_in_the_past_gets_what_is_left(db: ts.Database, clock: Clock) -> None:
    """A subscription with a start in the past that is made during a removal gets all messages not yet removed."""
    session = reader(db)
    publish(db, *(b"%02d" % number for number in range(30)))
    acknowledge(session)
    clock.now += 2 * MINUTE
    late, lock = db.sessions.open("late", expiry_interval=None), db.sessions._registry.replays.lock
    subscribing = list[Future[Any]]()

    def delete(*arguments: Any) -> int:
        if not subscribing:
            subscribing.append(begin(lambda: late.subscribe("#", 1, start=0)))
            wait_until(lambda: held_elsewhere(lock._turn), "the subscription to wait for this step")
        return delete_local(*arguments)

    with patch.object(delivered_removal, "_ROWS", 10), patch.object(delivered_removal, "delete_local", delete):
        assert 10 == db.sessions.remove_delivered()
    subscribing[0].result(PATIENCE)
    assert [b"%02d" % number for number in range(10, 30)] == sorted(all_of(late))


MEMBERS = st.sampled_from(["first", "second"])


class NeedsMachine(RuleBasedStateMachine):
    """A message is removed once every session that needs it has received it, and not before, in any order of events.

    A session and a shared subscription get all messages. Some are also stored for a rule, for their publisher or by a
    program, and are kept. The process is killed, or the disk is full, at any write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "0"
        self.clock, self.number = Clock(), 0
        self.kept = set[bytes]()
        self.waiting = {"reader": set[bytes](), "group": set[bytes]()}
        self.unsure = set[bytes]()
        """The messages whose write had a fault."""
        self.connected: dict[str, ts.Session] = {}
        self.sent: dict[str, list[Publish]] = {}
        """By session, the messages that it has got on its connection and not acknowledged."""
        self.db = self.opened()
        self.db.persistence.add("keep/#")
        for name in ("reader", "idle"):  # "idle" is a disconnected member, so that the shared subscription never ends
            self.session(name).disconnect()
        self.connected.clear()

    def opened(self) -> ts.Database:
        self.connected.clear()
        db = opened(self.path, self.clock, shards=2)
        db.sessions.groups.handover_after = 30
        return db

    def session(self, name: str) -> ts.Session:
        """Return a connected session, which is opened if necessary."""
        if name not in self.connected:
            self.connected[name] = self.db.sessions.open(name, clean_start=False, expiry_interval=None)
            self.connected[name].subscribe("#" if name == "reader" else "$share/g/#", 1)
            self.sent[name] = []
        return self.connected[name]

    def attempt(self, fault: Fault | None, work: Callable[[], object]) -> bool:
        """Run an operation with a fault injected at one of its writes; return whether the fault struck."""
        fault = fault and Fault(fault.kind, fault.write)
        self.number += 1
        killed = self.path.with_name(str(self.number))
        with striking(fault, [shard.writer.engine for shard in self.db.storage.shards], self.path, killed):
            work()
        if fault is not None and fault.kills:
            self.db.close()
            self.path = killed
            self.db = self.opened()
        elif fault is not None and fault.struck:
            self.db.recover()
        return fault is not None and fault.struck

    @rule(kind=st.sampled_from(["session", "session", "rule", "asked", "program"]), fault=faults())
    def message(self, kind: str, fault: Fault | None) -> None:
        number = self.number
        asking = ts.Properties(user_properties=((PERSIST, "true"),)) if kind == "asked" else None
        topic = "keep/a" if kind == "rule" else f"t/{number % 5}"
        message = ts.Message(topic, b"%d" % number, f"c{number % 3}", qos=1, properties=asking)
        write = self.db.store if kind == "program" else self.db.publish
        if self.attempt(fault, lambda: write([message])):
            self.unsure.add(message.payload)
        else:
            self.kept |= {message.payload} if kind != "session" else set()
            self.waiting["reader"].add(message.payload)
            self.waiting["group"].add(message.payload)

    @rule(name=MEMBERS | st.just("reader"), acknowledged=st.booleans(), fault=kills() | st.none())
    def deliver(self, name: str, acknowledged: bool, fault: Fault | None) -> None:
        session = self.session(name)

        def work() -> None:
            self.sent[name] += [packet for packet in session.deliver(3) if isinstance(packet, Publish)]
            for packet in self.sent[name] if acknowledged else ():
                self.waiting["reader" if name == "reader" else "group"].discard(packet.message.payload)
                session.puback(packet.packet_id)
            if acknowledged:
                self.sent[name].clear()

        self.attempt(fault, work)

    @rule(name=MEMBERS, end=st.booleans(), fault=kills() | st.none())
    def leave(self, name: str, end: bool, fault: Fault | None) -> None:
        self.session(name).disconnect()
        del self.connected[name]
        if end:
            self.attempt(fault, lambda: self.db.sessions.expire(name))

    @rule(name=MEMBERS)
    def subscribe_anew(self, name: str) -> None:
        self.session(name).unsubscribe("$share/g/#")
        self.session(name).subscribe("$share/g/#", 1)

    @rule(fault=kills() | st.none())
    def tick(self, fault: Fault | None) -> None:
        self.attempt(fault, self.db.sessions.tick)

    @rule(fault=faults(6))
    def remove(self, fault: Fault | None) -> None:
        self.attempt(fault, self.db.sessions.remove_delivered)

    @rule()
    def reopen(self) -> None:
        self.db.close()
        self.db = self.opened()

    @invariant()
    def nothing_is_missing(self) -> None:
        self.clock.now += 40 * SECOND
        assert self.kept.union(*self.waiting.values()) <= set(stored(self.db))

    def teardown(self) -> None:
        try:
            self.reopen()
            for name in ("first", "second"):
                if name in self.db.sessions:
                    self.db.sessions.expire(name)
            self.db.sessions.remove_delivered()
            assert self.waiting["group"] <= all_of(self.session("idle"))
            assert self.waiting["reader"] <= all_of(self.session("reader"))
            self.clock.now += 10 * MINUTE
            self.db.sessions.remove_delivered()
            assert self.kept <= set(stored(self.db)) <= self.kept | self.unsure
        finally:
            self.db.close()
            self.folder.cleanup()


def all_of(session: ts.Session) -> set[bytes]:
    """Deliver and acknowledge everything; return the payloads."""
    found = set[bytes]()
    while packets := session.deliver(100):
        found |= {packet.message.payload for packet in packets if isinstance(packet, Publish)}
        for packet in packets:
            session.puback(packet.packet_id)
    session.checkpoint()
    return found


TestNeeds = NeedsMachine.TestCase
TestNeeds.settings = settings(max_examples=20, stateful_step_count=30)
