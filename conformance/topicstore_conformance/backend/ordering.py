"""Promises about keys: their order, and that those which fit no keyspace are refused with all of their batch."""

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


class Ordering(Fixtures):
    """Promises about keys."""

    def test_order_is_that_of_keys_not_of_writes(self, engine: Engine) -> None:
        """A scan is in the order of keys, in whatever order and in however many batches they were written."""
        draw = random.Random(1)
        numbers = [(draw.randrange(3), draw.randrange(300), draw.getrandbits(64)) for _ in range(3_000)]
        texts = [draw.randbytes(draw.randrange(6)) for _ in range(3_000)]
        for start in range(0, 3_000, 500):
            put(engine, INDEX, dict.fromkeys(numbers[start : start + 500], b"v"))
            put(engine, KEYS, dict.fromkeys(texts[start : start + 500], b"v"))
        assert sorted(set(numbers)) == keys(engine.scan(INDEX))
        assert sorted(set(texts)) == keys(engine.scan(KEYS))
        assert sorted(set(texts), reverse=True) == keys(engine.scan(KEYS, reverse=True))

    @pytest.mark.parametrize(
        ("keyspace", "key"),
        [(DATA, (1, 2)), (DATA, (U32 + 1, 0, 0)), (DATA, (0, -1, 0)), (DATA, b"bytes"), (META, (1,)), (META, "text")],
    )
    def test_a_key_of_another_shape_is_refused(self, engine: Engine, keyspace: Keyspace[Any], key: Key) -> None:
        """A key that does not fit its keyspace raises in every call, and nothing of its batch is applied."""
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
        """A keyspace that the shard was not opened with raises in every call, and nothing of its batch is applied."""
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

    def test_a_refused_batch_applies_nothing(self, engine: Engine) -> None:
        """If one key of a batch is wrong, at whichever place in it, nothing of the batch is applied."""
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

    @pytest.mark.parametrize("generation", [1, 255, 256, 2**31 - 1, GENERATION_END - 1])
    def test_neighbouring_prefixes_are_apart(self, engine: Engine, generation: int) -> None:
        """A scan or a range delete of one generation's keys touches none of the neighbours' keys."""
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

    def test_a_scan_reaches_the_last_key(self, engine: Engine) -> None:
        """A scan of many keys and lists ends after its last pair, and leaves none out between two lists."""
        values = {(1, 2, number): bytes(number % 700) for number in range(20_000)}
        put(engine, DATA, values)
        assert list(values.items()) == pairs(engine.scan(DATA))
        assert list(values.items())[::-1] == pairs(engine.scan(DATA, reverse=True))
        with engine.snapshot() as snapshot:
            assert list(values.items())[7:19_990] == pairs(snapshot.scan(DATA, (1, 2, 7), (1, 2, 19_990)))
