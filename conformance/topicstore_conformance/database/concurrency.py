"""Tests of a database used by several threads: visibility, generations, and close during other calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import topicstore as ts
from topicstore import Message

from topicstore_conformance.database.compaction import again_until, opened, write
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.faults.threads import PATIENCE, together
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Concurrency"]

STEPS: tuple[Callable[[ts.Database], Any], ...] = (
    lambda db: list(db.replay("#", batch_size=10)),
    lambda db: list(db.replay_arrow("#")),
    lambda db: db.read(db.cursor(db.streams("#")[0], "#")),
    lambda db: db.store([Message("a", b"y")]),
)
"""The calls that other threads repeat while a database is being closed."""


class Concurrency(Fixtures):
    """Tests of a database used by several threads."""

    @both_durabilities
    def test_what_was_stored_is_seen_at_once(self, pair: Pair, directory: Path, durability: str) -> None:
        """A thread that stored a message reads it with its next replay, while other threads store and flush."""
        with pair.open(directory / "db", durability=durability) as db:

            def work(writer: int) -> None:
                for number in range(40):
                    payload = b"%d/%d" % (writer, number)
                    (id_,) = db.store([Message(f"t/{writer}", payload, "c")]).ids
                    assert id_.position <= db.storage.shards[0].writer.watermark
                    assert [payload] == [message.payload for message in db.replay(f"t/{writer}")][-1:]

            def flush() -> None:
                for _ in range(100):
                    db.flush()

            together(*(lambda w=w: work(w) for w in range(3)), flush)

    @both_durabilities
    def test_generations_beside_writers(self, pair: Pair, directory: Path, durability: str) -> None:
        """Adding and dropping generations while other threads store, read and compact loses no other message."""
        with opened(pair, directory / "db", shards=2, durability=durability) as db:
            done = threading.Event()

            def turn() -> int:
                dropped = 0
                try:
                    for _ in range(15):
                        number = db.add_generation()
                        if number % 3 == 0:
                            dropped += sum(db.drop_generation(old.number) for old in db.generations()[:-2])
                finally:
                    done.set()
                return dropped

            def look() -> None:
                numbers = [info.number for info in db.generations()]
                assert sorted(set(numbers)) == numbers
                assert db.info().messages >= 0
                assert all(stream.number >= 0 for stream in db.streams("#"))
                assert [] == db.verify().damages
                db.delete("t/none/such")
                with contextlib.suppress(ts.GenerationDroppedError):
                    list(db.replay("#"))

            works = [partial(again_until, done, work) for work in (look, db.compact, db.compact)]
            first, second, dropped, *_ = together(partial(write, db, 0), partial(write, db, 1), turn, *works)
            assert 16 - len(db.generations()) == dropped > 0
            db.compact()
            left = {id_ for id_, _ in replayed(db)}
            assert left <= {*first, *second}
            assert (len(left), []) == ((report := db.verify()).messages, report.damages)
            assert len(left) == db.info().messages

    @both_durabilities
    def test_close_while_others_work(self, pair: Pair, directory: Path, durability: str) -> None:
        """Closing makes concurrent reads and writes raise DatabaseClosedError, and releases the directory's lock."""
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
