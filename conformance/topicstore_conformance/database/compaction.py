"""Promises about compaction beside everything else: it changes nothing but bytes, and its failures are reported."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.engine import DATA, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import full, tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, together, wait_until
from topicstore_conformance.oracle.checks import check_publishers, drain, replayed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Compaction"]
BATCHES = tries(16, 40)
"""The batches of each writer."""
ENOUGH = 70_000
"""The number of messages after which the background looks for work."""


def batch(writer: int, number: int, size: int = 9) -> list[Message]:
    """Return the messages of one batch, of several topics and publishers."""
    return [
        Message(f"t/{writer}/{(number + n) % 4}/x", b"%d/%d/%d" % (writer, number, n), f"w{writer}-{n % 2}")
        for n in range(size)
    ]


def opened(pair: Pair, path: Path, **arguments: object) -> ts.Database:
    """Return a new database that is compacted only on request."""
    return pair.open(path, options={pair.layout: pair.small()}, **{"auto_compact": False, **arguments})


def again_until(done: threading.Event, work: Callable[[], object]) -> int:
    """Do something repeatedly until an event, and once more at the end; return how often."""
    times, last = 0, False
    while not last:
        last = done.wait(MOMENT)
        work()
        times += 1
    return times


def write(db: ts.Database, writer: int) -> list[MessageId]:
    """Store one writer's batches."""
    return [id_ for number in range(BATCHES) for id_ in db.store(batch(writer, number)).ids]


class Narrow:
    """A reader that replays one topic again and again."""

    def __init__(self, db: ts.Database, topic: str) -> None:
        self._db, self._topic = db, topic
        self.seen: set[MessageId] = set()

    def __call__(self) -> None:
        rows = replayed(self._db, self._topic)
        assert {self._topic} >= {message.topic for _, message in rows}
        check_publishers(rows)
        ids = {id_ for id_, _ in rows}
        assert self.seen <= ids
        self.seen = ids


class Stepping:
    """A reader that follows all streams one message at a time, by cursors that are saved."""

    def __init__(self, db: ts.Database, limit: int) -> None:
        self._db, self._limit = db, limit
        self._saved: dict[tuple[int, int], bytes] = {}
        self.seen: list[tuple[MessageId, Message]] = []

    def __call__(self) -> None:
        for stream in self._db.streams("#"):
            place = stream.shard, stream.number
            saved = self._saved.get(place)
            cursor = self._db.cursor(stream, "#") if saved is None else ts.Cursor.from_bytes(saved)
            rows, cursor, _ = drain(self._db, cursor, self._limit)
            self.seen += rows
            self._saved[place] = cursor.to_bytes()


# --- in the background ------------------------------------------------------------------------


def has_begun(pair: Pair, db: ts.Database) -> bool:
    """Return whether a compaction has done something, or has nothing to do."""
    return bool(db.storage.shards[0].counters.compacted) or not pair.merges(db)


def has_compacted(pair: Pair, db: ts.Database, count: int) -> bool:
    """Return whether nothing is left to compact, and at least this many messages were compacted."""
    return not pair.merges(db) and db.info().total.compacted >= count


def hold_back(db: ts.Database) -> None:
    """Keep the background from taking a step: when it begins, it waits until it must stop."""
    shard = db.storage.shards[0]
    compact = shard.compact

    def held(*, whole: bool, stop: Callable[[], bool]) -> int:
        wait_until(stop, "an end of the background's compaction")
        return compact(whole=whole, stop=stop)

    shard.compact = held  # type: ignore[method-assign, assignment]


def fill(db: ts.Database, count: int = ENOUGH) -> None:
    """Store many messages, in batches as a gateway sends them."""
    for first in range(0, count, 2_000):
        db.store([Message(f"t/{n % 50}/x", b"%d" % n, f"c{n % 3}") for n in range(first, min(first + 2_000, count))])


def merging(pair: Pair, db: ts.Database) -> ts.Database:
    """Return the database; skip the test if its layout doesn't merge."""
    db.store([Message("first", b"")])
    if not pair.merges(db):
        db.close()
        pytest.skip(f"{pair.layout} keeps what is stored as it is: nothing is compacted")
    return db


class Compaction(Fixtures):
    """Promises about what compaction changes, and what it leaves as it is."""

    @both_durabilities
    def test_readers_beside_writers_and_compactions(self, pair: Pair, directory: Path, durability: str) -> None:
        """Replays and cursors see every message once and in order, while other threads write and compact."""
        with opened(pair, directory / "db", shards=2, durability=durability) as db:
            done = threading.Event()
            prefixes: list[list[MessageId]] = []

            def writers() -> list[MessageId]:
                try:
                    return [id_ for ids in together(partial(write, db, 0), partial(write, db, 1)) for id_ in ids]
                finally:
                    done.set()

            narrow, single, several = Narrow(db, "t/0/1/x"), Stepping(db, 1), Stepping(db, 20)
            stored, *_ = together(
                writers,
                *(partial(again_until, done, work) for work in (db.compact, narrow, single, several)),
                partial(
                    again_until, done, lambda: prefixes.append([id_ for id_, _ in replayed(db, "#", order="time")])
                ),
            )
            whole = replayed(db, "#", order="time")
            assert sorted(stored) == sorted(id_ for id_, _ in whole)
            narrow()
            assert sorted(narrow.seen) == sorted(id_ for id_, message in whole if message.topic == "t/0/1/x")
            for follower in (single, several):
                follower()
                assert sorted(stored) == sorted(id_ for id_, _ in follower.seen)
                check_publishers(follower.seen)
            for before, after in pairwise(prefixes):
                assert set(before) <= set(after) <= set(stored)
            assert (len(stored), []) == ((report := db.verify()).messages, report.damages)

    def test_deletes_beside_compactions(self, pair: Pair, directory: Path) -> None:
        """Beside compactions each message is deleted once, never comes back, and is counted once; all others stay."""
        with opened(pair, directory / "db") as db:
            for number in range(BATCHES):
                db.store(batch(0, number))
            topics = sorted({message.topic for message in db.replay("#")})[:3]
            kept = [id_ for id_, message in replayed(db) if message.topic not in topics]
            cursors = [db.cursor(stream, "#") for stream in db.streams("#")]
            done = threading.Event()

            def delete() -> int:
                deleted = 0
                try:
                    for topic in topics:
                        deleted += db.delete(topic)
                        assert [] == list(db.replay(topic))
                finally:
                    done.set()
                return deleted

            first, second, *_, stored = together(
                delete,
                delete,
                partial(again_until, done, db.compact),
                partial(again_until, done, lambda: list(db.replay("#"))),
                partial(write, db, 1),
            )
            assert BATCHES * 9 - len(kept) == first + second
            assert sorted(kept + stored) == sorted(id_ for id_, _ in replayed(db))
            rest = [id_ for cursor in cursors for id_, _ in drain(db, cursor, 7)[0]]
            assert len(rest) == len(set(rest))
            assert set(rest) <= {*kept, *stored}
            assert len(kept) + len(stored) == db.info().messages
            assert [] == db.verify().damages

    def test_generations_beside_compactions(self, pair: Pair, directory: Path) -> None:
        """Adding and dropping generations during a compaction disturbs neither."""
        with opened(pair, directory / "db", shards=2) as db:
            done = threading.Event()

            def turn() -> int:
                dropped = 0
                try:
                    for number in range(12):
                        db.store(batch(0, number, 60))
                        db.add_generation()
                        dropped += sum(db.drop_generation(old.number) for old in db.generations()[:-2])
                finally:
                    done.set()
                return dropped

            dropped, *_ = together(turn, *[partial(again_until, done, db.compact)] * 2)
            assert 11 == dropped
            db.compact()
            assert {message.payload for message in batch(0, 11, 60)} == {message.payload for message in db.replay("#")}
            assert (60, []) == ((report := db.verify()).messages, report.damages)

    @requires("checkpoint")
    def test_checkpoints_beside_compactions(self, pair: Pair, directory: Path) -> None:
        """A checkpoint made during a compaction holds all that was stored before it, and cursors are valid in both."""
        with opened(pair, directory / "db", shards=2) as db:
            done, sizes = threading.Event(), []

            def copy() -> None:
                try:
                    for number in range(4):
                        db.store(batch(0, number, 200))
                        saved = [db.read(db.cursor(stream, "#"), 10).cursor for stream in db.streams("#")]
                        before = replayed(db)
                        db.checkpoint(directory / f"copy-{number}")
                        sizes.append((before, saved))
                finally:
                    done.set()

            together(copy, partial(again_until, done, db.compact))
            for number, (before, saved) in enumerate(sizes):
                with ts.open(directory / f"copy-{number}") as other:
                    assert sorted(before) == sorted(replayed(other))
                    assert [] == other.verify().damages
                    for cursor in saved:
                        assert len(drain(other, cursor)[0]) <= len(drain(db, cursor)[0])

    def test_close_beside_a_compaction(self, pair: Pair, directory: Path) -> None:
        """Closing ends a compaction between two steps, with an error, and the next opening finds everything."""
        path = directory / "db"
        for number in range(4):
            db = opened(pair, path)
            for part in range(30):
                db.store(batch(number, part, 40))
            running = begin(partial(again_until, threading.Event(), db.compact))
            wait_until(partial(has_begun, pair, db), "the compaction to begin")
            db.close()
            assert isinstance(running.exception(PATIENCE), ts.DatabaseClosedError)
            if path.exists():
                with ts.open(path) as db:
                    assert (1_200 * (number + 1), []) == ((report := db.verify()).messages, report.damages)

    def test_the_background_compacts(self, pair: Pair, directory: Path) -> None:
        """If background compaction is on, it compacts much stored data without a request, also that of earlier runs."""
        path = directory / "db"
        with merging(pair, opened(pair, path)) as db:
            fill(db)
            list(db.replay("t/7/x"))
            assert 0 == db.info().total.compacted
            if not path.exists():
                return
        with ts.open(path) as db:
            wait_until(partial(has_compacted, pair, db, ENOUGH + 1), "the background to compact everything")
            assert [b"%d" % n for n in range(7, ENOUGH, 50)] == [m.payload for m in db.replay("t/7/x", order="time")]
            fill(db)
            wait_until(partial(has_compacted, pair, db, 2 * ENOUGH + 1), "the background to compact everything")
            assert (2 * ENOUGH + 1, []) == ((report := db.verify()).messages, report.damages)
            assert db.info().compaction_failure is None

    @full
    def test_readers_beside_the_background(self, pair: Pair, directory: Path) -> None:
        """A reader beside background compaction sees every message once, in the same order."""
        with merging(pair, opened(pair, directory / "db", auto_compact=True)) as db:
            cursors = [db.cursor(stream, "#") for stream in db.streams("#")]
            fill(db)
            while pair.merges(db):
                rows = replayed(db, "t/3/x")
                assert [b"%d" % n for n in range(3, ENOUGH, 50)] == [message.payload for _, message in sorted(rows)]
                cursors = [db.read(cursor, 10).cursor for cursor in cursors]
            wait_until(partial(has_compacted, pair, db, ENOUGH + 1), "the background to count what it compacted")
            assert ENOUGH + 1 == sum(batch.num_rows for batch in db.replay_arrow("#"))

    @requires("persistent")
    @pytest.mark.parametrize("begun", [False, pytest.param(True, marks=full)])
    def test_close_beside_the_background(self, pair: Pair, directory: Path, begun: bool) -> None:
        """Closing waits at most for the compaction's current step, leaves no thread running, and loses nothing."""
        count, threads = 3 * ENOUGH if begun else ENOUGH, threading.active_count()
        db = merging(pair, opened(pair, directory / "db", auto_compact=True))
        if not begun:
            hold_back(db)
        fill(db, count)
        if begun:
            wait_until(lambda: db.storage.shards[0].counters.compacted, "the background to compact something")
        db.close()
        wait_until(lambda: threading.active_count() <= threads, "the background's threads to end")
        with ts.open(directory / "db", auto_compact=False) as db:
            assert begun or pair.merges(db)
            assert (count + 1, []) == ((report := db.verify()).messages, report.damages)

    def test_a_failure_in_the_background_is_shown(self, pair: Pair, directory: Path) -> None:
        """Background compaction that fails at a damaged message warns, `info` says why, and stores and reads go on."""
        with merging(pair, opened(pair, directory / "db", auto_compact=True)) as db:
            engine = db.storage.shards[0].engine()
            (key, value), *_ = next(engine.scan(DATA, limit=1))
            damage, undo = WriteBatch(), WriteBatch()
            damage.put(DATA, key, value[:-1] + bytes((value[-1] ^ 1,)))
            undo.put(DATA, key, value)
            engine.write(damage)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                fill(db)
                failed = "background compaction failed"  # counting, which reads the message too, reports it as well
                wait_until(lambda: any(failed in str(one.message) for one in told), "the failure to be told")
            assert "shard 0" in str(db.info().compaction_failure)
            with pytest.raises(ts.CorruptionError):
                db.compact()
            later = db.store([Message("later", b"1")]).ids
            assert later == [id_ for id_, _ in replayed(db, "later", later[0].position >> 11)]
            engine.write(undo)
            db.compact()  # perhaps beside the background, which goes on too
            assert (ENOUGH + 2, []) == ((report := db.verify()).messages, report.damages)
