"""Tests of whole databases: extreme clocks, conditions on several shards, dropped generations, and ends of ranges."""

from __future__ import annotations

import warnings
from random import Random

import pytest
import topicstore as ts
from topicstore import Message, StateWrite
from topicstore.contract.engine import DATA, INDEX, KEYS, META, encode_generation
from topicstore.contract.positions import MAX_TIME

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.clock import START
from topicstore_conformance.parts.fixtures import DAY, SECOND, Fixtures, drop_first, numbered, payloads
from topicstore_conformance.parts.machines import World
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Whole"]

TIMES = (-DAY, -1, 0, 1, 1 << 31, 1 << 32, (1 << 53) - (1 << 33), MAX_TIME, MAX_TIME + 1, 1 << 53, 1 << 62)


def keys_of(db: ts.Database, generation: int) -> int:
    """Return the number of a generation's keys in all engines."""
    found = 0
    for shard in db.storage.shards:
        engine = shard.writer.open_engine()
        for keyspace in (DATA, INDEX):
            found += sum(map(len, engine.scan(keyspace, (generation, 0, 0), (generation + 1, 0, 0))))
        start, end = encode_generation(generation), encode_generation(generation + 1)
        found += sum(len(chunk) for keyspace in (META, KEYS) for chunk in engine.scan(keyspace, start, end))
    return found


class Whole(Fixtures):
    """Tests of whole databases."""

    @pytest.mark.parametrize("now", TIMES)
    def test_any_clock(self, world: World, now: int) -> None:
        """With any clock, before 1970 and after 2255 too, messages are stored, read in order and deleted."""
        world.clock.jump(now - world.clock.now)
        for number in range(5):
            world.db.store(numbered([number], client_id="p"))
            world.clock.now += 1
        assert [0, 1, 2, 3, 4] == payloads(world.db.replay("#", order="time"))
        assert [4, 3, 2, 1, 0] == payloads(world.db.replay("#", reverse=True))
        assert (5, []) == ((report := world.db.verify()).messages, report.damages)
        assert 5 == world.db.delete("#")
        assert [] == list(world.db.replay("#"))

    @requires("persistent")
    def test_clocks_that_jump(self, world: World) -> None:
        """However the clock jumps, messages of a shard are read back in the order in which they were stored."""
        jumps = (DAY, -2 * DAY, 60 * 365 * DAY, -80 * 365 * DAY, -SECOND, SECOND, 70 * 365 * DAY)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*in the future", UserWarning)
            for number, jump in enumerate(jumps):
                world.db.store(numbered([2 * number], client_id="p"))
                world.clock.jump(jump)
                world.db.store(numbered([2 * number + 1], client_id="p"))
                world.reopen()
                assert list(range(2 * number + 2)) == payloads(world.db.replay("#", order="time"))

    @requires("persistent")
    def test_one_opening_at_a_time(self, world: World, pair: Pair) -> None:
        """While a database is open for writing, new or opened again, another opening for writing is refused."""
        for _ in range(2):
            with pytest.raises(ts.DatabaseLockedError):
                pair.open(world.path)
            world.db.store(numbered([1]))
            world.reopen()
        assert [1, 1] == payloads(world.db.replay("#"))

    def test_timestamps(self, world: World) -> None:
        """A replay by timestamps returns the messages whose timestamps are in the range, in order, and no others."""
        draw, times = Random(5), list[int]()
        for _ in range(40):  # each batch has timestamps that lie near each other, and some that lie anywhere
            begin = START + draw.randrange(60) * 120 * SECOND
            some = [begin + draw.randrange(30 * SECOND) for _ in range(4)]
            some += [START + draw.randrange(7_200 * SECOND) for _ in range(draw.randrange(3))]
            numbers = range(len(times), len(times) + len(some))
            world.db.store(
                [Message("t", b"%d" % n, f"p{n % 3}", timestamp=at) for n, at in zip(numbers, some, strict=True)]
            )
            times += some
        for _ in range(60):
            near = draw.choice(times)
            start, until = sorted((near + draw.choice((-1, 0, 1)), near + draw.randrange(1, 600 * SECOND)))
            expected = sorted(n for n, at in enumerate(times) if start <= at < until)
            found = list(world.db.replay("#", start, until, by="timestamp", order="timestamp"))
            assert expected == sorted(payloads(found))
            assert sorted(times[n] for n in expected) == [message.timestamp for message in found]

    def test_conditions_on_several_shards(self, world: World) -> None:
        """If a condition fails in one shard, no shard stores a message or a state value of that call."""
        rows = [Message("t", b"1", f"c{number}") for number in range(12)]
        assert {0, 1} == {world.db.shard_of(row.client_id) for row in rows}
        world.db.state(1).write([StateWrite(b"b", b"1")])
        for wrong in (0, 1):
            conditions = {0: None, 1: b"1"}
            writes = {
                shard: [
                    StateWrite(b"other", b"x"),
                    StateWrite(b"b", b"2", b"wrong" if shard == wrong else conditions[shard]),
                ]
                for shard in (0, 1)
            }
            with pytest.raises(ts.StateConflictError):
                world.db.store(rows, state=writes)
            with pytest.raises(ts.StateConflictError):
                world.db.publish(rows, state=writes)
            assert [] == list(world.db.replay("#"))
            assert [{}, {b"b": b"1"}] == [dict(world.db.state(shard).scan()) for shard in (0, 1)]
        world.db.store(rows, state={0: [StateWrite(b"b", b"2", None)], 1: [StateWrite(b"b", b"2", b"1")]})
        assert [{b"b": b"2"}] * 2 == [dict(world.db.state(shard).scan()) for shard in (0, 1)]
        assert 12 == len(list(world.db.replay("#")))

    def test_nothing_is_left_of_a_dropped_generation(self, world: World) -> None:
        """A dropped generation is in no replay, count, list, look-up or engine, and its cursors raise."""
        world.db.store(numbered(range(20), topic="old"))
        list(world.db.replay("#"))  # ends the current epochs, if the layout has epochs
        cursors = [world.db.cursor(stream, "#") for stream in world.db.streams("#")]
        world.db.topics()
        world.db.add_generation()
        world.db.store(numbered(range(20, 25), topic="new"))
        world.db.drop_generation(1)
        assert list(range(20, 25)) == sorted(payloads(world.db.replay("#")))
        assert {"new"} == {tally.topic.split("/")[0] for tally in world.db.topics()}
        assert {"new"} == {message.topic.split("/")[0] for message in world.db.latest()}
        assert 5 == sum(tally.messages for tally in world.db.clients())
        assert ([2], 5) == ([info.number for info in world.db.generations()], world.db.info().messages)
        assert {2} == {stream.generation for stream in world.db.streams("#")}
        assert 5 == world.db.explain("#").messages
        for cursor in cursors:
            with pytest.raises(ts.GenerationDroppedError):
                world.db.read(cursor)
        assert 0 == keys_of(world.db, 1)

    def test_what_outlives_generations(self, world: World) -> None:
        """State, retained messages, rules, sessions, queues and settings stay when every generation is dropped."""
        world.db.state(0).write([StateWrite(b"key", b"value")])
        world.db.publish([Message("kept", b"1", "p", 1, True)])
        world.db.persistence.add("a/#")
        world.db.sessions.open("client", expiry_interval=None).subscribe("t/#", 1)
        world.db.queues.open("queue").append(numbered(range(2)))
        settings = world.db.retention.set(max_age=1e6)
        for number in range(3):
            world.db.store(numbered(range(number)))
            drop_first(world.db)
        assert b"value" == world.db.state(0).get(b"key")
        assert [b"1"] == [message.payload for message in world.db.retained("#")]
        assert ["a/#"] == [rule.topic_filter for rule in world.db.persistence]
        assert ["t/#"] == [text for text, _ in world.db.sessions["client"].subscriptions]
        assert 2 == len(world.db.queues.open("queue"))
        assert settings == world.db.retention.settings

    def test_ends_of_ranges(self, world: World) -> None:
        """A range of times includes its start and excludes its end, to the microsecond."""
        for number in range(10):
            world.db.store(numbered([number, 10 + number], client_id="p"))
            world.clock.now += 1
        starts = [message.timestamp or 0 for message in world.db.replay("#", order="time")][::2]
        base = starts[0]
        for first, last in ((0, 10), (3, 7), (4, 4), (5, 6), (9, 10), (0, 1)):
            expected = sorted([*range(first, last), *range(10 + first, 10 + last)])
            assert expected == sorted(payloads(world.db.replay("#", base + first, base + last)))
            assert expected == sorted(payloads(world.db.replay("#", base + first, base + last, reverse=True)))
        assert [] == list(world.db.replay("#", base + 10))
        assert [] == list(world.db.replay("#", 0, base))
        assert 20 == len(list(world.db.replay("#", 0, MAX_TIME)))
        with pytest.raises(ts.TopicstoreError):
            list(world.db.replay("#", base + 1, 1.5))  # type: ignore[arg-type]
        assert 4 == world.db.delete("#", base + 3, base + 5)
        gone = {3, 4, 13, 14}
        assert sorted(set(range(20)) - gone) == sorted(payloads(world.db.replay("#")))
        assert 0 == world.db.delete("#", base + 3, base + 5)

    def test_deletes_between_generations(self, world: World) -> None:
        """A delete removes the matching messages of a range from all generations, and exactly those."""
        for number in range(12):
            world.db.store(numbered([number], client_id=f"p{number % 5}"))
            world.clock.now += SECOND
            if number % 4 == 3:
                world.db.add_generation()
        assert 2 == world.db.delete("t/2", START + SECOND, START + 8 * SECOND)
        assert [number for number in range(12) if number not in (2, 6)] == sorted(payloads(world.db.replay("#")))
        world.db.compact()
        assert 3 == world.db.delete("t/3")
        assert [number for number in range(12) if number % 4 != 3 and number not in (2, 6)] == sorted(
            payloads(world.db.replay("#"))
        )
