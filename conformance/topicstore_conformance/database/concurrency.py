"""Promises about threads: readers see a growing prefix, writers never share an id, and nothing gets stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.database.intercepting_engines import Gate, replace_engine
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, together
from topicstore_conformance.oracle.checks import drain, replayed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Concurrency"]
BATCHES = tries(8, 40)
"""The batches of each writer."""


def batch(writer: int, number: int, size: int = 7) -> list[Message]:
    """Return the messages of one batch of one writer, which stores for several publishers."""
    return [
        Message(f"t/{writer}/{n % 3}", b"%d/%d/%d" % (writer, number, n), f"w{writer}-{n % 2}") for n in range(size)
    ]


def store_and_flush(db: ts.Database) -> None:
    """Store a message and flush."""
    db.store([Message("a", b"0")])
    db.flush()


def write_batches(db: ts.Database, writer: int) -> list[MessageId]:
    """Store one writer's batches."""
    return [id_ for number in range(BATCHES) for id_ in db.store(batch(writer, number)).ids]


def replay_until(db: ts.Database, done: threading.Event) -> list[list[MessageId]]:
    """Replay everything again and again; return the ids of each replay."""
    seen = []
    while not done.wait(MOMENT):
        seen.append([id_ for id_, _ in replayed(db, "#", order="time")])
    return seen


def follow_until(db: ts.Database, done: threading.Event) -> list[MessageId]:
    """Read every stream as it grows, and once more at the end; return the ids in their order."""
    seen: list[MessageId] = []
    places: dict[tuple[int, int], ts.Cursor] = {}
    last = False
    while not last:
        last = done.wait(MOMENT)
        for stream in db.streams("#"):
            key = stream.shard, stream.number
            rows, places[key], _ = drain(db, places.get(key) or db.cursor(stream, "#"), 50)
            seen.extend(id_ for id_, _ in rows)
    return seen


def gated(db: ts.Database) -> Gate:
    """Put a gate into the only shard of a database."""
    gate = Gate(db.storage.shards[0].engine())
    replace_engine(db, gate)
    return gate


STEPS: tuple[Callable[[ts.Database], Any], ...] = (
    lambda db: list(db.replay("#", batch_size=10)),
    lambda db: list(db.replay_arrow("#")),
    lambda db: db.read(db.cursor(db.streams("#")[0], "#")),
    lambda db: db.store([Message("a", b"y")]),
)
"""The calls that other threads make while a database is closed."""


class Concurrency(Fixtures):
    """Promises about what threads see of each other."""

    @both_durabilities
    def test_readers_beside_writers(self, pair: Pair, directory: Path, durability: str) -> None:
        """A reader that sees a message, by a replay or by cursors that follow, sees everything before it."""
        with pair.open(directory / "db", shards=2, durability=durability) as db:
            done = threading.Event()

            def writers() -> list[MessageId]:
                try:
                    return [id_ for ids in together(*(partial(write_batches, db, w) for w in range(3))) for id_ in ids]
                finally:
                    done.set()

            stored, prefixes, followed = together(
                writers, partial(replay_until, db, done), partial(follow_until, db, done)
            )
            ids = [id_ for id_, _ in replayed(db, "#")]
            assert len(stored) == len(set(stored)) == 3 * BATCHES * 7
            assert sorted(stored) == sorted(ids) == sorted(followed)
            for shard in range(2):
                whole = sorted(id_ for id_ in ids if id_.shard == shard)
                for prefix in prefixes:
                    part = [id_ for id_ in prefix if id_.shard == shard]
                    assert whole[: len(part)] == part
            for before, after in pairwise(prefixes):
                assert set(before) <= set(after)

    @both_durabilities
    def test_what_was_stored_is_seen_at_once(self, pair: Pair, directory: Path, durability: str) -> None:
        """A thread that stored a message finds it with its next read, however many others store and flush."""
        with pair.open(directory / "db", durability=durability) as db:

            def work(writer: int) -> None:
                for number in range(40):
                    payload = b"%d/%d" % (writer, number)
                    (id_,) = db.store([Message(f"t/{writer}", payload, "c")]).ids
                    assert id_.position <= db.storage.shards[0].watermark
                    assert [payload] == [message.payload for message in db.replay(f"t/{writer}")][-1:]

            def flush() -> None:
                for _ in range(100):
                    db.flush()

            together(*(lambda w=w: work(w) for w in range(3)), flush)

    @both_durabilities
    def test_generations_beside_writers(self, pair: Pair, directory: Path, durability: str) -> None:
        """Adding and dropping generations while others store, read and list loses nothing and blocks no thread."""
        with pair.open(directory / "db", shards=2, durability=durability) as db:
            done = threading.Event()

            def turn() -> int:
                dropped = 0
                for _ in range(15):
                    number = db.add_generation()
                    if number % 3 == 0:
                        dropped += sum(db.drop_generation(old.number) for old in db.generations()[:-2])
                done.set()
                return dropped

            def look() -> int:
                looks, last = 0, False
                while not last:
                    last = done.wait(MOMENT)  # and once more at the end
                    looks += 1
                    numbers = [info.number for info in db.generations()]
                    assert sorted(set(numbers)) == numbers
                    assert db.info().messages >= 0
                    for stream in db.streams("#"):
                        assert stream.number >= 0
                    assert [] == db.verify().damages
                    db.delete("t/none/such")
                    try:
                        list(db.replay("#"))
                    except ts.GenerationDroppedError:
                        looks += 1
                return looks

            results = together(partial(write_batches, db, 0), partial(write_batches, db, 1), turn, look)
            assert results[2] > 0
            left = {id_ for id_, _ in replayed(db)}
            assert left <= set(results[0] + results[1])
            assert len(left) == db.info().messages
            assert [] == db.verify().damages

    def test_deleting_beside_writers(self, pair: Pair, directory: Path) -> None:
        """A delete beside writers takes all messages that were there at its call, and counts them right."""
        with pair.open(directory / "db") as db:
            for number in range(BATCHES):
                db.store(batch(0, number))

            def delete() -> int:
                return db.delete("t/0/0")

            def write() -> None:
                for number in range(BATCHES):
                    db.store(batch(1, number))

            first, second, _ = together(delete, delete, write)
            assert first + second == BATCHES * 3
            assert {"t/0/1", "t/0/2", "t/1/0", "t/1/1", "t/1/2"} == {message.topic for message in db.replay("#")}
            assert BATCHES * (14 - 3) == db.info().messages == sum(1 for _ in db.replay("#"))

    def test_one_of_many_wins_a_condition(self, pair: Pair, directory: Path) -> None:
        """Of fifty threads that set the same key if it is absent exactly one succeeds; only its messages are stored."""
        with pair.open(directory / "db") as db:
            write = ts.StateWrite(b"leader", b"x", None)

            def race(number: int) -> int:
                try:
                    return db.store([Message("a", b"%d" % number)], state={0: [write]}).count
                except ts.StateConflictError:
                    return 0

            assert 1 == sum(together(*(lambda n=n: race(n) for n in range(50))))
            assert 1 == sum(1 for _ in db.replay("#"))

    @both_durabilities
    def test_close_while_others_work(self, pair: Pair, directory: Path, durability: str) -> None:
        """Reading and writing end with DatabaseClosedError when the database is closed, and its lock is free then."""
        for _ in range(5):
            db = pair.open(directory / "db", durability=durability)
            db.store([Message("a", b"x" * 100)] * 500)
            started = threading.Barrier(5)

            def work(step: Callable[[], Any], started: threading.Barrier = started) -> type[BaseException]:
                started.wait(PATIENCE)
                try:
                    while True:
                        step()
                except ts.TopicstoreError as error:
                    return type(error)

            def close(started: threading.Barrier = started, db: ts.Database = db) -> None:
                started.wait(PATIENCE)
                db.close()

            *errors, _ = together(
                *(partial(work, partial(step, db)) for step in STEPS),
                close,
            )
            assert [ts.DatabaseClosedError] * 4 == errors
        with pair.open(directory / "db", durability=durability) as db:
            assert [] == db.verify().damages

    def test_close_in_the_middle_of_a_replay(self, pair: Pair, directory: Path) -> None:
        """A replay that is half read raises at its next batch after close, and the directory can be opened at once."""
        db = pair.open(directory / "db")
        db.store([Message("a", b"%d" % number) for number in range(100)])
        # In order of time, messages of every stream are in memory at once: here, that may be all of them.
        replay, arrow = db.replay("#", order="any", batch_size=1), db.replay_arrow("#", order="any", batch_size=1)
        assert (b"0", 1) == (next(replay).payload, next(arrow).num_rows)
        db.close()
        for each in (replay, arrow):
            with pytest.raises(ts.DatabaseClosedError):
                list(each)
        pair.open(directory / "db").close()

    def test_a_flush_takes_nothing_back(self, pair: Pair, directory: Path) -> None:
        """Under ``commit``, what is stored while a flush runs is visible at once, and stays so when the flush ends."""
        with pair.open(directory / "db") as db:
            db.store([Message("a", b"1")])
            gate = gated(db)
            flush = begin(db.flush)
            assert gate.flushing.wait(PATIENCE)
            db.store([Message("a", b"2")])
            assert [b"1", b"2"] == [message.payload for message in db.replay("a")]
            gate.open.set()
            flush.result(PATIENCE)
            assert [b"1", b"2"] == [message.payload for message in db.replay("a")]

    def test_nothing_is_seen_before_it_is_on_disk(self, pair: Pair, directory: Path) -> None:
        """Under ``sync`` no reader sees a message, and its store does not return, while its flush is under way."""
        with pair.open(directory / "db", durability="sync") as db:
            db.store([Message("a", b"1")])
            gate = gated(db)
            store = begin(lambda: db.store([Message("a", b"2")]))
            assert gate.flushing.wait(PATIENCE)
            assert [b"1"] == [message.payload for message in db.replay("a")]
            cursor = db.cursor(db.streams("#")[0], "#")
            assert [b"1"] == list(db.read(cursor).batch.payloads)
            assert 0 == db.delete("a", db.storage.shards[0].last_position >> 11)
            assert [] == db.verify().damages
            assert not store.done()
            gate.open.set()
            store.result(PATIENCE)
            assert [b"1", b"2"] == [message.payload for message in db.replay("a")]

    @both_durabilities
    def test_everything_at_once_during_a_flush(self, pair: Pair, directory: Path, durability: str) -> None:
        """Storing, adding, dropping, flushing and closing while a flush is under way never wait for ever."""
        for number in range(10):
            db = pair.open(directory / f"db-{number}", durability=durability)
            db.store([Message("a", b"1")])
            db.add_generation()
            gate = gated(db)
            works: list[Callable[[], Any]] = [db.flush, partial(db.store, [Message("a", b"2")]), db.close]
            works += [partial(db.drop_generation, 1), db.add_generation, partial(db.delete, "a")]
            first = begin(partial(store_and_flush, db))
            assert gate.flushing.wait(PATIENCE)
            begun = [begin(work) for work in works]
            gate.open.set()
            for future in (first, *begun):
                error = future.exception(PATIENCE)
                assert error is None or isinstance(error, ts.DatabaseClosedError)

    # --- the buffered writer --------------------------------------------------------------------

    def test_writer_keeps_the_order_of_puts(self, pair: Pair, directory: Path) -> None:
        """Every message put into a buffered writer gets its id, and each thread's messages are in order."""
        with pair.open(directory / "db") as db, db.writer(max_items=9) as writer:

            def put(number: int) -> list[Future[MessageId]]:
                return [writer.put(Message(f"t/{number}", b"%d" % n, f"c{number}")) for n in range(100)]

            for number, futures in enumerate(together(*(lambda n=n: put(n) for n in range(4)))):
                ids = [future.result(PATIENCE) for future in futures]
                assert sorted(set(ids)) == ids
                assert [(id_, b"%d" % n) for n, id_ in enumerate(ids)] == [
                    (id_, message.payload) for id_, message in replayed(db, f"t/{number}")
                ]

    def test_writer_flushes_by_time(self, pair: Pair, directory: Path) -> None:
        """A message alone in a writer's buffer is stored after the interval, without any further call."""
        with pair.open(directory / "db") as db, db.writer(max_items=1_000, flush_interval=0.02) as writer:
            for number in range(3):
                id_ = writer.put(Message("a", b"%d" % number)).result(PATIENCE)
                assert id_ == replayed(db)[-1][0]

    def test_writer_waits_for_its_interval_or_flush(self, pair: Pair, directory: Path) -> None:
        """A writer stores nothing before its interval ends, except on `flush` and when its buffer is full."""
        with pair.open(directory / "db") as db, db.writer(max_items=3, flush_interval=1_000.0) as writer:
            first = writer.put(Message("a", b"1"))
            with pytest.raises(TimeoutError):
                first.result(0.05)
            assert [] == list(db.replay("#"))
            writer.flush()
            assert first.done()
            rest = [writer.put(Message("a", b"%d" % number)) for number in (2, 3, 4)]
            assert all(future.done() for future in rest)
            assert [b"1", b"2", b"3", b"4"] == [message.payload for message in db.replay("#")]

    def test_writer_close(self, pair: Pair, directory: Path) -> None:
        """Closing a writer stores what is buffered, and a put after it is refused."""
        with pair.open(directory / "db") as db:
            writer = db.writer(flush_interval=1_000.0)
            future = writer.put(Message("a", b"1"))
            writer.close()
            writer.close()
            assert (replayed(db)[0][0], True) == (future.result(0), future.done())
            with pytest.raises(ts.DatabaseClosedError):
                writer.put(Message("a", b"2"))
            for bad in ({"max_items": 0}, {"flush_interval": 0.0}):
                with pytest.raises(ts.InvalidArgumentError):
                    db.writer(**bad)

    def test_writer_failures_go_to_the_futures(self, pair: Pair, directory: Path) -> None:
        """A bad message fails alone: at its put, or in its future if only the store can refuse it."""
        now = 1_700_000_000_000_000
        with pair.open(directory / "db", timestamps="message", clock=lambda: now) as db:
            writer = db.writer(flush_interval=1_000.0)
            with pytest.raises(ts.InvalidMessageError) as refused:
                writer.put(Message("a/#", b""))
            assert refused.value.index is None
            good = writer.put(Message("a", b"1", timestamp=now))
            writer.flush()
            both = [writer.put(Message("a", b"2", timestamp=now)), writer.put(Message("a", b"3", timestamp=now - 1))]
            with pytest.raises(ExceptionGroup, match="messages that were not stored: 1"):
                writer.flush()
            later = writer.put(Message("a", b"4", timestamp=now))
            writer.close()
            assert [None, None, ts.LateMessageError, None] == [
                type(error) if (error := future.exception(0)) else None for future in (good, *both, later)
            ]
            assert [b"1", b"2", b"4"] == [message.payload for message in db.replay("#")]

    def test_writer_cancelled_futures(self, pair: Pair, directory: Path) -> None:
        """A put that is cancelled in time is not stored; one that was stored can't be cancelled."""
        with pair.open(directory / "db") as db:
            writer = db.writer(flush_interval=1_000.0)
            futures = [writer.put(Message("a", b"%d" % number)) for number in range(4)]
            assert [True, True] == [futures[1].cancel(), futures[2].cancel()]
            writer.close()
            assert not futures[0].cancel()
            assert [b"0", b"3"] == [message.payload for message in db.replay("#")]
            assert [False, True, True, False] == [future.cancelled() for future in futures]

    def test_writer_over_a_closed_database(self, pair: Pair, directory: Path) -> None:
        """Closing a database stores what its writers hold; closing such a writer afterwards raises nothing."""
        db = pair.open(directory / "db")
        writer = db.writer(flush_interval=1_000.0)
        future = writer.put(Message("a", b"1"))
        db.close()
        writer.close()
        assert (None, 0) == (future.exception(0), future.result(0).shard)
        with pytest.raises(ts.DatabaseClosedError):
            writer.put(Message("a", b"2"))
