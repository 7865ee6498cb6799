"""Reverse replays: how few older messages they read, and the effects of `limit`, `start` and `until`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.storage.reading.pages import ReplayPlace
from topicstore_conformance.faults.clock import Clock
from topicstore_layouts.block import compaction, newest, writing

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
    """A replay raises if a generation is dropped before the replay has read it, and otherwise continues."""
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


@pytest.mark.parametrize("merged", [False, True])
def test_few_rows_of_large_batches_are_read(tmp_path: Path, merged: bool) -> None:
    """A reverse replay for ten of 40,000 messages reads few others, in few blocks, if each batch has 10,000."""
    how: dict[str, Any] = {"backend": "memory", "layout": "block", "shards": 1, "clock": lambda: START}
    with ts.open(tmp_path / "db", mode="x", auto_compact=False, **how) as db:
        for number in range(4):
            db.store([ts.Message(f"a/{n % 3_000}/{n % 3}", b"%d" % number, f"c{n % 97}") for n in range(10_000)])
        if merged:
            db.compact()
        for text, rows, blocks in (("#", 100 if merged else 10, 20), ("a/+/1", 100, 20), ("a/7/1", 16, 12)):
            expected = list(db.replay(text))[:-11:-1]
            before = db.info().total.read_messages, visited(db)
            assert expected == list(db.replay(text, reverse=True, limit=10))
            assert 10 <= db.info().total.read_messages - before[0] <= rows
            assert 0 < visited(db) - before[1] <= blocks


def visited(db: ts.Database) -> int:
    """Return the number of blocks that reads have decoded."""
    return sum(slab.counters.visited for shard in db.storage.shards for _, slab in shard.generations.with_slabs())


TOPICS = ["a/1", "a/2", "a/3/x", "b", "rare"]
ROWS = st.lists(st.tuples(st.sampled_from([*TOPICS, *TOPICS[:3] * 3]), st.integers(0, 3)), min_size=1, max_size=40)
STEPS = st.lists(
    st.tuples(st.just("store"), st.integers(0, 5 * SECOND) | st.just(0), ROWS)
    | st.tuples(st.sampled_from(["compact", "add_generation", "delete"])),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("layout", ["block", "reference", "skipstream", "wildcard_optimized"])
@given(data=st.data(), steps=STEPS, shards=st.integers(1, 3), timestamps=st.sampled_from(["commit", "message"]))
def test_backwards_is_forwards_reversed(
    layout: str, data: st.DataObject, steps: list[Any], shards: int, timestamps: ts.Timestamps
) -> None:
    """A reverse replay yields a forward replay's messages in reverse, for any limit, range of times, page and order."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patches, TemporaryDirectory() as directory:
        for module, values in TINY.items():
            for name, value in values.items():
                patches.setattr(module, name, value)
        how: dict[str, Any] = {"backend": "memory", "clock": clock, "monotonic": clock.monotonic}
        with ts.open(
            Path(directory, "db"), layout=layout, shards=shards, timestamps=timestamps, auto_compact=False, **how
        ) as db:
            for what, *arguments in steps:
                act(db, clock, what, *arguments)
            clock.now += 60 * SECOND
            text = data.draw(st.sampled_from(["#", "a/#", "a/+", "a/1", "rare"]))
            by = data.draw(st.sampled_from(["position", "timestamp"]))
            limit, batch_size = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([1, 5, 30, 4_096]))
            whole = ids(db.replay_arrow(text, order="time", ids=True))[::-1]
            asked: dict[str, Any] = {"by": by, "batch_size": batch_size, "ids": True, "reverse": True}
            assert whole == ids(db.replay_arrow(text, **asked))
            assert whole[:limit] == ids(db.replay_arrow(text, limit=limit, **asked))
            middle = whole[len(whole) // 2][2] if whole else 0
            for start, until in ((0, middle), (middle, None), (middle, middle + 1)):
                between = ids(db.replay_arrow(text, start, until, by=by, order="time", ids=True))[::-1]
                assert between[:limit] == ids(db.replay_arrow(text, start, until, limit=limit, **asked))
            place, paged = ReplayPlace.beginning(db.storage, text, 0, None, by=by, reverse=True), []
            while batch := next(place.batches(db.storage, limit), None):
                paged += ids([batch.to_arrow(ids=True)])
                place = place.after(batch)
            assert whole == paged


TINY: dict[Any, dict[str, int]] = {
    writing: {"_SPLIT_ROWS": 3, "_MOST_ROWS": 30},
    compaction: {"SEGMENT_ROWS": 50, "FRAME_ROWS": 8, "WORTH_ROWS": 25},
    newest: {"_LOOKED_AT": 40, "_KEPT": 2, "_FEW_FRAMES": 2, "_WHOLE": 30},
}
"""Values with which a few messages fill several blocks, frames and segments."""


def act(db: ts.Database, clock: Clock, what: str, later: int = 0, rows: list[tuple[str, int]] | None = None) -> None:
    """Advance the clock by ``later``, then store ``rows``, delete a topic, or call the database's method ``what``."""
    clock.now += later
    if what == "store":
        timed = db.manifest.timestamps == "message"
        made = enumerate(rows or ())
        db.store([ts.Message(t, b"%d" % n, f"c{c}", timestamp=clock.now if timed else None) for n, (t, c) in made])
    elif what == "delete":
        db.delete("a/2")
    else:
        getattr(db, what)()


def ids(batches: Any) -> list[tuple[int, int, int, str]]:
    """Return the position, shard, time and topic of each row."""
    return [
        (row["position"], row["shard"], round(row["timestamp"].timestamp() * SECOND), row["topic"])
        for batch in batches
        for row in batch.to_pylist()
    ]
