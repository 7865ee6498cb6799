"""Topic counts in memory: correct after every change of the database, and updated by reading few messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import topicstore as ts
from topicstore.contract.topics import TopicFilter
from topicstore.shard.tally_records import Tally
from topicstore.shard.tally_tables import TallyTables
from topicstore.storage.counting import contents as topic_counts
from topicstore.storage.counting import counting
from topicstore.storage.counting.contents import Levels

RANGE = 100


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ts.Database]:
    """A database of two shards with tally tables of a hundred messages."""
    monkeypatch.setattr(counting, "RANGE", RANGE)
    with ts.open(tmp_path / "db", backend="memory", layout="skipstream", shards=2, auto_compact=False) as db:
        yield db


def store(db: ts.Database, begin: int, end: int) -> None:
    db.store([ts.Message(f"f/{n % 7}/{n % 40}", b"%d" % n, f"c{n % 10}") for n in range(begin, end)])


def count(db: ts.Database) -> None:
    for shard in db.storage.shards:
        counting.count(db.storage, shard)


def check(db: ts.Database) -> None:
    """Compare the counts with those of a replay of all messages."""
    held = Counter(message.topic for message in db.replay("#"))
    assert dict(held) == {one.topic: one.messages for one in db.topics()}


def messages_read(db: ts.Database) -> int:
    return db.info().total.read_messages


def test_only_what_was_stored_since_is_read(db: ts.Database) -> None:
    """`topics` reads only messages that were stored after the last call or after the last tally table."""
    store(db, 0, 2_000)
    check(db)
    for begin in range(2_000, 4_000, 50):
        store(db, begin, begin + 50)
        before = messages_read(db)
        db.topics()
        db.topics("f/1/#")
        assert messages_read(db) - before == 50
    count(db)
    before = messages_read(db)
    db.topics()
    assert messages_read(db) - before < 2 * RANGE  # the messages of each shard after its last table
    before = messages_read(db)
    db.topics()
    assert messages_read(db) == before
    check(db)


def test_tables_are_read_once(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tally tables are read once; when later tables are written, the counts in memory are updated directly."""
    store(db, 0, 3_000)
    count(db)
    db.topics()
    gathered: list[int] = []
    gather = TallyTables.gather

    def gather_and_count(self: TallyTables, generation: int, *more: Any) -> Any:
        gathered.append(generation)
        return gather(self, generation, *more)

    monkeypatch.setattr(TallyTables, "gather", gather_and_count)
    for begin in range(3_000, 20_000, 1_000):
        store(db, begin, begin + 1_000)
        count(db)
    before = messages_read(db)
    db.topics()
    assert gathered == []
    assert messages_read(db) - before < 2 * RANGE
    monkeypatch.undo()
    check(db)


def test_what_is_deleted_or_dropped_is_not_counted(db: ts.Database) -> None:
    """Deleted and dropped messages aren't counted, even if a tally table counted them between two calls of `topics`."""
    store(db, 0, 1_000)
    db.topics()
    store(db, 1_000, 2_000)
    count(db)
    assert db.delete("f/3/#")
    check(db)
    db.add_generation()
    store(db, 2_000, 2_500)
    check(db)
    count(db)
    db.drop_generation(1)
    check(db)
    assert db.topics()


def test_counts_of_too_many_topics_are_not_kept(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are too many topics, counts aren't kept in memory, and each call counts again."""
    monkeypatch.setattr(topic_counts, "MOST_TOPICS", 10)
    store(db, 0, 1_000)
    check(db)
    before = messages_read(db)
    db.topics()
    assert messages_read(db) - before == 1_000
    check(db)


def test_matching_many_topics_at_once_is_matching_each() -> None:
    """Matching all topics at once gives the same result as matching each, even with similar names and parent topics."""
    levels = ["a", "b", "$x", "a-", "", "a\n"]
    topics = sorted({"a", "$x", *(f"{one}/{two}" for one in levels for two in levels), "a/b/a", "a/b/b", "/", "b//a"})
    filters = ["#", "a", "a/#", "a/b/#", "+", "+/a", "+/+/#", "a/+", "a/+/b", "$x/#", "$x/+", "/#", "/+", "zz/#", "b/#"]
    for left_out in (None, "a", "a/b"):
        there = [topic for topic in topics if topic != left_out]
        for text in filters:
            wanted = TopicFilter(text)
            assert _tally(there).matching(wanted).tolist() == [wanted.matches(topic) for topic in there], text


@pytest.mark.parametrize("parents", [[], ["a"], ["a", "b"], [""], ["none"]])
def test_levels_have_what_is_below_them(parents: list[str]) -> None:
    """The counts of a topic level equal the sums that are computed topic by topic."""
    topics = sorted(["a", "a/b", "a/b/c", "a/b/d/e", "a-/b", "a-b", "a0", "/x", "/x/y", "b/c", "a/c"])
    levels = Levels.of(_tally(topics), parents)
    begin = [text.split("/") for text in topics if len(text.split("/")) > len(parents)]
    below = [path for path in begin if path[: len(parents)] == parents]
    names = Counter(path[len(parents)] for path in below)
    ends = {path[-1] for path in below if len(path) == len(parents) + 1}
    assert dict(names) == dict(zip(levels.names, levels.topics.tolist(), strict=True))
    assert ends == {name for name, end in zip(levels.names, levels.ends.tolist(), strict=True) if end}
    numbers = dict.fromkeys(names, 0)
    for path in below:
        numbers[path[len(parents)]] += topics.index("/".join(path)) + 1
    assert numbers == dict(zip(levels.names, levels.messages.tolist(), strict=True))


def _tally(topics: list[str]) -> Tally:
    """Return a tally in which topic number n, from 0, has n + 1 messages."""
    rows = np.arange(len(topics), dtype=np.uint64)
    return Tally(topics, [""], rows, np.zeros_like(rows), rows, rows, rows + np.uint64(1), rows)
