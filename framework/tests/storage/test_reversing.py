"""Reverse replays: how few older messages they read, and the effects of `limit`, `start` and `until`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.faults.clock import Clock

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


def filled(path: Path, often: int) -> ts.Database:
    """Return a database of 40 hours, with a message every six minutes, and occasionally one of a rare topic."""
    now = [START]
    how: dict[str, Any] = {"backend": "memory", "layout": "reference", "shards": 2, "clock": lambda: now[0]}
    db = ts.open(path, mode="x", auto_compact=False, **how)  # background counting would also read messages
    for number in range(400):
        now[0] += 360 * SECOND
        rare = [ts.Message("rare/x", b"%d" % number, "r")] if number % 50 == 0 else []
        db.store([*rare, *(ts.Message(f"often/{n}", b"%d" % number, f"c{n % 9}") for n in range(often))])
    return db


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """A database of 100,000 messages, which tests only read."""
    with filled(tmp_path_factory.mktemp("often") / "db", 250) as db:
        yield db


def messages_read(db: ts.Database) -> int:
    return sum(shard.counters.read_messages for shard in db.info().shards)


def test_hardly_more_is_read_than_is_asked_for(db: ts.Database) -> None:
    """The newest ten of 100,000 messages are found by reading at most 1,000."""
    before = messages_read(db)
    assert [b"399"] * 10 == [m.payload for m in db.replay("#", reverse=True, limit=10)]
    assert 10 <= messages_read(db) - before <= 1_000


def test_of_many_messages_at_one_time_no_more_are_held_than_that(db: ts.Database) -> None:
    """If more messages than a batch holds have one time, a reverse replay returns them all, in several batches."""
    got = list(db.replay_arrow("#", reverse=True, limit=1_000, batch_size=7))
    assert 1_000 == sum(batch.num_rows for batch in got)
    assert 7 == max(batch.num_rows for batch in got)
    forward = [message.topic for message in db.replay("#", order="time")]
    assert forward[:-1_001:-1] == [topic for batch in got for topic in batch.column("topic").to_pylist()]


def test_a_generation_that_is_dropped_meanwhile_is_missed(tmp_path: Path) -> None:
    """A replay raises if a generation is dropped before the replay has read it, and otherwise goes on."""
    with filled(tmp_path / "db", 9) as db:
        db.add_generation()
        db.store([ts.Message("rare/x", b"between", "r")])
        db.add_generation()
        db.store([ts.Message("rare/x", b"last", "r")])
        going_back = db.replay("rare/#", reverse=True, batch_size=1)
        assert [b"last", b"between"] == [next(going_back).payload for _ in range(2)]
        assert b"350" == next(going_back).payload
        db.drop_generation(2)
        assert b"300" == next(going_back).payload
        db.drop_generation(1)
        with pytest.raises(ts.GenerationDroppedError):
            list(going_back)


@pytest.mark.parametrize("reverse", [False, True])
def test_bounds(db: ts.Database, reverse: bool) -> None:
    """`limit` may be 0 or exceed the number of messages; `start` and `until` apply; invalid values raise at once."""
    assert [] == list(db.replay("#", reverse=reverse, limit=0))
    assert 8 == len(list(db.replay("rare/x", reverse=reverse, limit=10**9)))
    some = list(db.replay("rare/x", START, START + 101 * 360 * SECOND, reverse=reverse, limit=2))
    assert ([b"50", b"0"] if reverse else [b"0", b"50"]) == [message.payload for message in some]
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(ts.InvalidArgumentError, match="limit"):
            db.replay("#", reverse=reverse, limit=wrong)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgumentError, match="batch_size"):
        db.replay("#", reverse=reverse, limit=1, batch_size=0)


def test_an_empty_database_has_no_newest_message(tmp_path: Path) -> None:
    """A reverse replay of an empty database, or of one whose messages were deleted, yields nothing."""
    with ts.open(tmp_path / "db", mode="x", backend="memory", layout="reference") as db:
        assert [] == list(db.replay("#", reverse=True))
        db.store([ts.Message("a", b"")])
        db.delete("#")
        assert [] == list(db.replay("#", reverse=True, limit=1))


def test_where_the_messages_are_is_known_without_looking_for_it(tmp_path: Path) -> None:
    """A reverse replay with `until` reads few messages, even if years without messages follow.

    That holds for positions and for timestamps.
    """
    clock = Clock()
    with ts.open(tmp_path / "db", backend="memory", clock=clock, monotonic=clock.monotonic, auto_compact=False) as db:
        began = clock.now
        for number in range(200):
            clock.now += SECOND
            db.store([ts.Message("a", b"%d" % number, "c", timestamp=START + number) for _ in range(1_000)])
        for year in range(1, 9):
            clock.now += 365 * 86_400_000_000
            db.store([ts.Message("a", b"late", "c", timestamp=START + 1_000 * year)])
        half = began + 100 * SECOND
        for asked, most in (({"until": half}, 4_000), ({"until": START + 100, "by": "timestamp"}, 65_536)):
            forward = [message.payload for message in db.replay("#", **asked)]
            before = db.info().total.read_messages
            got = [message.payload for message in db.replay("#", reverse=True, limit=1_000, **asked)]
            assert forward[:-1_001:-1] == got
            assert db.info().total.read_messages - before <= most
