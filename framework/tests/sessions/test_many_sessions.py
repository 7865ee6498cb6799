"""Many idle sessions cost memory, but no function calls, reads or writes."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.sessions import Session, Sessions
from topicstore_conformance.faults.clock import Clock


def idle(sessions: Sessions, numbers: range) -> list[Session]:
    """Open sessions with these numbers in their names and filters, and deliver until none is ready."""
    opened = [sessions.open(f"idle-{number}", expiry_interval=None, keep_alive=0) for number in numbers]
    for number, session in zip(numbers, opened, strict=True):
        session.subscribe(f"idle/{number}/#", 1)
    while sessions.wait(0):
        sessions.deliver()
    return opened


@pytest.mark.slow
@pytest.mark.parametrize("db", ["rocksdb"], indirect=True)  # the memory backend's stored messages would be counted
def test_an_idle_session_takes_less_than_7_kb(db: ts.Database, sessions: Sessions) -> None:
    """A connected session with two subscriptions takes less than 7 kB, even after it had a full window."""

    def used(numbers: range) -> list[Session]:
        opened = idle(sessions, numbers)
        for session in opened:
            session.subscribe("all", 1)
        db.publish([ts.Message("all", b"%d" % number, "publisher", 1) for number in range(2_000)])
        while sessions.wait(0):
            for session, items in sessions.deliver():
                assert len(items) == session.puback(*[item.packet_id for item in items])
        sessions.checkpoint()
        db._publisher.hub.forget()  # drops cached reads, whose memory all sessions share
        gc.collect()
        return opened

    tracemalloc.start()
    try:
        used(range(5))  # allocates memory that all sessions share
        before, _ = tracemalloc.get_traced_memory()
        opened = used(range(100, 150))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [0] * len(opened) == [session.status().in_flight for session in opened]
    assert (after - before) / len(opened) < 7_000


def calls(act: Callable[[], object]) -> int:
    """Return the number of Python and C functions that are called."""
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.disable()  # garbage collection would add calls
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_idle_sessions_are_not_looked_at(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """Idle sessions cause no additional function call in ticks or in the traffic of other sessions."""
    busy = sessions.open("busy", expiry_interval=None)
    busy.subscribe("busy", 1)
    messages = [ts.Message("busy", b"%d" % number, "publisher", 1) for number in range(10)]

    def traffic() -> None:
        db.publish(messages)
        assert sessions.wait(0)
        assert [(busy, 10)] == [(session, len(items)) for session, items in sessions.deliver()]
        assert 10 == busy.puback(*busy.in_flight.awaiting_puback)
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
        silence()  # commits the pending acknowledgements
        silence()
        written = [shard.writer.counters.bytes for shard in db.storage.shards]
        reads = [shard.writer.counters.reads for shard in db.storage.shards]
        costs = calls(silence)
        assert written == [shard.writer.counters.bytes for shard in db.storage.shards]
        assert reads == [shard.writer.counters.reads for shard in db.storage.shards]
        found.append((costs, calls(traffic)))
    (quiet, some), (quiet_with_many, some_with_many) = found
    assert quiet == quiet_with_many
    assert some_with_many <= some + 20  # allows for a few one-time initialisations


def test_a_session_whose_window_is_full_is_not_looked_at(db: ts.Database, sessions: Sessions) -> None:
    """A session with a full window is not ready, even if redeliveries are pending; QoS 0 messages are delivered."""
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


def test_empty_shards_take_hardly_any_room(tmp_path: Path) -> None:
    """Sixteen shards with one session each take less than 16 MB on disk."""
    with ts.open(tmp_path / "db", shards=16) as db:
        for number in range(16):
            db.sessions.open(f"client-{number}", expiry_interval=None).subscribe("#", 1)
    files = [path.stat() for path in (tmp_path / "db").rglob("*") if path.is_file()]
    assert sum(file.st_blocks * 512 for file in files) < 16 * 1_000_000
