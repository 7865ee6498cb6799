"""Promises about cursors over a database that changes: by writes, deletes, generations and restarts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
import msgspec
import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.replay_plan import Order

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import full, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.oracle.checks import drain, replayed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Cursors"]


def begin(db: ts.Database, topic_filter: str = "#", start: int = 0) -> list[ts.Cursor]:
    """Return a new cursor for every stream of a filter."""
    return [db.cursor(stream, topic_filter, start) for stream in db.streams(topic_filter, start)]


def read(db: ts.Database, cursors: list[ts.Cursor]) -> list[bytes]:
    """Return the payloads that all cursors give, sorted."""
    return sorted(message.payload for cursor in cursors for _, message in drain(db, cursor)[0])


class Cursors(Fixtures):
    """Promises about what cursors return while the database changes."""

    @pytest.fixture
    def clock(self) -> Clock:
        """The clock of `db`."""
        return Clock()

    @pytest.fixture
    def db(self, pair: Pair, directory: Path, clock: Clock) -> Iterator[ts.Database]:
        """A database of the test's pair."""
        with pair.open(directory / "db", options={pair.layout: pair.small()}, clock=clock) as db:
            yield db

    def test_empty_batch_is_not_the_end(self, db: ts.Database) -> None:
        """A stream that was read to its end continues when something is stored; only sealing its generation ends it."""
        db.store([Message("a", b"1")])
        cursor = begin(db)[0]
        rows, cursor, ended = drain(db, cursor)
        assert ([b"1"], False) == ([message.payload for _, message in rows], ended)
        empty = db.read(cursor)
        assert (0, False, True) == (len(empty.batch), empty.end_of_stream, empty.caught_up)
        db.store([Message("a", b"2")])
        rows, cursor, ended = drain(db, empty.cursor)
        assert ([b"2"], False) == ([message.payload for _, message in rows], ended)
        db.add_generation()
        end = db.read(cursor)
        assert (0, True) == (len(end.batch), end.end_of_stream)
        again = db.read(end.cursor)
        assert (0, True) == (len(again.batch), again.end_of_stream)

    def test_end_of_stream_comes_with_the_last_message_or_after(self, db: ts.Database) -> None:
        """In a sealed generation no end is reported while messages are left, and one is reported after them."""
        db.store([Message("a", b"%d" % number) for number in range(10)])
        db.add_generation()
        cursor = begin(db)[0]
        seen, ended = [], False
        while not ended:
            result = db.read(cursor, 3)
            seen += [message.payload for message in result.batch.to_messages()]
            cursor, ended = result.cursor, result.end_of_stream
            assert not (ended and len(seen) < 10)
        assert [b"%d" % number for number in range(10)] == seen

    def test_until_does_not_end_a_sealed_stream_early(self, db: ts.Database, clock: Clock) -> None:
        """A cursor that was read up to a time is caught up there, but not at the end of its stream."""
        for number in range(4):
            db.store([Message("a", b"%d" % number)])
            clock.now += 1_000
        db.add_generation()
        cursor = begin(db)[0]
        result = db.read(cursor, until=START + 2_000)
        assert ([b"0", b"1"], False, True) == (
            [message.payload for message in result.batch.to_messages()],
            result.end_of_stream,
            result.caught_up,
        )
        rows, _, ended = drain(db, result.cursor)
        assert ([b"2", b"3"], True) == ([message.payload for _, message in rows], ended)

    def test_start_inclusive_until_exclusive(self, db: ts.Database, clock: Clock) -> None:
        """A message exactly at the start is returned, one exactly at ``until`` is not."""
        for number in range(5):
            clock.now = START + number
            db.store([Message("a", b"%d" % number)])
        for start in range(5):
            cursor, *_ = begin(db, "a", START + start)
            for until in range(start, 6):
                batch = db.read(cursor, until=START + until).batch
                assert [b"%d" % number for number in range(start, min(until, 5))] == list(batch.payloads)

    def test_timestamp_of_a_message_that_is_read(self, db: ts.Database) -> None:
        """A returned message has its own timestamp, or that of its commit if it had none."""
        db.store([Message("a", b"own", timestamp=12_345), Message("a", b"none")])
        cursor = begin(db)[0]
        assert [12_345, START] == [message.timestamp for _, message in drain(db, cursor)[0]]

    def test_time_limited_next_moves_on(self, db: ts.Database) -> None:
        """Every call of ``next`` advances, even with no time at all, and in the end everything was read."""
        for number in range(40):
            db.store([Message(f"t/{number % 2}", b"%02d" % number)])
        for topic_filter, expected in (("t/0", 20), ("no/such", 0), ("#", 40)):
            seen: list[bytes] = []
            for stream in db.streams("#"):
                cursor, caught_up, calls = db.cursor(stream, topic_filter), False, 0
                while not caught_up:
                    result = db.read(cursor, timeout=0.0)
                    seen += [message.payload for message in result.batch.to_messages()]
                    assert result.caught_up or result.cursor != cursor
                    cursor, caught_up, calls = result.cursor, result.caught_up, calls + 1
                assert calls <= 50
            assert expected == len(seen) == len(set(seen))

    def test_into_a_dropped_generation(self, db: ts.Database) -> None:
        """Cursors into a dropped generation raise, used before or not, and no new one can be made."""
        db.store([Message("a", b"%d" % number) for number in range(5)])
        (stream,) = db.streams("#")
        never = db.cursor(stream, "#")
        once = db.read(never, 1).cursor
        _, ended, _ = drain(db, never)
        db.add_generation()
        db.store([Message("a", b"new")])
        db.drop_generation(1)
        for cursor in (never, once, ended):
            with pytest.raises(ts.GenerationDroppedError):
                db.read(ts.Cursor.from_bytes(cursor.to_bytes()))
        with pytest.raises(ts.GenerationDroppedError):
            db.cursor(stream, "#")
        assert [b"new"] == read(db, begin(db))

    def test_replay_into_a_dropped_generation(self, db: ts.Database) -> None:
        """A replay whose generation is dropped while it runs raises; it doesn't end as if it were complete."""
        db.store([Message("a", b"%d" % number) for number in range(5)])
        db.add_generation()
        db.store([Message("a", b"new")])
        replay = db.replay("#", order="any", batch_size=1)  # in order of time, all of them may be in memory already
        assert b"0" == next(replay).payload
        db.drop_generation(1)
        with pytest.raises(ts.GenerationDroppedError):
            list(replay)

    @requires("persistent")
    def test_survive_restarts_and_drops(self, pair: Pair, directory: Path) -> None:
        """Cursors kept as bytes continue at their place after a restart; those of dropped generations raise."""
        with pair.open(directory / "db") as db:
            db.store([Message("a", b"old %d" % number) for number in range(5)])
            db.add_generation()
            db.store([Message("a", b"new %d" % number) for number in range(5)])
            saved = [db.read(cursor, 2).cursor.to_bytes() for cursor in begin(db)]
        with ts.open(directory / "db") as db:
            rest = [[m.payload for _, m in drain(db, ts.Cursor.from_bytes(each))[0]] for each in saved]
            assert [[b"old 2", b"old 3", b"old 4"], [b"new 2", b"new 3", b"new 4"]] == rest
            db.drop_generation(1)
        with ts.open(directory / "db") as db:
            with pytest.raises(ts.GenerationDroppedError):
                db.read(ts.Cursor.from_bytes(saved[0]))
            assert [b"new 2", b"new 3", b"new 4"] == read(db, [ts.Cursor.from_bytes(saved[1])])

    def test_deleted_messages_never_come_later(self, db: ts.Database) -> None:
        """Cursors on, before and after deleted messages stay valid, and return none of those."""
        db.store([Message(f"t/{number % 3}", b"%03d" % number, "c") for number in range(300)])
        cursors = [db.cursor(stream, "#") for stream in db.streams("#")]
        places = [db.read(cursor, limit).cursor for cursor in cursors for limit in (1, 50, 100, 1000)]
        assert 100 == db.delete("t/1")
        left = {b"%03d" % number for number in range(300) if number % 3 != 1}
        for place in (*cursors, *places):
            assert {message.payload for _, message in drain(db, place, 7)[0]} <= left
        assert sorted(left) == read(db, cursors)
        assert 200 == db.delete("#")
        assert [] == read(db, [*cursors, *places])
        db.store([Message("t/1", b"again", "c")])
        assert [b"again"] == read(db, cursors)
        assert (1, []) == ((report := db.verify()).messages, report.damages)

    @pytest.mark.parametrize(
        "topic_filter", ["#", "t/+/b", *(pytest.param(each, marks=full) for each in ("t/1/a", "t/+/#", "no/such"))]
    )
    def test_survive_compaction(self, pair: Pair, db: ts.Database, topic_filter: str) -> None:
        """Cursors saved before and between compactions and deletes return exactly the rest afterwards."""
        stride = max(1, 120 // tries(12, 40, pair.capabilities))
        for number in range(12):
            db.store([Message(f"t/{n % 5}/{'ab'[n % 2]}", b"%03d" % (number * 10 + n), f"c{n % 2}") for n in range(10)])
        db.replay("#")  # waits until nothing is hidden any more
        streams = db.streams(topic_filter)
        whole = {stream: drain(db, db.cursor(stream, topic_filter))[0] for stream in streams}
        saved = []
        for stream, rows in whole.items():
            cursor = db.cursor(stream, topic_filter)
            for seen in range(len(rows) + 1):
                if seen % stride == 0:
                    saved.append((cursor.to_bytes(), rows[seen:]))
                cursor = db.read(cursor, 1).cursor
        for deleted in (None, "t/2/+", "+/+/a"):
            if deleted is not None:
                db.delete(deleted)
            for _ in range(2):
                left = {id_ for id_, _ in replayed(db)}
                for limit, (data, rest) in enumerate(saved):
                    rows, _, _ = drain(db, ts.Cursor.from_bytes(data), 1 + limit % 9)
                    assert [row for row in rest if row[0] in left] == rows
                db.compact()
        assert [] == db.verify().damages

    def test_cursors_made_by_one_form_and_used_on_another(self, db: ts.Database, clock: Clock) -> None:
        """A consumer that follows with saved cursors gets every message once, compacted or as it was stored."""
        saved: dict[tuple[int, int], bytes] = {}
        seen, expected = [], []
        for number in range(18):
            expected += db.store([Message(f"t/{n}/{number % 3}", b"x", "c") for n in range(7)]).ids
            clock.now += 700
            if number % 4 == 1:
                db.compact()
            if number % 7 == 6:
                db.add_generation()
            for stream in db.streams("#"):
                place = stream.generation, stream.number
                held = saved.get(place)
                cursor = db.cursor(stream, "#") if held is None else ts.Cursor.from_bytes(held)
                result = db.read(cursor, 1 + number % 5)
                seen += result.batch.ids() if len(result.batch) else []
                saved[place] = result.cursor.to_bytes()
        db.replay("#")
        for held in saved.values():
            seen += [id_ for id_, _ in drain(db, ts.Cursor.from_bytes(held))[0]]
        assert sorted(expected) == sorted(seen)

    def test_delete_leaves_what_comes_after_the_call(self, db: ts.Database) -> None:
        """A delete covers the messages that were stored before it; messages stored later under the same topic stay."""
        db.store([Message("a", b"1")])
        assert 1 == db.delete("a")
        db.store([Message("a", b"2")])
        assert [b"2"] == [message.payload for message in db.replay("a")]
        assert 1 == db.generations()[0].messages

    def test_replay_ends_at_the_watermark_of_its_call(self, db: ts.Database) -> None:
        """Messages stored while a replay runs, or after its call but before its first item is read, are not in it."""
        db.store([Message("a", b"%d" % number) for number in range(10)])
        for order in get_args(Order):
            before = sum(1 for _ in db.replay("#"))
            replay, arrow = db.replay("#", order=order, batch_size=2), db.replay_arrow("#", order=order, batch_size=2)
            db.store([Message("a", b"later")])
            got = []
            for message in replay:
                got.append(message.payload)
                db.store([Message("a", b"more")])
            assert before == len(got)
            assert before == sum(batch.num_rows for batch in arrow)

    def test_replay_spans_a_generation_added_under_it(self, db: ts.Database) -> None:
        """A replay of a generation that is sealed while it runs ends at the same message as it would have otherwise."""
        db.store([Message("a", b"%d" % number) for number in range(6)])
        replay = db.replay("#", batch_size=2)
        assert b"0" == next(replay).payload
        db.add_generation()
        db.store([Message("a", b"later")])
        assert [b"1", b"2", b"3", b"4", b"5"] == [message.payload for message in replay]

    def test_new_streams_appear(self, db: ts.Database) -> None:
        """Listing streams again shows those of new topics and generations."""
        db.store([Message("a", b"1")])
        before = db.streams("#")
        db.add_generation()
        db.store([Message("b/c/d", b"2")])
        after = db.streams("#")
        assert len(before) < len(after)
        assert {(stream.shard, stream.generation, stream.number) for stream in before} <= {
            (stream.shard, stream.generation, stream.number) for stream in after
        }
        assert [b"1", b"2"] == read(db, begin(db))

    def test_streams_leave_out_generations_before_the_start(self, db: ts.Database, clock: Clock) -> None:
        """A generation sealed before the start has no streams for it; one sealed exactly at the start has."""
        db.store([Message("a", b"1")])
        clock.now += 10
        db.add_generation()
        db.store([Message("a", b"2")])
        assert {1, 2} == {stream.generation for stream in db.streams("#", START)}
        assert {2} == {stream.generation for stream in db.streams("#", START + 1)}

    def test_garbled_cursors(self, db: ts.Database) -> None:
        """A saved cursor that was cut, changed or invented is refused, and never read as another place."""
        db.store([Message("a", b"1")])
        saved = begin(db)[0].to_bytes()
        draw = random.Random(7)
        cases = [saved[:length] for length in range(len(saved))] + [saved + b"\0", b"\x02" + saved[1:]]
        for index, byte in enumerate(saved):
            cases += [saved[:index] + bytes((byte ^ (1 << draw.randrange(8)),)) + saved[index + 1 :]]
        cases += [draw.randbytes(40) for _ in range(20)]
        for case in cases:
            with pytest.raises(ts.InvalidCursorError):
                ts.Cursor.from_bytes(case)
        for nonsense in (None, "text", 7, [saved]):
            with pytest.raises(ts.InvalidCursorError):
                ts.Cursor.from_bytes(nonsense)  # type: ignore[arg-type]
        for other in (None, saved, 7):
            with pytest.raises(ts.InvalidCursorError):
                db.read(other)  # type: ignore[arg-type]

    def test_forged_cursors(self, db: ts.Database) -> None:
        """A cursor with a good checksum but a forged place is refused, or reads nothing outside its stream."""
        db.store([Message("a", b"1")])
        cursor = begin(db)[0]
        changes: tuple[dict[str, Any], ...] = (
            {"shard": 1},
            {"shard": 2**40},
            {"generation": 0},
            {"generation": 2},
            {"generation": 2**70},
            {"stream": 2**31},
            {"place": b""},
            {"place": b"\xff" * 100},
        )
        for change in changes:
            forged = msgspec.structs.replace(cursor, **change)
            with pytest.raises(ts.InvalidCursorError):
                db.read(forged)
        forged = msgspec.structs.replace(cursor, place=b"\xff" * len(cursor.place))
        assert set(db.read(forged).batch.payloads) <= {b"1"}

    def test_cursors_of_another_database(self, pair: Pair, db: ts.Database, directory: Path) -> None:
        """A cursor is refused by every database but the one that made it."""
        db.store([Message("a", b"1")])
        with pair.open(directory / "other") as other:
            other.store([Message("a", b"1")])
            with pytest.raises(ts.WrongDatabaseError):
                other.read(begin(db)[0])

    def test_stale_streams(self, db: ts.Database) -> None:
        """A stream that doesn't exist, or no longer, makes no cursor."""
        db.store([Message("a", b"1")])
        stream = db.streams("#")[0]

        changes: tuple[dict[str, Any], ...] = ({"number": 2**31}, {"generation": 9}, {"generation": 0})
        for change in changes:
            with pytest.raises(ts.InvalidCursorError):
                db.cursor(attrs.evolve(stream, **change), "#")
        with pytest.raises(ts.InvalidArgumentError):
            db.cursor(attrs.evolve(stream, shard=4), "#")

    def test_state_beside_messages(self, db: ts.Database) -> None:
        """Messages and state commit together, and a condition that doesn't hold keeps both out."""
        write = ts.StateWrite(b"offset", b"1", None)
        db.store([Message("a", b"1")], state={0: [write]})
        with pytest.raises(ts.StateConflictError):
            db.store([Message("a", b"2")], state={0: [write]})
        assert ([b"1"], b"1") == ([message.payload for _, message in replayed(db)], db.state(0).get(b"offset"))
        db.store([], state={0: [ts.StateWrite(b"offset", None, b"1")]})
        assert db.state(0).get(b"offset") is None
