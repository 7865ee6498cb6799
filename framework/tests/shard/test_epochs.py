"""Epochs: messages of an epoch are hidden until it ends, then all become visible, and none is added later.

Tests end long epochs only by setting the clock; short epochs end in real time.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.positions import COUNTER_BITS
from topicstore_conformance.database.intercepting_engines import Full, Gate, replace_engine
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.oracle.checks import drain, replayed
from topicstore_conformance.subjects.pairs import small_options

LONG, SHORT = 30, 16
"""Base-2 logarithms of the epochs' lengths in microseconds: 18 minutes and 66 milliseconds."""
LENGTH = 1 << LONG
BEGIN = START >> LONG << LONG
"""The time at which a long epoch begins, in microseconds."""
EPOCHAL = "wildcard_optimized"

both_timestamps = pytest.mark.parametrize("timestamps", ["commit", "message"])


def opened(
    clock: Callable[[], int], path: Path | str = "memory", layout: str = EPOCHAL, bits: int = LONG, **how: Any
) -> ts.Database:
    """Return a database with epochs of 2**`bits` microseconds: in memory without a path, otherwise on RocksDB."""
    backend = "memory" if path == "memory" else "rocksdb"
    options = {layout: small_options(layout, epoch_bits=bits)}
    return ts.open(path, backend=backend, layout=layout, options=options, clock=clock, **{"durability": "sync", **how})


def reopened(path: Path, clock: Callable[[], int]) -> ts.Database:
    """Reopen a database, ignoring the warning that its last position is in the future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ts.open(path, clock=clock)


def some(number: int, count: int = 8) -> list[Message]:
    """Return messages of many topics and a few publishers."""
    return [Message(f"t/{(5 * number + n) % 8}/{n % 2}", b"%d/%d" % (number, n), f"c{n % 3}") for n in range(count)]


def seen(db: ts.Database) -> list[MessageId]:
    """Return the sorted ids of the messages that cursors return."""
    return sorted(id_ for stream in db.streams("#") for id_, _ in drain(db, db.cursor(stream, "#"))[0])


def found(db: ts.Database) -> list[MessageId]:
    """Return the sorted ids of the messages that a replay returns."""
    return sorted(id_ for id_, _ in replayed(db))


@pytest.mark.parametrize("durability", ["commit", "sync"])
def test_an_epoch_is_seen_when_it_is_over(durability: str) -> None:
    """A stored message is seen as soon as the clock is past the end of its epoch, and not before."""
    clock = Clock(BEGIN + 5)
    with opened(clock, durability=durability) as db:
        stored = db.store(some(1)).ids + db.store(some(2)).ids
        for now in (clock.now, BEGIN - LENGTH, BEGIN + LENGTH - 1):
            clock.now = now
            assert len(seen(db)) < len(stored)
        clock.now = BEGIN + LENGTH
        assert sorted(stored) == seen(db) == found(db)


@pytest.mark.parametrize("durability", ["commit", "sync"])
def test_nothing_comes_before_what_was_seen(tmp_path: Path, durability: str) -> None:
    """An epoch that was shown gets no more messages, even if the clock jumps back into it, or after a restart."""
    clock = Clock(BEGIN)
    with opened(clock, tmp_path / "db", durability=durability) as db:
        first = db.store(some(1)).ids
        clock.now = BEGIN + LENGTH
        assert sorted(first) == found(db)
        clock.now = BEGIN
        epoch = db.storage.shards[0].generations.slab(1).epoch
        later = db.store(some(2)).ids[0]
        assert later.position // epoch > first[-1].position // epoch
    with reopened(tmp_path / "db", clock) as db:
        assert db.store(some(3)).ids[0].position > later.position
        db.add_generation()
        assert sorted(first) == found(db)[:8]


def test_a_generation_ends_its_epoch() -> None:
    """Sealing a generation ends its current epoch: all its messages become visible, and its streams end."""
    clock = Clock(BEGIN)
    with opened(clock) as db:
        old = db.store(some(1)).ids
        assert len(seen(db)) < len(old)
        db.add_generation()
        new = db.store(some(2)).ids
        assert old[-1].position < new[0].position < BEGIN + LENGTH << COUNTER_BITS
        assert sorted(old) == [id_ for id_ in seen(db) if id_ in old]
        for stream in db.streams("#"):
            _, _, ended = drain(db, db.cursor(stream, "#"))
            assert (stream.generation == 1) == ended
        clock.now += LENGTH
        assert sorted(old + new) == seen(db)


@both_timestamps
@pytest.mark.parametrize("start", [0, BEGIN])
def test_a_delete_takes_what_an_epoch_hides(timestamps: str, start: int) -> None:
    """A delete includes messages that the layout hides until an epoch ends, even with positions ahead of the clock."""
    with opened(Clock(BEGIN), bits=SHORT, timestamps=timestamps) as db:
        for number in range(2):
            db.store(some(number))
            assert 8 * (number + 1) == len(found(db))
        db.store(some(2))
        assert 24 == db.delete("#", start)
        assert [] == found(db)


@both_timestamps
def test_short_epochs_in_real_time(timestamps: str) -> None:
    """A replay returns all messages, and a follower waits only for the end of an epoch."""
    options = {EPOCHAL: small_options(EPOCHAL, epoch_bits=SHORT)}
    with ts.open("memory", backend="memory", layout=EPOCHAL, options=options, timestamps=timestamps) as db:
        stored = []
        for number in range(4):
            stored += db.store(some(number)).ids
            assert sorted(stored) == found(db)
        stored += db.store(some(20)).ids
        wait_until(lambda: sorted(stored) == seen(db), "the end of a short epoch")


@both_timestamps
def test_a_replay_waits_an_epoch_and_not_longer(timestamps: str) -> None:
    """A replay waits for no more than one epoch, even if the clock stands still and other threads continue to store."""
    clock, done = Clock(BEGIN), threading.Event()
    with opened(clock, bits=SHORT, timestamps=timestamps) as db, ThreadPoolExecutor() as threads:
        stored = db.store(some(0)).ids

        def write() -> None:
            number = 0
            while not done.wait(0.001):  # with no pause, more would be stored than the replays can check
                number += 1
                db.store(some(number, 1))

        writer = threads.submit(write)
        try:
            for _ in range(3):
                assert set(stored) <= set(threads.submit(found, db).result(PATIENCE))
        finally:
            done.set()
        writer.result(PATIENCE)


@pytest.mark.parametrize("other", ["replay", "store"])
def test_two_replays_at_the_end_of_an_epoch(other: str) -> None:
    """A replay returns all messages stored before its call, even during the flush at the end of an epoch."""
    clock = Clock(BEGIN)
    with opened(clock) as db, ThreadPoolExecutor() as threads:
        stored = db.store(some(1)).ids
        clock.now += LENGTH
        gate = Gate(db.storage.shards[0].writer.open_engine())
        replace_engine(db, gate)
        first: Any = threads.submit(db.store, some(2)) if other == "store" else threads.submit(found, db)
        assert gate.flushing.wait(PATIENCE)
        waits, reader = threading.Event(), db.storage.shards[0].reader
        end = reader.end_epoch

        def told_of(*arguments: Any, **how: Any) -> None:
            waits.set()
            end(*arguments, **how)

        reader.end_epoch = told_of  # type: ignore[method-assign]
        second = threads.submit(found, db)
        wait_until(lambda: waits.is_set() or second.done(), "the second replay to know where it ends")
        gate.open.set()
        assert sorted(stored) == second.result(PATIENCE)
        first.result(PATIENCE)


@pytest.mark.parametrize("refused", ["write", "flush_log"])
@pytest.mark.parametrize("first", ["store", "read"])
@pytest.mark.parametrize("layout", ["block", EPOCHAL])
def test_a_shard_that_takes_no_writes(tmp_path: Path, layout: str, first: str, refused: str) -> None:
    """After a failed write, a message is either read or reported as unreachable; reopening shows all messages."""
    clock, hiding = Clock(BEGIN - LENGTH), layout == EPOCHAL
    with opened(clock, tmp_path / "db", layout) as db:
        stored = db.store(some(0)).ids
        clock.now = BEGIN
        stored += db.store(some(1)).ids
        engine = db.storage.shards[0].writer.open_engine()
        replace_engine(db, Full(engine, refused))
        clock.now += LENGTH
        if first == "store":
            with pytest.raises(ts.StorageFullError):
                db.store(some(2))
        elif hiding:
            with pytest.raises(ts.StorageFullError):
                seen(db)
        with pytest.raises(ts.RecoverableError) if hiding else contextlib.nullcontext():
            assert sorted(stored) == found(db)
        assert set(stored[:8]) <= set(seen(db)) <= set(stored)
        assert hiding or sorted(stored) == seen(db)
        assert (first == "store" or hiding) == (db.info().shards[0].failure is not None)
        replace_engine(db, engine)
    with reopened(tmp_path / "db", clock) as db:
        known = {*stored, *db.store(some(3)).ids}
        clock.now += LENGTH
        whole = found(db)
        assert known <= set(whole)
        assert len(whole) - len(known) in (0, 8 if first == "store" else 0)  # the failed batch may be stored as a whole
        assert whole == seen(db)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("close", ts.DatabaseClosedError),
        ("add_generation", None),
        ("store", None),
        ("fail", ts.ShardReadOnlyError),
    ],
)
def test_a_waiting_replay_is_released(what: str, told: type[Exception] | None) -> None:
    """A replay that waits for a long epoch returns when another call ends the epoch, or raises if it can't end."""
    clock, replaying, asked = Clock(BEGIN), set[int](), threading.Event()

    def now() -> int:
        if threading.get_ident() in replaying:
            asked.set()  # the replay holds the shard's lock here, and will wait for the epoch
        return clock.now

    def replay() -> list[MessageId]:
        replaying.add(threading.get_ident())
        return found(db)

    with contextlib.closing(opened(now)) as db, ThreadPoolExecutor() as threads:
        stored = db.store(some(1)).ids
        waiting = threads.submit(replay)
        assert asked.wait(PATIENCE)
        if what == "close":
            db.close()
        elif what == "add_generation":
            db.add_generation()
        elif what == "store":
            clock.now += LENGTH
            db.store(some(2))
        else:
            engine = db.storage.shards[0].writer.open_engine()
            replace_engine(db, Full(engine, "write"))
            with pytest.raises(ts.StorageFullError):
                db.store(some(2))
            replace_engine(db, engine)
        waited = waiting.exception(PATIENCE)
        assert told is (None if waited is None else type(waited))
        if waited is None:
            assert sorted(stored) == waiting.result()
