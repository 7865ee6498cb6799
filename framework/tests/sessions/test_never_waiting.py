"""Calls that a server makes in its event loop return while another thread's call is blocked in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub
from topicstore.sessions import Publish, PubRel, Session, Sessions, SubscribeOptions
from topicstore.sessions.in_flight import InFlight
from topicstore.sessions.session_store import SessionState
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, Beside, begin, held_elsewhere, wait_until

Publishing = Callable[..., None]


class Gate:
    """Blocks calls of a wrapped method until the test sets ``open``."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.open.wait(PATIENCE)
            return method(*args, **kwargs)

        return gated


@contextlib.contextmanager
def held(where: type, method: str, call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Make a call in a new thread, and block that call at this method until the ``with`` block ends."""
    gate = Gate()
    with patch.object(where, method, gate.before(getattr(where, method))):
        made = begin(call)
        assert gate.reached.wait(PATIENCE)
        try:
            yield made
        finally:
            gate.open.set()
            made.exception(PATIENCE)


def ids(packets: list[Publish | PubRel]) -> list[int]:
    return [packet.packet_id for packet in packets]


@pytest.fixture
def session(sessions: Sessions, publish: Publishing) -> Session:
    """Return a session with QoS 1 and QoS 2 messages in flight, and one more of each waiting."""
    session = sessions.open("client", expiry_interval=None, keep_alive=60)
    session.subscribe("one", 1)
    session.subscribe("two", 2)
    publish(*"12345", topic="one")
    publish(*"12345", topic="two", qos=2)
    assert list(range(1, 11)) == ids(session.deliver())
    assert 2 == session.pubrec(9, 10)
    assert [PubRel(9), PubRel(10)] == session.deliver()
    publish("6", topic="one")
    publish("6", topic="two", qos=2)
    return session


CALLS: dict[str, tuple[Callable[[Sessions, Session], object], object]] = {
    "alive": (lambda _, session: session.alive(), None),
    "puback": (lambda _, session: session.puback(1, 3, 3, 1_000), 2),
    "pubrec": (lambda _, session: session.pubrec(6, 7, 1), 2),
    "pubrec that refuses": (lambda _, session: session.pubrec(8, accepted=False), 1),
    "pubcomp": (lambda _, session: session.pubcomp(9, 1), 1),
    "pause": (lambda _, session: session.pause(), None),
    "resume": (lambda _, session: session.resume(), None),
    "ended": (lambda _, session: session.ended, None),
    "failure": (lambda _, session: session.failure, None),
    "status": (lambda _, session: session.status().in_flight, 10),
    "connected": (lambda sessions, session: sessions.connected("client") is session, True),
    "nobody connected": (lambda sessions, _: sessions.connected("nobody"), None),
    "counts": (lambda sessions, _: sessions.counts().in_flight, 10),
    "wait": (lambda sessions, _: sessions.wait(0) in (True, False), True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("who", ["deliver", "scan", "subscribe", "tick", "open"])
def test_calls_of_a_loop_return_while_another_waits_for_the_engine(
    db: ts.Database, sessions: Sessions, session: Session, clock: Clock, who: str, name: str
) -> None:
    """Calls for an event loop return their usual results while another call writes or reads the engine.

    The sessions' mutex is free meanwhile.
    """
    engine = type(db.storage.shards[0].writer.engine)
    clock.now += 20_000_000
    if who == "tick":
        session.puback(5)
        sessions.tick()
        clock.now += 20_000_000
    if who == "scan":
        session.subscribe("+", 1, start="beginning")
    others: dict[str, tuple[type, str, Callable[[], object]]] = {
        "deliver": (engine, "write", sessions.deliver),
        "scan": (Feed, "_scan", sessions.deliver),
        "subscribe": (engine, "write", lambda: session.subscribe("three", 1)),
        "tick": (engine, "write", sessions.tick),
        "open": (SessionState, "find_all", lambda: sessions.open("other")),
    }
    call, answer = CALLS[name]
    if who == "tick" and name in ("status", "counts"):
        answer = 9
    with held(*others[who]) as other:
        assert not held_elsewhere(sessions._dispatcher.mutex)
        assert answer == begin(lambda: call(sessions, session)).result(PATIENCE)
        assert not other.done()
    other.result()


def test_publishing_needs_no_lock_of_sessions(sessions: Sessions, session: Session) -> None:
    """A client publishes at QoS 0 and 1 while another thread holds the sessions' mutex."""
    messages = [ts.Message("one", b"7", "client", qos=qos) for qos in (0, 1)]
    with sessions._dispatcher.mutex:
        result = begin(lambda: session.publish(messages)).result(PATIENCE)
    assert 2 == result.count


@pytest.mark.parametrize("how", ["subscribe", "share", "resume"])
def test_a_new_filter_waits_for_a_shard_without_the_mutex(db: ts.Database, sessions: Sessions, how: str) -> None:
    """While a new filter waits for a shard that is writing, the sessions' mutex is free, and other calls return.

    This holds for a SUBSCRIBE, for a shared subscription, and for a connection with stored subscriptions.
    """
    kept, idle = sessions.open("kept", expiry_interval=None), sessions.open("idle")
    kept.subscribe("stored/#", 1)
    if how == "resume":
        kept.disconnect()
    calls: dict[str, Callable[[], object]] = {
        "subscribe": lambda: kept.subscribe("new/#", 1),
        "share": lambda: kept.subscribe("$share/group/new/#", 1),
        "resume": lambda: sessions.open("kept", expiry_interval=None),
    }
    writing, gate = Gate(), Gate()

    def write() -> None:
        """Hold the lock of the shard that doesn't store the session, as during a slow write."""
        with db.storage.shards[1 - db.shard_of("kept")].writer.lock:
            writing.reached.set()
            assert writing.open.wait(PATIENCE)

    gate.open.set()
    with patch.object(Hub, "listen", gate.before(Hub.listen)):
        writer = begin(write)
        assert writing.reached.wait(PATIENCE)
        call = begin(calls[how])
        assert gate.reached.wait(PATIENCE)
        assert not held_elsewhere(sessions._dispatcher.mutex)
        if how != "resume":  # opening holds the lock of all sessions
            assert [] == begin(idle.deliver).result(PATIENCE)
        assert not call.done()
        writing.open.set()
        writer.result(PATIENCE)
        assert call.result(PATIENCE)


def test_waiting_in_a_loop_holds_up_no_loop(sessions: Sessions, session: Session, publish: Publishing) -> None:
    """`wait_async` doesn't block the event loop during a blocked delivery, and ends when more can be delivered."""

    async def main(other: Future[Any], over: threading.Event) -> None:
        waits = asyncio.create_task(sessions.wait_async())
        for _ in range(100):
            await asyncio.sleep(0)
            session.alive()
        assert not other.done()
        over.set()
        await asyncio.to_thread(publish, "7", topic="one")
        assert await asyncio.wait_for(waits, PATIENCE)

    gate = Gate()
    with patch.object(Feed, "read", gate.before(Feed.read)):
        other = begin(sessions.deliver)
        assert gate.reached.wait(PATIENCE)
        asyncio.run(main(other, gate.open))
    other.result(PATIENCE)


def test_what_is_acknowledged_during_a_commit_is_not_lost(
    db: ts.Database, sessions: Sessions, session: Session
) -> None:
    """Acknowledgements that arrive during a commit are not lost; they are committed with the next one."""
    engine = type(db.storage.shards[0].writer.engine)
    assert 1 == session.pubrec(6)
    with held(engine, "write", sessions.deliver) as delivering:
        assert 5 == session.puback(1, 2, 3, 4, 5)
        assert 2 == session.pubrec(7, 8)
        assert 2 == session.pubcomp(9, 10)
    [(_, packets)] = delivering.result()
    assert [6, 11, 12] == ids(packets)
    assert PubRel(6) in packets
    assert [PubRel(7), PubRel(8)] == session.deliver()
    assert 1 == session.puback(11)
    assert 3 == session.pubcomp(6, 7, 8)
    assert 1 == session.pubrec(12)
    assert [PubRel(12)] == session.deliver()
    assert 1 == session.pubcomp(12)
    assert 0 == session.status().in_flight
    sessions.checkpoint()
    assert 0 == sessions["client"].in_flight


def test_a_checkpoint_between_a_pubrec_and_its_announcement_holds_no_pubrel_back(
    sessions: Sessions, session: Session
) -> None:
    """A checkpoint between recording a PUBREC and notifying the dispatcher doesn't delay the PUBREL.

    The thread that records the PUBREC may be preempted between these steps.
    """
    while sessions.deliver():
        pass
    session.puback(1)
    assert not sessions.wait(0)  # the dispatcher has recorded that there is something to commit
    with held(Session, "acknowledged", lambda: session.pubrec(6)):
        sessions.checkpoint()
    assert [PubRel(6)] == [packet for _, packets in sessions.deliver() for packet in packets]


class Client:
    """A client that answers every packet, in any order."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.payloads: list[bytes] = []
        self.inbox: list[Publish | PubRel] = []

    def answer(self) -> None:
        session, packets, self.inbox = self.session, self.inbox, []
        released = [packet.packet_id for packet in packets if isinstance(packet, PubRel)]
        sent = [packet for packet in packets if isinstance(packet, Publish)]
        assert len(released) == session.pubcomp(*released)
        self.payloads += [packet.message.payload for packet in sent]
        random.Random(1).shuffle(sent)
        for qos, acknowledge in ((1, session.puback), (2, session.pubrec)):
            mine = [packet.packet_id for packet in sent if packet.qos == qos]
            assert len(mine) == acknowledge(*mine)
        assert session.status().in_flight <= session.receive_maximum


def test_looking_at_stored_sessions_holds_up_nobody(sessions: Sessions, session: Session) -> None:
    """Reading the stored state of one or all sessions doesn't block deliveries."""
    for look in (partial(sessions.__getitem__, "client"), lambda: list(sessions)):
        with held(SessionState, "in_flight", look):
            assert 1 == len(begin(sessions.deliver).result(PATIENCE))
        session.lost()
        session = sessions.open("client", expiry_interval=None)


def test_long_deliveries_let_others_in_between(db: ts.Database, sessions: Sessions) -> None:
    """A long delivery lets waiting calls run between two steps, although the locks aren't fair."""
    receivers = [sessions.open(f"client-{number}", expiry_interval=None) for number in range(30)]
    for session in receivers:
        session.subscribe("a", 1)
    db.publish([ts.Message("a", b"%d" % number, "publisher", 1) for number in range(1_000)])
    engine = type(db.storage.shards[0].writer.engine)
    with held(engine, "write", lambda: sessions.deliver(limit=1_000_000)) as delivering:
        opening = [begin(partial(sessions.open, f"late-{number}")) for number in range(3)]
        locks = sessions._locks
        wait_until(lambda: len(locks._waiting) == 3, "three calls to wait for their locks")
        ends: list[str] = []
        opening[0].add_done_callback(lambda _: ends.append("opened"))
        delivering.add_done_callback(lambda _: ends.append("delivered"))
    assert 30_000 == sum(len(packets) for _, packets in delivering.result(PATIENCE))
    for opened in opening:
        opened.result(PATIENCE)
    assert "delivered" in ends
    assert sessions.counts().connected == 33


def test_a_delivery_is_bounded_in_all(db: ts.Database, sessions: Sessions) -> None:
    """``limit`` bounds the packets of a delivery to all sessions; sessions take turns, each at most once in a call."""
    receivers = [sessions.open(f"client-{number}", expiry_interval=None) for number in range(5)]
    for session in receivers:
        session.subscribe("a", 1)
    sessions.deliver()
    db.publish([ts.Message("a", b"%d" % number, "publisher", 1) for number in range(30)])
    calls = []
    while sessions.wait(0):
        calls.append([(session, len(packets)) for session, packets in sessions.deliver(10, limit=25)])
        assert sum(count for _, count in calls[-1]) <= 25
        assert len(calls[-1]) == len(dict(calls[-1])) <= 5
    assert [10, 10, 5] == [count for _, count in calls[0]]
    order = [session for call in calls[:2] for session, _ in call]
    assert set(order[:5]) == set(receivers)
    assert {30} == {sum(count for call in calls for who, count in call if who is session) for session in receivers}


def test_an_interruption_between_pieces_loses_nothing(db: ts.Database, sessions: Sessions) -> None:
    """After an interruption between two steps, the next call hands out the same messages and packet ids."""
    receivers = [sessions.open(f"client-{number}", expiry_interval=None) for number in range(15)]
    for session in receivers:
        session.subscribe("a", 1)
    db.publish([ts.Message("a", b"%d" % number, "publisher", 1) for number in range(1_000)])
    stage, staged = InFlight.stage, []

    def interrupted(self: InFlight, *args: Any, **kwargs: Any) -> Any:
        staged.append(self)
        if len(staged) == 13:
            raise KeyboardInterrupt
        return stage(self, *args, **kwargs)

    with patch.object(InFlight, "stage", interrupted), pytest.raises(KeyboardInterrupt):
        sessions.deliver(limit=100_000)
    found: dict[Session, list[int]] = {session: [] for session in receivers}
    while sessions.wait(0):
        for session, packets in sessions.deliver():
            found[session] += ids(packets)
    assert [list(range(1, 1_001))] * 15 == list(found.values())


def test_the_faces_calls_are_done_at_once(tmp_path: Path) -> None:
    """Non-blocking calls of the asyncio interface return even while all threads of the interface are busy."""

    async def main() -> None:
        async with ts.aopen(tmp_path / "db", backend="memory") as db:
            session = await db.sessions.open("client")
            assert await db.sessions.connected("client") is session
            gate = threading.Event()
            busy = [asyncio.create_task(db._threads.run(gate.wait)) for _ in range(8)]
            await asyncio.sleep(0)
            for call in (session.alive, session.puback, session.pubrec, session.pubcomp, session.pause, session.resume):
                await call()
            assert "nothing" == (await session.status()).waits_for
            assert await db.sessions.connected("client") is session
            assert 1 == (await db.sessions.counts()).connected
            gate.set()
            await asyncio.gather(*busy)

    asyncio.run(main())


def publish_twice(sessions: Sessions, name: str) -> None:
    """Publish 40 messages at QoS 2, each twice; some repetitions use another connection."""
    session = sessions.open(name, expiry_interval=None)
    for number in range(40):
        packet_id, message = number % 7 + 1, ts.Message(f"a/{name}", f"{name} {number}".encode(), name, 2)
        session.publish([message], [packet_id])
        if number % 9 == 0:
            session = sessions.open(name, expiry_interval=None)
        assert 0 == session.publish([message], [packet_id]).count
        assert 1 == session.pubrel(packet_id)


def test_calls_for_the_same_sessions_beside_each_other(sessions: Sessions) -> None:
    """Concurrent calls for the same sessions deliver each message once and in order.

    Publishers repeat messages and are taken over, and subscriptions change meanwhile.
    """
    receivers = [sessions.open(f"receiver-{number}", expiry_interval=None, receive_maximum=7) for number in range(4)]
    clients = {session: Client(session) for session in receivers}
    for session, topic_filter in zip(receivers, ["a/#", "a/#", "$share/group/a/#", "$share/group/a/#"], strict=True):
        session.subscribe(topic_filter, 2)

    def deliver() -> None:
        for session, packets in sessions.deliver(limit_each=5):
            if session in clients:
                clients[session].inbox += packets
                clients[session].answer()

    def change() -> None:
        receivers[0].subscribe("other", 1)
        receivers[0].unsubscribe("other")
        passing = sessions.open("passing")
        passing.subscribe("a/#", 1)
        passing.deliver(5)
        passing.disconnect()

    publishing = [begin(partial(publish_twice, sessions, name)) for name in ("one", "two")]
    with Beside(deliver, receivers[0].checkpoint, change, sessions.checkpoint, sessions.tick, sessions.counts):
        for each in publishing:
            each.result(PATIENCE)
    while sessions.wait(0):
        deliver()
    payloads = [clients[session].payloads for session in receivers]
    wanted = [[f"{name} {number}".encode() for number in range(40)] for name in ("one", "two")]
    for got in payloads[:2]:
        assert wanted == [[payload for payload in got if payload in each] for each in wanted]
    assert sorted(wanted[0] + wanted[1]) == sorted(payloads[2] + payloads[3])
    sessions.checkpoint()
    assert [0] * 4 == [info.in_flight for info in sessions if info.client_id.startswith("receiver")]


def test_calls_go_in_the_order_they_came(sessions: Sessions, session: Session) -> None:
    """A call for many sessions runs before later calls for some of these sessions."""
    two = sessions.open("two")
    session.subscribe("+", 1, start="beginning")
    locks = sessions._locks
    rows = [(session, "x", SubscribeOptions(1)), (two, "x", SubscribeOptions(1))]
    with held(Feed, "_scan", session.deliver):
        many = begin(lambda: sessions.subscribe(rows))
        wait_until(lambda: len(locks._waiting) == 1, "a call for both to wait")
        few = begin(lambda: two.subscribe("x", 2))
        wait_until(lambda: len(locks._waiting) == 2 or few.done(), "a call for one of them")
        assert not few.done()
    assert [True, True] == [result.created for result in many.result(PATIENCE)]
    assert not few.result(PATIENCE).created


def test_a_call_that_is_interrupted_keeps_no_locks(sessions: Sessions, session: Session) -> None:
    """A call that Ctrl-C interrupts right after the call has locked its sessions unlocks them."""
    session.subscribe("+", 1, start="beginning")
    with patch.object(sessions._dispatcher, "hide_locked", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            session.deliver()
        with pytest.raises(KeyboardInterrupt):
            sessions.deliver()
    assert begin(sessions.deliver).result(PATIENCE)
    assert begin(lambda: session.subscribe("x", 1)).result(PATIENCE).created


def test_a_call_within_another_one_changes_nothing_that_another_thread_does(
    sessions: Sessions, session: Session
) -> None:
    """A nested call raises `NestedCallError` if it would have to wait for another thread's call.

    Otherwise a signal handler could deadlock: it may interrupt a call that the other thread waits for.
    """
    two = sessions.open("two")
    session.subscribe("+", 1, start="beginning")

    def within() -> None:
        assert two.subscribe("x", 1).created
        for call in (session.deliver, sessions.tick):
            with pytest.raises(ts.NestedCallError):
                call()

    with held(Feed, "_scan", session.deliver) as delivering:
        sessions._locks.hold([two], within)
    assert delivering.result(PATIENCE)


def test_a_close_within_a_call_waits_for_its_end(db: ts.Database, session: Session) -> None:
    """Closing the database within a delivery takes effect after the delivery has been committed."""
    session.subscribe("+", 1, start="beginning")
    scan, closed = Feed._scan, list[bool]()

    def closing(self: Feed, *args: Any) -> Any:
        if not closed:
            db.close()
            closed.append(session.ended is not None)
        return scan(self, *args)

    with patch.object(Feed, "_scan", closing):
        assert session.deliver()
    db.close()
    assert [False] == closed
    assert session.ended is not None
