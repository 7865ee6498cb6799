"""Tests of compaction concurrent with reads, writes, deletes, checkpoints and close: no message is lost or changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.database.following import Follower, Replayer
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, together, wait_until
from topicstore_conformance.oracle.checks import drain, replayed
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Compaction", "again_until", "opened", "write"]
BATCHES = tries(16, 40)
"""The number of batches of each writer."""


def batch(writer: int, number: int, size: int = 9) -> list[Message]:
    """Return the messages of one batch, with several topics and publishers."""
    return [
        Message(f"t/{writer}/{(number + n) % 4}/x", b"%d/%d/%d" % (writer, number, n), f"w{writer}-{n % 2}")
        for n in range(size)
    ]


def opened(pair: Pair, path: Path, **arguments: object) -> ts.Database:
    """Return a new database that is compacted only on request."""
    return pair.open(path, options={pair.layout: pair.small()}, **{"auto_compact": False, **arguments})


def again_until(done: threading.Event, work: Callable[[], object]) -> int:
    """Call ``work`` repeatedly until the event is set, and once more afterwards; return the number of calls."""
    times, last = 0, False
    while not last:
        last = done.wait(MOMENT)
        work()
        times += 1
    return times


def write(db: ts.Database, writer: int) -> list[MessageId]:
    """Store one writer's batches and return their message ids."""
    return [id_ for number in range(BATCHES) for id_ in db.store(batch(writer, number)).ids]


def has_begun(pair: Pair, db: ts.Database) -> bool:
    """Return whether a compaction has made progress, or has nothing to do."""
    return bool(db.storage.shards[0].writer.counters.compacted) or not pair.merges(db)


class Compaction(Fixtures):
    """Tests of compaction concurrent with other calls."""

    @both_durabilities
    def test_readers_beside_writers_and_compactions(self, pair: Pair, directory: Path, durability: str) -> None:
        """Replays and cursors see every message once and in order, while other threads write and compact."""
        with opened(pair, directory / "db", shards=2, durability=durability) as db:
            done = threading.Event()
            replayers, followers = [Replayer("#"), Replayer("t/0/1/x")], {1: Follower(), 20: Follower()}

            def writers() -> list[MessageId]:
                try:
                    return [id_ for ids in together(partial(write, db, 0), partial(write, db, 1)) for id_ in ids]
                finally:
                    done.set()

            stored, *_ = together(
                writers,
                partial(again_until, done, db.compact),
                *(partial(again_until, done, partial(replayer.read, db)) for replayer in replayers),
                *(partial(again_until, done, partial(each.read, db, limit)) for limit, each in followers.items()),
            )
            whole = replayed(db)
            assert len(stored) == len(set(stored)) == 2 * BATCHES * 9
            assert sorted(stored) == sorted(id_ for id_, _ in whole)
            for replayer in replayers:
                replayer.read(db)
                wanted = {id_ for id_, message in whole if match(replayer.topic_filter, message.topic)}
                assert wanted == set(replayer.seen)
            for follower in followers.values():
                follower.read(db)
                assert set(stored) == follower.ids
                follower.check_order(db)
            assert (len(stored), []) == ((report := db.verify()).messages, report.damages)

    def test_deletes_beside_compactions(self, pair: Pair, directory: Path) -> None:
        """During compactions each deleted message is counted once and never reappears, and all others stay."""
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

    @requires("checkpoint")
    def test_checkpoints_beside_compactions(self, pair: Pair, directory: Path) -> None:
        """A checkpoint made during a compaction holds all earlier messages, and earlier cursors are valid in it."""
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
        """Closing ends a compaction between two steps, with an error, and the next opening finds all messages."""
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
                with pair.reopen(path) as db:
                    assert (1_200 * (number + 1), []) == ((report := db.verify()).messages, report.damages)
