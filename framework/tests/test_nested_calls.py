"""Calls within another call of the same thread, as from signal handlers, neither deadlock nor corrupt data."""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.sessions import PubRel
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.steps import Handler
from topicstore_conformance.faults.threads import PATIENCE, begin

pytestmark = pytest.mark.slow

STORED = [ts.Message(f"a/{number}", b"1", f"c{number}") for number in range(10)]
"""Messages for both shards."""
ENDED = ts.DatabaseClosedError, ts.SessionEndedError, ts.SubscriptionClosedError
"""Errors that a call may raise if the database is closed during the call."""


def store(db: ts.Database) -> None:
    db.store(STORED)


def replay(db: ts.Database) -> None:
    for _ in db.replay("a/+", batch_size=3):
        pass


def follow(db: ts.Database) -> None:
    with db.subscribe("#", 0, window=100) as followed:
        db.publish(STORED)
        batch = followed.fetch(timeout=0)
        followed.acknowledge(batch.sequence)


def serve(db: ts.Database) -> None:
    session = db.sessions.open("me", expiry_interval=60)
    session.subscribe("a/#", qos=1)
    db.publish([ts.Message(message.topic, b"1", message.client_id, qos=1) for message in STORED])
    for packet in session.deliver(limit=5):
        if not isinstance(packet, PubRel) and packet.packet_id is not None:
            session.puback(packet.packet_id)
    db.sessions.tick()


def write(db: ts.Database) -> None:
    with db.writer(max_items=4) as writer:
        for message in STORED:
            writer.put(message)


def queue(db: ts.Database) -> None:
    waiting = db.queues.open("q")
    waiting.append(STORED)
    waiting.commit(waiting.read(3).ids[-1])


def care(db: ts.Database) -> None:
    db.add_generation()
    db.store(STORED)
    db.delete("a/1")
    db.drop_generation(1)
    db.compact()
    db.flush()


CALLS = [store, replay, follow, serve, write, queue, care]


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> Iterator[Callable[[str], ts.Database]]:
    numbers = iter(range(sys.maxsize))

    def opened(backend: str) -> ts.Database:
        db = ts.open(tmp_path / f"{next(numbers)}", backend=backend, shards=2)
        db.store(STORED)
        return db

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # for subscriptions that were interrupted while being created
        yield opened


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb", "memory"])
@pytest.mark.parametrize("call", CALLS)
def test_a_close_within_a_call(opened: Callable[[str], ts.Database], backend: str, call: Callable[..., None]) -> None:
    """A close at any step of a call ends the call like a close from another thread, and leaves no damage."""
    need(backend)
    counting = Handler(lambda: None)
    with opened(backend) as db:
        call(db)  # the first call does one-time work
    with opened(backend) as db:
        counting.run(lambda: call(db))
    kinds = list(counting.kinds.values())
    assert len(kinds) > 50
    for step in kinds[:: max(len(kinds) // tries(16, 80), 1)]:
        db = opened(backend)
        handler = Handler(db.close, step, ENDED)
        begin(lambda db=db, handler=handler: handler.run(lambda: call(db))).result(PATIENCE)
        begin(db.close).result(PATIENCE)
        with pytest.raises(ts.DatabaseClosedError):
            db.store(STORED)
        if backend != "memory":
            with ts.open(db.path) as again:
                assert again.verify().damages == []
                stored = sum(1 for _ in again.replay("a/0"))
                assert stored in ((0, 1, 2) if call is care else (1, 2)), step


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "memory"])
def test_a_store_within_a_store(opened: Callable[[str], ts.Database], backend: str) -> None:
    """A store within a store either stores both batches or refuses the inner one; neither overwrites the other."""
    need(backend)
    counting = Handler(lambda: None)
    with opened(backend) as db:
        store(db)
        counting.run(lambda: store(db))
    kinds, refused = list(counting.kinds.values()), 0
    for step in kinds[:: max(len(kinds) // tries(60, 200), 1)]:
        with opened(backend) as db:
            handler = Handler(lambda db=db: store(db), step)  # type: ignore[misc]
            try:
                begin(lambda db=db, handler=handler: handler.run(lambda: store(db))).result(PATIENCE)
            except ts.NestedCallError:
                refused += 1
            else:
                assert 3 * len(STORED) == sum(1 for _ in db.replay("#"))
            assert [] == db.verify().damages
    assert refused


def read(db: ts.Database) -> None:
    db.state(0).get(b"key")
    replay(db)
    db.flush()


# Python only prints an exception that a signal handler raises within an object's `__del__`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb", "memory"])
@pytest.mark.parametrize("call", [store, read])
def test_an_interrupted_call_keeps_no_close_waiting(
    opened: Callable[[str], ts.Database], backend: str, call: Callable[..., None]
) -> None:
    """Wherever Ctrl-C interrupts a call, a later close finishes: the thread is not counted as still in the engine."""
    need(backend)
    counting = Handler(lambda: None)
    with opened(backend) as db:
        call(db)
        counting.run(lambda: call(db))

    def interrupt() -> None:
        raise KeyboardInterrupt

    kinds = list(counting.kinds.values())
    for step in kinds[:: max(len(kinds) // tries(40, 200), 1)]:
        db = opened(backend)
        with contextlib.suppress(KeyboardInterrupt):
            Handler(interrupt, step).run(lambda db=db: call(db))  # type: ignore[misc]
        begin(db.close).result(PATIENCE)
        db.close()


def test_a_writer_closed_within_a_put(opened: Callable[[str], ts.Database]) -> None:
    """A writer that is closed within `put` stores the messages that it took, and refuses more."""
    with opened("memory") as db, db.writer(max_items=4) as writer:
        counting = Handler(lambda: None)
        counting.run(lambda: [writer.put(message) for message in STORED])
    for step in counting.kinds.values():
        with opened("memory") as db:
            writer, futures = db.writer(max_items=4), []

            def work(writer: Any = writer, futures: list[Any] = futures) -> None:
                for message in STORED:
                    futures.append(writer.put(message))  # noqa: PERF401 - those before an error count, too

            begin(lambda step=step, writer=writer, work=work: Handler(writer.close, step, ENDED).run(work)).result(
                PATIENCE
            )
            begin(writer.close).result(PATIENCE)
            assert all(future.result(0) for future in futures)
            with pytest.raises(ts.DatabaseClosedError):
                writer.put(STORED[0])


def test_a_failure_of_a_close_within_a_call_is_reported(
    opened: Callable[[str], ts.Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a close within another call fails, the next close raises that error once, and everything is closed."""
    db = opened("leveldb")
    log = db.storage.shards[0].writer

    def fail() -> None:
        raise ts.EngineError("no flush")

    monkeypatch.setattr(log.engine, "flush_log", fail)
    with log.lock:
        db.close()
        assert not db.storage.shards[0].writer.closed
        db.close()
    with pytest.raises(ts.EngineError, match="no flush"):
        db.close()
    db.close()
    with ts.open(db.path) as again:
        assert sum(1 for _ in again.replay("#")) == len(STORED)


def test_a_signal_handler_that_closes(opened: Callable[[str], ts.Database]) -> None:
    """A program that stores in a loop ends when its signal handler closes the database."""
    db = opened("leveldb")

    def work() -> None:
        with db.storage.shards[1].writer.lock:
            signal.raise_signal(signal.SIGUSR1)
        while True:
            db.store(STORED)

    before = signal.signal(signal.SIGUSR1, lambda *_: db.close())
    try:
        with pytest.raises(ts.DatabaseClosedError):
            work()
    finally:
        signal.signal(signal.SIGUSR1, before)
    db.close()
    with ts.open(db.path) as again:
        assert sum(1 for _ in again.replay("#")) % len(STORED) == 0
