"""Promises about threads: readers see a growing prefix, writers never share an id, and nothing gets stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, together
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
