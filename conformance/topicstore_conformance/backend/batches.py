"""Tests of write batches: the order of operations, atomicity, and range deletes."""

from __future__ import annotations

from typing import Any

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, META, STATE, Engine, WriteBatch
from topicstore.contract.errors import InvalidArgumentError

from .fixtures import Fixtures, contents, keys, numbered, pairs, put

__all__ = ["Batches"]


class Batches(Fixtures):
    """Tests of write batches."""

    def test_operations_apply_in_their_order(self, engine: Engine) -> None:
        """Of several operations of a batch on one key the last one wins, be it a put or a delete."""
        put(engine, META, {b"a": b"old", b"b": b"old", b"c": b"old"})
        batch = WriteBatch()
        batch.put(META, b"a", b"1")
        batch.put(META, b"a", b"2")
        batch.put(META, b"gone", b"1")
        batch.delete(META, b"gone")
        batch.put(STATE, b"between", b"")
        batch.delete(META, b"back")
        batch.put(META, b"back", b"3")
        batch.delete(META, b"never there")
        batch.delete(META, b"b")
        engine.write(batch)
        assert pairs(engine.scan(META)) == [(b"a", b"2"), (b"back", b"3"), (b"c", b"old")]

    def test_ranges_apply_first(self, engine: Engine) -> None:
        """A range delete removes keys that existed before its batch, and none that the same batch puts."""
        put(engine, META, {b"a": b"old", b"b": b"old", b"c": b"old"})
        batch = WriteBatch()
        batch.put(META, b"a", b"new")
        batch.delete_range(META, b"a", b"c")
        batch.put(META, b"bb", b"new")
        engine.write(batch)
        assert pairs(engine.scan(META)) == [(b"a", b"new"), (b"bb", b"new"), (b"c", b"old")]

    def test_ranges_may_overlap(self, engine: Engine) -> None:
        """The range deletes of a batch remove the keys of all its ranges and no others, however the ranges overlap."""
        for count in (100, 60_000):
            left = numbered(count)
            put(engine, DATA, left)
            batch = WriteBatch()
            for first, last in ((60, 80), (62, 79), (0, 18), (35, 55), (30, 50), (55, 57), (90, 91), (90, 95)):
                start, end = first * count // 100, last * count // 100
                batch.delete_range(DATA, (1, 2, start), (1, 2, end))
                left = {key: value for key, value in left.items() if not start <= key[2] < end}
            engine.write(batch)
            assert list(left.items()) == pairs(engine.scan(DATA))

    def test_many_puts_are_like_single_ones(self, engine: Engine) -> None:
        """`put_many` applies in order with all other operations, for keys of bytes and keys of numbers."""
        batch = WriteBatch()
        batch.put(META, b"b", b"first")
        batch.put_many(META, [b"c", b"b", b"a", b"b"], [b"", b"second", b"x", b"third"])
        batch.delete(META, b"a")
        batch.put_many(DATA, [(1, 2, number) for number in range(3)], [b"0", b"1", b"2"])
        batch.put_many(DATA, [], [])
        batch.put(META, b"d", b"last")
        assert batch.size == len(b"first" + b"second" + b"x" + b"third" + b"012" + b"last")
        assert len(batch.operations) == 10
        engine.write(batch)
        assert pairs(engine.scan(META)) == [(b"b", b"third"), (b"c", b""), (b"d", b"last")]
        assert engine.get_many(DATA, [(1, 2, number) for number in range(3)]) == [b"0", b"1", b"2"]

    def test_a_refused_batch_applies_nothing(self, engine: Engine) -> None:
        """If any key of a batch is invalid, wherever in the batch, no operation of the batch is applied."""
        put(engine, META, {b"there": b"1"})
        for place in (0, 500, 999):
            wrong: list[Any] = [(1, 2, number) for number in range(1_000)]
            wrong[place] = b"bytes"
            batch = WriteBatch()
            batch.delete_range(META, b"", b"z")
            batch.put(META, b"new", b"")
            batch.put_many(DATA, wrong, [b""] * 1_000)
            with pytest.raises(InvalidArgumentError):
                engine.write(batch)
            assert pairs(engine.scan(META)) == [(b"there", b"1")]
            assert pairs(engine.scan(DATA)) == []

    def test_a_batch_is_seen_at_once_and_whole(self, engine: Engine) -> None:
        """Once `write` has returned, every read sees the whole batch in all keyspaces."""
        for number in range(50):
            batch = WriteBatch()
            for keyspace in KEYSPACES:
                key = b"k" if keyspace.shape is None else (1, 1, 1)
                batch.put(keyspace, key, b"%d" % number)
            engine.write(batch, sync=number % 10 == 0)
            assert {b"%d" % number} == {value for found in contents(engine).values() for _, value in found}
            with engine.snapshot() as snapshot:
                assert [each.get(DATA, (1, 1, 1)) for each in (engine, snapshot)] == [b"%d" % number] * 2

    def test_the_end_of_a_range_delete_stays(self, engine: Engine) -> None:
        """A range delete removes the keys from its start (inclusive) to its end (exclusive), and no others."""
        put(engine, DATA, numbered(100))
        batch = WriteBatch()
        batch.delete_range(DATA, (1, 2, 10), (1, 2, 90))
        batch.delete_range(DATA, (1, 2, 95), (1, 2, 95))
        batch.delete_range(DATA, (1, 2, 98), (1, 2, 92))
        batch.delete_range(DATA, (5, 0, 0), (6, 0, 0))
        engine.write(batch)
        expected = [(1, 2, number) for number in (*range(10), *range(90, 100))]
        assert expected == keys(engine.scan(DATA))
        assert expected[::-1] == keys(engine.scan(DATA, reverse=True))
        assert engine.get_many(DATA, [(1, 2, 9), (1, 2, 10), (1, 2, 89)]) == [b"\0\0\x09", None, None]
        assert engine.get(DATA, (1, 2, 90)) == b"\0\0\x5a"

    def test_deleted_keys_can_be_put_again(self, engine: Engine) -> None:
        """A key that was deleted, by a single or a range delete, stays deleted until it is put again."""
        put(engine, DATA, numbered(10))
        batch = WriteBatch()
        batch.delete_range(DATA, (1, 2, 0), (1, 2, 5))
        batch.delete(DATA, (1, 2, 7))
        engine.write(batch)
        put(engine, DATA, {(1, 2, 3): b"again", (1, 2, 7): b"again"})
        expected = {key: value for key, value in numbered(10).items() if key[2] >= 5}
        expected |= {(1, 2, 3): b"again", (1, 2, 7): b"again"}
        assert sorted(expected.items()) == pairs(engine.scan(DATA))

    def test_an_empty_batch_is_a_write(self, engine: Engine) -> None:
        """An empty batch changes nothing, with and without sync."""
        put(engine, STATE, {b"k": b"v"})
        assert not WriteBatch()
        engine.write(WriteBatch())
        engine.write(WriteBatch(), sync=True)
        engine.flush_log()
        assert pairs(engine.scan(STATE)) == [(b"k", b"v")]
