"""Tests of keys: their order, shapes and keyspaces, and the values found under them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from topicstore.contract.engine import DATA, GENERATION_END, INDEX, KEYS, META, STATE, Engine, Key, Keyspace, WriteBatch
from topicstore.contract.engine import encode_generation as prefix
from topicstore.contract.errors import InvalidArgumentError

from .fixtures import Fixtures, keys, pairs, put

__all__ = ["Ordering"]

U32, U64 = 2**32 - 1, 2**64 - 1
LONGEST_KEY = 65_550


class Ordering(Fixtures):
    """Tests of keys."""

    def test_keys_of_bytes_are_ordered_as_bytes(self, engine: Engine) -> None:
        """Keys of bytes are ordered as bytes: 0x00 and 0xff like others, prefixes first, the empty key before all."""
        ordered = [b"", b"\0", b"\0\0", b"\0\xff", b"a", b"a\0", b"a\xff", b"b", b"\xff", b"\xff\0", b"\xff\xff"]
        put(engine, META, {key: key for key in reversed(ordered)})
        assert [(key, key) for key in ordered] == pairs(engine.scan(META))
        assert ordered[::-1] == keys(engine.scan(META, reverse=True))

    def test_keys_of_tuples_are_ordered_as_numbers(self, engine: Engine) -> None:
        """Keys of tuples are ordered number by number, up to the largest allowed number."""
        ordered = [
            (0, 0, 0),
            (0, 0, 256),
            (0, 1, 255),
            (1, 0, 0),
            (1, 2**63 - 1, 0),
            (1, 2**63, 0),
            (256, 0, 1),
            (2**31, 0, 0),
            (U32, 0, 0),
            (U32, U64, 0),
            (U32, U64, U64),
        ]
        put(engine, DATA, {key: repr(key).encode() for key in reversed(ordered)})
        assert [(key, repr(key).encode()) for key in ordered] == pairs(engine.scan(DATA))
        assert ordered[::-1] == keys(engine.scan(DATA, reverse=True))
        assert engine.get(DATA, (U32, U64, U64)) == repr((U32, U64, U64)).encode()

    def test_order_is_that_of_keys_not_of_writes(self, engine: Engine) -> None:
        """A scan yields keys in order, regardless of the order and the batches in which they were written."""
        draw = random.Random(1)
        numbers = [(draw.randrange(3), draw.randrange(300), draw.getrandbits(64)) for _ in range(3_000)]
        texts = [draw.randbytes(draw.randrange(6)) for _ in range(3_000)]
        for start in range(0, 3_000, 500):
            put(engine, INDEX, dict.fromkeys(numbers[start : start + 500], b"v"))
            put(engine, KEYS, dict.fromkeys(texts[start : start + 500], b"v"))
        assert sorted(set(numbers)) == keys(engine.scan(INDEX))
        assert sorted(set(texts)) == keys(engine.scan(KEYS))
        assert sorted(set(texts), reverse=True) == keys(engine.scan(KEYS, reverse=True))

    def test_long_keys(self, engine: Engine) -> None:
        """Keys of 65,550 bytes are supported, and are distinct even if only their last bytes differ."""
        long = [b"k" * LONGEST_KEY, b"k" * (LONGEST_KEY - 1) + b"l", b"k" * (LONGEST_KEY - 1)]
        put(engine, META, {key: key[-1:] for key in long})
        assert sorted(long) == keys(engine.scan(META))
        assert [key[-1:] for key in long] == engine.get_many(META, long)
        assert [long[1]] == keys(engine.scan(META, long[0] + b"\0"))

    @pytest.mark.parametrize(
        ("keyspace", "key"),
        [(DATA, (1, 2)), (DATA, (U32 + 1, 0, 0)), (DATA, (0, -1, 0)), (DATA, b"bytes"), (META, (1,)), (META, "text")],
    )
    def test_a_key_of_another_shape_is_refused(self, engine: Engine, keyspace: Keyspace[Any], key: Key) -> None:
        """A key of another shape than its keyspace's raises InvalidArgumentError, and its batch is not applied."""
        for wrong in ("put", "put_many", "delete", "range"):
            batch = WriteBatch()
            batch.put(STATE, b"before", b"")
            match wrong:
                case "put":
                    batch.put(keyspace, key, b"")
                case "put_many":
                    batch.put_many(keyspace, [key], [b""])
                case "delete":
                    batch.delete(keyspace, key)
                case _:
                    batch.delete_range(keyspace, key, key)
            batch.put(STATE, b"behind", b"")
            with pytest.raises(InvalidArgumentError, match="not a key of keyspace"):
                engine.write(batch)
            assert engine.get_many(STATE, [b"before", b"behind"]) == [None, None]
        for read in (
            lambda: engine.get(keyspace, key),
            lambda: engine.get_many(keyspace, [key]),
            lambda: next(engine.scan(keyspace, key)),
            lambda: next(engine.scan(keyspace, end=key)),
        ):
            with pytest.raises(InvalidArgumentError, match="not a key of keyspace"):
                read()

    def test_an_unknown_keyspace_is_refused(self, engine: Engine) -> None:
        """A keyspace that the shard wasn't opened with raises InvalidArgumentError; its batch is not applied."""
        stranger = Keyspace[bytes]("stranger")
        batch = WriteBatch()
        batch.put(STATE, b"before", b"")
        batch.put(stranger, b"k", b"v")
        with pytest.raises(InvalidArgumentError, match="stranger"):
            engine.write(batch)
        assert engine.get(STATE, b"before") is None
        with pytest.raises(InvalidArgumentError, match="stranger"):
            engine.get(stranger, b"k")
        with pytest.raises(InvalidArgumentError, match="stranger"):
            next(engine.scan(stranger))
        with engine.snapshot() as snapshot, pytest.raises(InvalidArgumentError, match="stranger"):
            snapshot.get(stranger, b"k")

    def test_keyspaces_are_apart(self, engine: Engine) -> None:
        """A key can have a value in each keyspace, and a delete in one keyspace doesn't affect the others."""
        for keyspace in (STATE, META, KEYS):
            put(engine, keyspace, {b"k": keyspace.name.encode(), b"l": b""})
        for numbers in (DATA, INDEX):
            put(engine, numbers, {(1, 2, 3): numbers.name.encode()})
        batch = WriteBatch()
        batch.delete(META, b"k")
        batch.delete_range(KEYS, b"", b"z")
        batch.delete_range(INDEX, (0, 0, 0), (U32, 0, 0))
        engine.write(batch)
        assert pairs(engine.scan(STATE)) == [(b"k", b"state"), (b"l", b"")]
        assert pairs(engine.scan(META)) == [(b"l", b"")]
        assert [(DATA.name.encode(), None)] == [(engine.get(DATA, (1, 2, 3)), engine.get(INDEX, (1, 2, 3)))]
        assert pairs(engine.scan(KEYS)) + pairs(engine.scan(INDEX)) == []

    def test_get_finds_exactly_its_key(self, engine: Engine) -> None:
        """`get` returns a key's own value, even an empty one, and None if only neighbouring keys or prefixes exist."""
        put(engine, STATE, {b"ab": b"1", b"ab\0": b"2", b"empty": b"", b"": b"root"})
        for key, value in ((b"ab", b"1"), (b"ab\0", b"2"), (b"empty", b""), (b"", b"root")):
            assert value == engine.get(STATE, key)
        for missing in (b"a", b"abc", b"ab\0\0", b"aa", b"empt", b"\0"):
            assert engine.get(STATE, missing) is None
        put(engine, DATA, {(1, 2, 3): b"", (1, 3, 0): b"x"})
        assert [engine.get(DATA, key) for key in ((1, 2, 3), (1, 2, 4), (1, 3, 0))] == [b"", None, b"x"]

    def test_get_many_answers_in_the_order_asked(self, engine: Engine) -> None:
        """`get_many` returns values in the order of its keys, also for repeated keys, and None for missing keys."""
        put(engine, STATE, {b"a": b"1", b"empty": b""})
        assert engine.get_many(STATE, [b"empty", b"missing", b"a", b"a", b"0"]) == [b"", None, b"1", b"1", None]
        assert engine.get_many(STATE, []) == []
        put(engine, DATA, {(1, 2, number): b"%d" % number for number in range(0, 3_000, 3)})
        asked = [(1, 2, number) for number in random.Random(2).choices(range(3_000), k=3_000)]
        expected = [None if key[2] % 3 else b"%d" % key[2] for key in asked]
        assert expected == engine.get_many(DATA, asked)
        expected = [None if number % 3 else b"%d" % number for number in range(3_000)]
        assert expected == engine.get_many(DATA, [(1, 2, number) for number in range(3_000)])

    @pytest.mark.parametrize("generation", [1, 255, 256, 2**31 - 1, GENERATION_END - 1])
    def test_neighbouring_prefixes_are_apart(self, engine: Engine, generation: int) -> None:
        """A scan or a range delete of one generation's keys touches no key of the adjacent generations."""
        near = [generation - 1, generation, generation + 1]
        for each in near:
            put(engine, META, {prefix(each) + tail: b"%d" % each for tail in (b"", b"\0", b"\xff" * 9)})
            put(engine, DATA, {(each, number, number): b"%d" % each for number in (0, U64)})
        span = prefix(generation), prefix(generation + 1)
        numbers = (generation, 0, 0), (generation + 1, 0, 0)
        for reverse in (False, True):
            assert {b"%d" % generation} == {value for _, value in pairs(engine.scan(META, *span, reverse=reverse))}
            assert {b"%d" % generation} == {value for _, value in pairs(engine.scan(DATA, *numbers, reverse=reverse))}
        batch = WriteBatch()
        batch.delete_range(META, *span)
        batch.delete_range(DATA, *numbers)
        engine.write(batch)
        assert [b"%d" % each for each in (near[0], near[2]) for _ in range(3)] == [
            value for _, value in pairs(engine.scan(META))
        ]
        assert [b"%d" % each for each in (near[0], near[2]) for _ in range(2)] == [
            value for _, value in pairs(engine.scan(DATA))
        ]
