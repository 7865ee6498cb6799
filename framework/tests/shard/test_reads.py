"""The points at which cursors and replays end while the database grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.replay_plan import Order
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.oracle.checks import drain


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(clock: Clock) -> Iterator[ts.Database]:
    with ts.open("memory", backend="memory", clock=clock) as opened:
        yield opened


def store(db: ts.Database, *payloads: bytes) -> None:
    db.store([Message("a", payload) for payload in payloads])


def payloads(result: ts.ReadResult) -> list[bytes]:
    return list(result.batch.payloads)


def cursor_of(db: ts.Database, start: int = 0) -> ts.Cursor:
    """Return a cursor of the first stream."""
    return db.cursor(db.streams("#")[0], "#", start)


def test_an_empty_batch_is_not_the_end(db: ts.Database) -> None:
    """A stream that was read to its end continues when something is stored; only sealing its generation ends it."""
    store(db, b"1")
    first = db.read(cursor_of(db))
    assert ([b"1"], False, True) == (payloads(first), first.end_of_stream, first.caught_up)
    empty = db.read(first.cursor)
    assert ([], False, True) == (payloads(empty), empty.end_of_stream, empty.caught_up)
    store(db, b"2")
    second = db.read(empty.cursor)
    assert ([b"2"], False) == (payloads(second), second.end_of_stream)
    db.add_generation()
    end = db.read(second.cursor)
    again = db.read(end.cursor)
    assert [([], True)] * 2 == [(payloads(each), each.end_of_stream) for each in (end, again)]


def test_the_end_comes_with_the_last_message_or_after(db: ts.Database) -> None:
    """In a sealed generation, a cursor reports the end with the last message or after it, and not before."""
    store(db, *(b"%d" % number for number in range(10)))
    db.add_generation()
    cursor, seen, ended = cursor_of(db), [], False
    while not ended:
        result = db.read(cursor, 3)
        seen += payloads(result)
        cursor, ended = result.cursor, result.end_of_stream
        assert not (ended and len(seen) < 10)
    assert [b"%d" % number for number in range(10)] == seen


def test_start_is_inclusive_and_until_exclusive(db: ts.Database, clock: Clock) -> None:
    """A cursor that has read up to `until` is caught up, but its stream ends only after the last message."""
    for number in range(5):
        clock.now = START + number
        store(db, b"%d" % number)
    db.add_generation()
    for start in range(5):
        for until in range(start, 6):
            result = db.read(cursor_of(db, START + start), until=START + until)
            assert [b"%d" % number for number in range(start, min(until, 5))] == payloads(result)
            assert result.caught_up
            assert until >= 5 or not result.end_of_stream
            rows, _, ended = drain(db, result.cursor)
            assert ([b"%d" % n for n in range(until, 5)], True) == ([message.payload for _, message in rows], ended)


def test_a_read_without_time_moves_on(db: ts.Database) -> None:
    """A read with timeout 0 still makes progress, so that repeated reads return every message."""
    for number in range(40):
        db.store([Message(f"t/{number % 2}", b"%02d" % number)])
    for topic_filter, expected in (("t/0", 20), ("no/such", 0), ("#", 40)):
        seen: list[bytes] = []
        for stream in db.streams("#"):
            cursor, caught_up, calls = db.cursor(stream, topic_filter), False, 0
            while not caught_up:
                result = db.read(cursor, timeout=0.0)
                seen += payloads(result)
                assert result.caught_up or result.cursor != cursor
                cursor, caught_up, calls = result.cursor, result.caught_up, calls + 1
            assert calls <= 50
        assert expected == len(seen) == len(set(seen))


def test_saved_cursors_survive_a_restart(tmp_path: Path) -> None:
    """Cursors saved as bytes continue at their position after a restart, in sealed and current generations."""
    with ts.open(tmp_path / "db") as db:
        store(db, b"old 0", b"old 1", b"old 2")
        db.add_generation()
        store(db, b"new 0", b"new 1", b"new 2")
        saved = [db.read(db.cursor(stream, "#"), 2).cursor.to_bytes() for stream in db.streams("#")]
    with ts.open(tmp_path / "db") as db:
        assert [[b"old 2"], [b"new 2"]] == [payloads(db.read(ts.Cursor.from_bytes(each))) for each in saved]


def test_new_streams_appear(db: ts.Database) -> None:
    """Listing streams again also returns those of new topics and generations."""
    store(db, b"1")
    before = db.streams("#")
    db.add_generation()
    db.store([Message("b/c/d", b"2")])
    after = {(stream.shard, stream.generation, stream.number) for stream in db.streams("#")}
    assert {(stream.shard, stream.generation, stream.number) for stream in before} < after
    assert [b"1", b"2"] == [p for stream in db.streams("#") for p in payloads(db.read(db.cursor(stream, "#")))]


@pytest.mark.parametrize("how", [*({"order": order} for order in get_args(Order)), {"reverse": True}], ids=str)
def test_a_replay_ends_at_the_watermark_of_its_call(db: ts.Database, how: dict[str, Any]) -> None:
    """A replay contains no messages that were stored after its call, even before its first item is requested."""
    store(db, *(b"%d" % number for number in range(10)))
    replay, arrow = db.replay("#", batch_size=2, **how), db.replay_arrow("#", batch_size=2, **how)
    store(db, b"later")
    got = 0
    for _ in replay:
        got += 1
        store(db, b"more")
    assert 10 == got == sum(batch.num_rows for batch in arrow)


def test_a_replay_spans_a_generation_added_under_it(db: ts.Database) -> None:
    """A replay of a generation that is sealed meanwhile ends at the same message as without the sealing."""
    store(db, *(b"%d" % number for number in range(6)))
    replay = db.replay("#", batch_size=2)
    assert b"0" == next(replay).payload
    db.add_generation()
    store(db, b"later")
    assert [b"1", b"2", b"3", b"4", b"5"] == [message.payload for message in replay]
