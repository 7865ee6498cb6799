"""Stores and reads during a flush: no message is visible before it is durable, and none disappears."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message
from topicstore_conformance.database.intercepting_engines import Gate, Turnstile, replace_engine
from topicstore_conformance.faults.threads import PATIENCE, begin, together, wait_until

THREADS = 4


def opened(durability: str = "commit") -> ts.Database:
    """Return a database of one shard with one message."""
    db = ts.open("memory", backend="memory", durability=durability)
    db.store([Message("a", b"1")])
    return db


def gated(db: ts.Database) -> Gate:
    """Replace the engine of the only shard with an engine that blocks until released."""
    gate = Gate(db.storage.shards[0].writer.open_engine())
    replace_engine(db, gate)
    return gate


def payloads(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("a")]


def test_a_flush_takes_nothing_back() -> None:
    """With ``durability="commit"``, messages stored during a flush are visible at once, and remain visible after it."""
    with opened() as db:
        gate = gated(db)
        flush = begin(db.flush)
        assert gate.flushing.wait(PATIENCE)
        db.store([Message("a", b"2")])
        assert [b"1", b"2"] == payloads(db)
        gate.open.set()
        flush.result(PATIENCE)
        assert [b"1", b"2"] == payloads(db)


def test_nothing_is_seen_before_it_is_on_disk() -> None:
    """With ``sync``, no reader sees a message, and its `store` doesn't return, before the flush has ended."""
    with opened("sync") as db:
        gate = gated(db)
        store = begin(lambda: db.store([Message("a", b"2")]))
        assert gate.flushing.wait(PATIENCE)
        assert [b"1"] == payloads(db)
        assert [b"1"] == list(db.read(db.cursor(db.streams("#")[0], "#")).batch.payloads)
        assert 0 == db.delete("a", db.storage.shards[0].writer.tail.last_position >> 11)
        assert [] == db.verify().damages
        assert not store.done()
        gate.open.set()
        store.result(PATIENCE)
        assert [b"1", b"2"] == payloads(db)


def test_flushes_are_shared() -> None:
    """All batches stored during a flush share the next flush."""
    with opened("sync") as db:
        shard, engine = db.storage.shards[0], db.storage.shards[0].writer.open_engine()
        turnstile = Turnstile(engine)
        replace_engine(db, turnstile)
        stores = [begin(partial(db.store, [Message("a", b"2")]))]
        wait_until(lambda: turnstile.begun, "the flush of the first store")
        written = shard.writer.tail.writes
        stores += [begin(partial(db.store, [Message("a", b"%d" % number)])) for number in range(THREADS)]
        wait_until(lambda: shard.writer.tail.writes == written + THREADS, "the writes of all other stores")
        db.generations()  # waits for the lock that the last writer still holds
        turnstile.let_through()
        wait_until(lambda: turnstile.begun == 2, "the flush of the others")
        assert 1 == stores[0].result(PATIENCE).count
        assert [b"1", b"2"] == payloads(db)
        assert not any(store.done() for store in stores[1:])
        turnstile.let_through()
        assert [1] * THREADS == [store.result(PATIENCE).count for store in stores[1:]]
        assert 2 == turnstile.begun
        replace_engine(db, engine)
        assert 2 + THREADS == len(payloads(db))


@pytest.mark.parametrize("durability", ["commit", "sync"])
def test_everything_at_once_during_a_flush(durability: str) -> None:
    """Storing, adding, dropping, deleting, flushing and closing during a flush don't deadlock."""
    for _ in range(10):
        db = opened(durability)
        db.add_generation()
        gate = gated(db)
        works: list[Callable[[], Any]] = [db.flush, partial(db.store, [Message("a", b"2")]), db.close]
        works += [partial(db.drop_generation, 1), db.add_generation, partial(db.delete, "a")]
        first = begin(lambda db=db: (db.store([Message("a", b"0")]), db.flush()))
        assert gate.flushing.wait(PATIENCE)
        begun = [begin(work) for work in works]
        gate.open.set()
        for future in (first, *begun):
            error = future.exception(PATIENCE)
            assert error is None or isinstance(error, ts.DatabaseClosedError)


def test_one_of_many_wins_a_condition() -> None:
    """Of fifty threads that set the same key if absent, exactly one succeeds, and only its messages are stored."""
    with opened() as db:
        write = ts.StateWrite(b"leader", b"x", None)

        def race(number: int) -> int:
            try:
                return db.store([Message("a", b"%d" % number)], state={0: [write]}).count
            except ts.StateConflictError:
                return 0

        assert 1 == sum(together(*(partial(race, number) for number in range(50))))
        assert 2 == len(payloads(db))
