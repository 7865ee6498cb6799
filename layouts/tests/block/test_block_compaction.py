"""Tests of compaction: when and how much it merges, long names, large payloads, and damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.engine import DATA, INDEX
from topicstore.contract.layout import CompactStep
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.oracle.checks import drain
from topicstore_layouts.block import compaction
from topicstore_layouts.block.segments import Segment, Segments
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.shared import name_table

LONG = "l/" + "x" * 60
TOPICS = ["a", "b", "a/b", "a/c", "$x/a", "$y/a", "/", "//", LONG, *(f"t/{n}/{k}" for n in range(6) for k in "uv")]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """Open a database that compacts only on request."""
    with ts.open(tmp_path / "db", backend="memory", auto_compact=False) as opened:
        yield opened


def slab_of(db: ts.Database, generation: int = 1) -> BlockSlab:
    found = db.storage.shards[0].generations.slab(generation)
    assert isinstance(found, BlockSlab)
    return found


def segments_of(db: ts.Database, generation: int = 1) -> list[Segment]:
    engine = db.storage.shards[0].writer.open_engine()
    return list(Segments(engine, 0, generation).between(engine, 0, 2**64 - 1))


def numbered(start: int, rows: int, topics: list[str] = TOPICS, size: int = 8) -> list[Message]:
    """Return messages whose payloads are consecutive numbers."""
    return [Message(topic_of(n, topics), n.to_bytes(size, "big"), "c") for n in range(start, start + rows)]


def topic_of(number: int, topics: list[str]) -> str:
    """Return the topic of a numbered message; all topics occur, in an order that rarely repeats."""
    return topics[(number * number + number // 5) % len(topics)]


def numbers(messages: list[Message]) -> list[int]:
    return [int.from_bytes(message.payload, "big") for message in messages]


def everything(db: ts.Database) -> list[int]:
    """Return the sorted numbers of all messages, including those whose topics begin with ``$``."""
    cursor = db.storage.begin(0, db.storage.shards[0].generations.current, 0, ts.TopicFilter("#"), 0)
    found = [message for _, message in drain(db, cursor)[0]]
    return sorted(numbers([*found, *db.replay("$x/#"), *db.replay("$y/#")]))


# --- when and how much is merged -----------------------------------------------------


def steps_of(db: ts.Database, *, whole: bool) -> Iterator[CompactStep]:
    """Commit and yield the steps of a compaction."""
    shard = db.storage.shards[0]
    for step in slab_of(db).compact(shard.writer.watermark, whole=whole):
        shard.writer.open_engine().write(step.write)
        yield step


@pytest.mark.usefixtures("tiny_blocks")
def test_nothing_is_done_for_little(db: ts.Database) -> None:
    """A few messages are merged only if the compaction is ``whole``, and the next compaction finds nothing to do."""
    assert 0 == db.storage.shards[0].rewriter.compact(whole=False) == db.compact().messages
    db.store(numbered(0, 24, ["a"]))
    assert 0 == db.storage.shards[0].rewriter.compact(whole=False)
    assert (24, 24) == (db.storage.shards[0].rewriter.backlog(), db.compact().messages)
    assert (0, 0) == (db.storage.shards[0].rewriter.backlog(), db.compact().messages)
    db.store(numbered(24, 20, ["a"]))
    assert 0 == db.storage.shards[0].rewriter.compact(whole=False)
    db.store(numbered(44, 5, ["a"]))
    assert 49 == db.storage.shards[0].rewriter.compact(
        whole=False
    )  # the existing segment is merged again, because both fit into one segment
    db.store(numbered(49, 26, ["a"]))
    assert 26 == db.storage.shards[0].rewriter.compact(whole=False)
    assert [49, 26] == [segment.messages for segment in segments_of(db)]
    assert list(range(75)) == everything(db)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(
    ("most", "size", "blocks", "times"),
    [(1, 8, 6, 5.0), (20, 8, 99, 2.0), (20, 9_000, 99, 2.0)],
)
def test_each_message_is_rewritten_a_few_times(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch, most: int, size: int, blocks: int, times: float
) -> None:
    """Each message is rewritten at most twice, unless batches are so small that one step merges too few messages."""
    monkeypatch.setattr(compaction, "MOST_BLOCKS", blocks)
    source, stored, rewritten = random.Random(most), 0, 0
    while stored < 1_500:
        rows = source.randint(1, most)
        db.store(numbered(stored, rows, size=size))
        stored += rows
        rewritten += db.storage.shards[0].rewriter.compact(whole=False)
    assert stored <= rewritten + compaction.WORTH_ROWS + most <= times * stored
    assert db.storage.shards[0].rewriter.backlog() < compaction.WORTH_ROWS
    assert list(range(stored)) == everything(db)


@pytest.mark.usefixtures("tiny_blocks")
def test_a_payload_that_fits_nowhere_holds_nothing_up(db: ts.Database) -> None:
    """A payload larger than a segment becomes a segment of its own, and the messages before it are merged."""
    for number in range(12):
        db.store(numbered(number, 1, ["a"], size=210_000 if number % 3 == 2 else 8))
    assert 12 - 0 == db.storage.shards[0].rewriter.compact(whole=False)
    assert [2, 1, 2, 1, 2, 1, 2, 1] == [segment.messages for segment in segments_of(db)]
    assert list(range(12)) == everything(db)


@pytest.mark.usefixtures("tiny_blocks")
def test_segments_that_became_small_are_joined(db: ts.Database) -> None:
    """A full compaction joins adjacent segments that deletes made small, and the next one changes nothing."""
    for start in range(0, 400, 10):
        db.store(numbered(start, 10))
    db.compact()
    before = segments_of(db)
    assert [50] * 8 == [segment.messages for segment in before]
    for topic in ("t/+/+", "a/+", "$x/#"):
        db.delete(topic)
    assert 0 == db.storage.shards[0].rewriter.compact(whole=False)
    left = everything(db)
    small = [segment.messages for segment in segments_of(db)]
    assert 0 < len(left) == sum(small) < 200
    db.compact()
    joined = segments_of(db)
    assert [segment.messages for segment in joined] == grouped(small)
    assert (before[0].base, before[-1].end) == (joined[0].base, joined[-1].end)
    assert left == everything(db)
    assert (0, True) == (db.compact().messages, db.verify().ok)


def grouped(sizes: list[int]) -> list[int]:
    """Join adjacent sizes from the left as long as their sum fits into a segment."""
    groups: list[int] = []
    for size in sizes:
        if groups and groups[-1] + size <= compaction.SEGMENT_ROWS:
            groups[-1] += size
        else:
            groups.append(size)
    return groups


@pytest.mark.usefixtures("tiny_blocks")
def test_emptied_segments_are_gone(db: ts.Database) -> None:
    """A segment whose messages were all deleted leaves nothing stored, and later messages are merged as usual."""
    db.store(numbered(0, 200))
    db.compact()
    for topic in ("t/#", "#", "$x/#", "$y/#"):
        db.delete(topic)
    engine = db.storage.shards[0].writer.open_engine()
    assert [[], []] == [list(engine.scan(keyspace)) for keyspace in (DATA, INDEX)]
    assert (0, 0) == (slab_of(db).info().details["merged messages"], db.info().messages)
    db.store(numbered(200, 30))
    db.compact()
    assert list(range(200, 230)) == everything(db)
    assert db.verify().ok


@pytest.mark.usefixtures("tiny_blocks")
def test_a_sealed_generation_is_merged_too(db: ts.Database) -> None:
    """A sealed generation is compacted as well, separately from the current one."""
    db.store(numbered(0, 70))
    db.add_generation()
    db.store(numbered(70, 70))
    assert 140 == db.storage.shards[0].rewriter.backlog()
    db.compact()
    assert 0 == db.storage.shards[0].rewriter.backlog()
    assert [70, 70] == [sum(segment.messages for segment in segments_of(db, number)) for number in (1, 2)]
    assert list(range(140)) == sorted(numbers([*db.replay("#"), *db.replay("$x/#"), *db.replay("$y/#")]))
    assert db.verify().ok


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("first", range(40, 51))
def test_a_batch_is_never_cut(db: ts.Database, first: int) -> None:
    """Compaction never splits a batch, so that segments don't overlap, even if the batch has several blocks."""
    db.store(numbered(0, first, ["a"]))
    db.store([*numbered(first, 4, ["b"]), *numbered(first + 4, 20, ["c", "d"])])
    db.storage.shards[0].rewriter.compact(whole=False)
    assert (list(range(first + 24)), True) == (everything(db), db.verify().ok)
    db.compact()
    assert [first, 24] == [segment.messages for segment in segments_of(db)]
    assert (list(range(first + 24)), True) == (everything(db), db.verify().ok)


@pytest.mark.slow
def test_steps_of_many_small_batches(db: ts.Database) -> None:
    """Ten thousand batches of one message are merged in a few steps, each of a bounded number of blocks."""
    for start in range(10_000):
        db.store(numbered(start, 1))
    assert [compaction.MOST_BLOCKS, 10_000] == [step.messages for step in steps_of(db, whole=True)]
    assert [10_000] == [segment.messages for segment in segments_of(db)]
    assert list(range(10_000)) == everything(db)


def test_steps_of_large_payloads(db: ts.Database) -> None:
    """A step merges a bounded number of bytes or a single message, and frames of large payloads have few rows."""
    source = random.Random(1)
    sizes = [5 << 20] * 14 + [40 << 20] + [1 << 20] * 9 + [100_000] * 60
    for number, size in enumerate(sizes):
        db.store([Message(f"t/{number % 3}", number.to_bytes(8, "big") + source.randbytes(size - 8), "c")])
    for step in steps_of(db, whole=True):
        assert step.write.size <= compaction.SEGMENT_BYTES + 100_000 or step.messages == 1
    for segment in segments_of(db):
        assert segment.raw_bytes <= compaction.SEGMENT_BYTES or segment.messages == 1
        assert all(rows == 1 or rows <= 4 for rows in segment.rows)
    assert list(range(len(sizes))) == sorted(int.from_bytes(m.payload[:8], "big") for m in db.replay("#"))
    assert [40 << 20] == [len(m.payload) for m in db.replay("#") if len(m.payload) > 5 << 20]


def test_steps_of_long_names(db: ts.Database) -> None:
    """Long names count towards the bytes of a segment, and a repeated name counts once."""
    padding = "x" * 60_000
    for start in range(0, 800, 20):
        db.store([Message(f"{n}/{padding}", b"", "c") for n in range(start, start + 20)])
    for start in range(0, 400, 40):
        db.store([Message(f"{n % 25}/{padding}", b"", "c") for n in range(start, start + 40)])
    assert [540, 660] == [step.messages for step in steps_of(db, whole=True)]
    assert all(segment.raw_bytes <= compaction.SEGMENT_BYTES for segment in segments_of(db))
    assert 17 == len(list(db.replay(f"3/{padding}")))
    assert 1_200 == len(list(db.replay("#")))
    assert db.verify().ok


# --- names beyond the dictionary -----------------------------------------------------


@pytest.mark.slow
def test_200000_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics beyond the dictionary's bound of memory are found by name and by filter, before and after a compaction."""
    monkeypatch.setattr(name_table, "MOST_BYTES", 12 << 20)
    topics = [f"f/{number % 50}/{number}" for number in range(200_000)]
    with ts.open(tmp_path / "db", backend="memory", auto_compact=False) as db:
        for start in range(0, len(topics), 8_000):
            db.store([Message(topic, topic.encode(), topic) for topic in topics[start : start + 8_000]])
        for _ in range(2):
            check_topics(db, topics)
            db.compact()
        assert all(0 < len(table) < 200_000 for table in (slab_of(db)._topics, slab_of(db)._clients))
        assert sum(len(segment.rows) for segment in segments_of(db)) < 400


def check_topics(db: ts.Database, topics: list[str]) -> None:
    for number in (0, 99_999, 199_999):
        assert [topics[number].encode()] == [message.payload for message in db.replay(topics[number])]
    assert [topic.encode() for topic in topics[7::50]] == [m.payload for m in db.replay("f/7/+", order="time")]
    assert [] == list(db.replay("f/7/8"))
    assert [(topic, topic) for topic in topics] == [(m.topic, m.client_id) for m in db.replay("#", order="time")]


@pytest.mark.usefixtures("tiny_blocks")
def test_an_exact_topic_that_was_never_stored(db: ts.Database) -> None:
    """A literal topic that was never stored costs no read while the dictionary of topics is known to be complete."""
    db.store([Message("t/1/u", b""), Message("t/1/v", b"")])
    assert (0, 1) == (covered(db, "t/1/w"), covered(db, "t/1/u"))
    db.store([Message(LONG, b"1")])
    assert (1, 1) == (covered(db, LONG), len(list(db.replay(LONG))))
    db.store([Message(f"t/{number}/{number}", b"") for number in range(30)])
    db.store([Message("t/late/1", b"2")])
    assert (1, [b"2"]) == (covered(db, "t/late/1"), [m.payload for m in db.replay("t/late/1")])
    assert [] == list(db.replay("t/late/2"))
    db.compact()
    assert [b"2"] == [m.payload for m in db.replay("t/late/1")]
    assert [b"1"] == [m.payload for m in db.replay(LONG)]


def covered(db: ts.Database, text: str) -> int:
    return len(slab_of(db).cover(ts.TopicFilter(text)))


# --- merges that fail ----------------------------------------------------------------


@pytest.mark.usefixtures("tiny_blocks")
def test_a_merge_that_comes_to_damage(db: ts.Database) -> None:
    """A merge that finds damage raises an error and changes nothing, and readers still report the damage."""
    for start in range(0, 40, 10):
        db.store(numbered(start, 10, ["a"]))
    shard = db.storage.shards[0]
    engine = shard.writer.open_engine()
    key, value = next(iter(engine.scan(DATA)))[1]
    put(engine, DATA, {key: value[:-1] + bytes((value[-1] ^ 1,))})
    for _ in range(2):
        with pytest.raises(ts.CorruptionError, match=f"block that ends at position {key[2]}"):
            db.compact()
        with pytest.raises(ts.CorruptionError, match=f"block that ends at position {key[2]}"):
            list(db.replay("#"))
    put(engine, DATA, {key: value})
    assert 40 == db.compact().messages
    assert list(range(40)) == everything(db)
