"""Many sessions: with a backlog each, resumed after a crash; and idle, when they cost memory and nothing else."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session, Sessions
from topicstore_conformance.faults.clock import Clock

THOROUGH = os.environ.get("TOPICSTORE_CONFORMANCE") == "thorough"
SESSIONS, BACKLOG = (1_000, 10_000) if THOROUGH else (60, 600)
FILTERS = ["#", "dev/#", "dev/+/speed"]
PUBLISHERS = ["p0", "p1", "p2"]
SENT = 90
"""Messages that each session was sent before the crash."""


def payload(publisher: str, number: int) -> bytes:
    return f"{publisher}-{number}".encode()


@attrs.define(eq=False)
class Receiver:
    """What a client got: of each publisher all messages so far, in order."""

    got: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(PUBLISHERS, 0))
    unacknowledged: dict[int, bytes] = attrs.field(factory=dict)

    def take(self, items: list[Publish | PubRel]) -> None:
        for item in items:
            assert isinstance(item, Publish)
            message = item.message
            if item.dup:
                assert self.unacknowledged[item.packet_id] == message.payload
                continue
            number = self.got[message.client_id]
            assert payload(message.client_id, number) == message.payload
            self.got[message.client_id] = number + 1
            assert item.packet_id not in self.unacknowledged
            self.unacknowledged[item.packet_id] = message.payload

    def acknowledge(self, session: Session, most: int | None = None) -> None:
        ids = list(self.unacknowledged)[:most]
        assert len(ids) == session.puback(*ids)
        for packet_id in ids:
            del self.unacknowledged[packet_id]


def test_many_sessions_resume_with_a_backlog_each(tmp_path: Path) -> None:
    """One stored copy serves all; after a crash in the middle each gets the rest, in order, and nothing twice.

    But for what it had not acknowledged, which comes again with its packet id.
    """
    receivers = {f"client-{number}": Receiver() for number in range(SESSIONS)}
    with ts.open(tmp_path / "db", shards=2, auto_compact=False) as db:
        for number, client_id in enumerate(receivers):
            session = db.sessions.open(client_id, expiry_interval=None)
            session.subscribe(FILTERS[number % len(FILTERS)], 1)
            session.disconnect()
        each = BACKLOG // len(PUBLISHERS)
        for start in range(0, each, 100):
            numbers = range(start, min(start + 100, each))
            for publisher in PUBLISHERS:
                topic = f"dev/{publisher}/speed"
                db.publish([ts.Message(topic, payload(publisher, n), publisher, 1) for n in numbers])
        assert each * len(PUBLISHERS) == db.info().messages
        begin(db.sessions, receivers)
        db._sessions = None  # the former are left as a crash leaves them
        finish(db.sessions, receivers)
    assert {each} == {got for receiver in receivers.values() for got in receiver.got.values()}


def begin(sessions: Sessions, receivers: dict[str, Receiver]) -> None:
    """Every client is sent something, and acknowledges half of it, committed."""
    for client_id in receivers:
        sessions.open(client_id, expiry_interval=None, receive_maximum=SENT)
    while sessions.wait(0):
        for session, items in sessions.deliver():
            receivers[session.client_id].take(items)
    for client_id, receiver in receivers.items():
        session = sessions.connected(client_id)
        assert session is not None
        assert SENT == len(receiver.unacknowledged) == session.status().in_flight
        receiver.acknowledge(session, SENT // 2)
    sessions.checkpoint()


def finish(sessions: Sessions, receivers: dict[str, Receiver]) -> None:
    """Every client comes back, and acknowledges what it gets, until nothing is left."""
    again = 0
    for client_id in receivers:
        assert sessions.open(client_id, expiry_interval=None).present
    while sessions.wait(0):
        for session, items in sessions.deliver():
            again += sum(item.dup for item in items if isinstance(item, Publish))
            receiver = receivers[session.client_id]
            receiver.take(items)
            receiver.acknowledge(session)
    assert len(receivers) * (SENT - SENT // 2) == again


# --- idle sessions ---


def idle(sessions: Sessions, numbers: range) -> list[Session]:
    """Open sessions with a filter of their own each, and let them find that there is nothing."""
    opened = [sessions.open(f"idle-{number}", expiry_interval=None, keep_alive=0) for number in numbers]
    for number, session in zip(numbers, opened, strict=True):
        session.subscribe(f"idle/{number}/#", 1)
    while sessions.wait(0):
        sessions.deliver()
    return opened


@pytest.mark.slow
@pytest.mark.parametrize("db", ["rocksdb"], indirect=True)  # in memory, what is stored would count
def test_an_idle_session_takes_less_than_10_kb(db: ts.Database, sessions: Sessions) -> None:
    """Connected, with two subscriptions, also after it had a window full of messages."""

    def used(numbers: range) -> list[Session]:
        opened = idle(sessions, numbers)
        for session in opened:
            session.subscribe("all", 1)
        db.publish([ts.Message("all", b"%d" % number, "publisher", 1) for number in range(2_000)])
        while sessions.wait(0):
            for session, items in sessions.deliver():
                assert len(items) == session.puback(*[item.packet_id for item in items])
        sessions.checkpoint()
        db._hub.forget()  # what was read for all of them, which is shared
        gc.collect()
        return opened

    tracemalloc.start()
    try:
        used(range(5))  # what is there once for all
        before, _ = tracemalloc.get_traced_memory()
        opened = used(range(100, 150))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [0] * len(opened) == [session.status().in_flight for session in opened]
    assert (after - before) / len(opened) < 10_000


def calls(act: Callable[[], object]) -> int:
    """Return how many functions are called, in Python or in C."""
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.disable()  # else what is called at a collection counts, too
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_idle_sessions_are_not_looked_at(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """Neither by ticks nor while others have traffic: a hundred times as many cost not one call more."""
    busy = sessions.open("busy", expiry_interval=None)
    busy.subscribe("busy", 1)
    messages = [ts.Message("busy", b"%d" % number, "publisher", 1) for number in range(10)]

    def traffic() -> None:
        db.publish(messages)
        assert sessions.wait(0)
        assert [(busy, 10)] == [(session, len(items)) for session, items in sessions.deliver()]
        assert 10 == busy.puback(*busy._window.awaiting_puback)
        assert not sessions.wait(0)

    def silence() -> None:
        assert not sessions.wait(0)
        assert [] == sessions.deliver()
        clock.now += 100_000_000
        sessions.tick()

    found = []
    for numbers in (range(3), range(3, 300)):
        idle(sessions, numbers)
        traffic()
        silence()  # commits what was acknowledged
        silence()
        written = [shard.counters.bytes for shard in db.storage.shards]
        reads = [shard.counters.reads for shard in db.storage.shards]
        costs = calls(silence)
        assert written == [shard.counters.bytes for shard in db.storage.shards]
        assert reads == [shard.counters.reads for shard in db.storage.shards]
        found.append((costs, calls(traffic)))
    (quiet, some), (quiet_with_many, some_with_many) = found
    assert quiet == quiet_with_many
    assert some_with_many <= some + 20  # the first time of something here and there


def test_a_session_whose_window_is_full_is_not_looked_at(db: ts.Database, sessions: Sessions) -> None:
    """Also while something is to be sent again: what needs no packet id is delivered, then nothing is ready."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a", 1)
    session.subscribe("live", 0)
    db.publish([ts.Message("a", b"%d" % number, "publisher", 1) for number in range(3)])
    assert 3 == len(session.deliver())
    session = sessions.open("client", expiry_interval=None, receive_maximum=1)
    assert [(1, True)] == [(item.packet_id, item.dup) for item in session.deliver()]  # type: ignore[union-attr]
    db.publish([ts.Message("live", b"live", "publisher", 1), ts.Message("a", b"3", "publisher", 1)])
    assert [b"live"] == [item.message.payload for _, items in sessions.deliver() for item in items]  # type: ignore[union-attr]
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    assert ("acknowledgements", 3, 2) == (
        session.status().waits_for,
        session.status().in_flight,
        session.status().to_resend,
    )
    assert session.puback(1)
    assert [(2, True)] == [(item.packet_id, item.dup) for item in session.deliver()]  # type: ignore[union-attr]
