"""Promises about extreme sizes: empty values, values of megabytes, a hundred thousand keys in a batch."""

from __future__ import annotations

import random

import pytest
from topicstore.contract.engine import DATA, META, Engine, WriteBatch

from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.subjects.subject import BackendSubject

from .fixtures import Fixtures, keys, numbered, pairs, put, remove

__all__ = ["Hostile"]

MEGABYTE = 1 << 20
SIZES = (0, 1, 2, 63, 64, 255, 256, 4_095, 4_096, 4_097, 65_535, 65_536, 65_537, MEGABYTE - 1, MEGABYTE, MEGABYTE + 1)


class Hostile(Fixtures):
    """Promises about sizes."""

    def test_values_of_any_bytes_and_size(self, engine: Engine) -> None:
        """A value comes back byte for byte: empty, of zeros, of 0xff, of random bytes, at the edges of blocks."""
        draw = random.Random(4)
        values: dict[tuple[int, int, int], bytes] = {(1, 0, size): draw.randbytes(size) for size in SIZES}
        values |= {(2, 0, number): bytes((number,)) * 5_000 for number in (0, 10, 255)}
        put(engine, DATA, values)
        assert list(values.items()) == pairs(engine.scan(DATA))
        assert list(values.values()) == engine.get_many(DATA, list(values))
        assert list(values.values()) == [engine.get(DATA, key) for key in values]
        with engine.snapshot() as snapshot:
            assert list(values.items())[::-1] == pairs(snapshot.scan(DATA, reverse=True))

    def test_values_of_16_megabytes(self, engine: Engine) -> None:
        """A value of 16 MB comes in a list of its own, in both directions, also after small ones."""
        big = random.Random(5).randbytes(16 * MEGABYTE)
        put(engine, DATA, {(1, 0, number): big if number in (5, 6, 12) else b"small" for number in range(14)})
        assert big == engine.get(DATA, (1, 0, 6))
        for reverse in (False, True):
            places = []
            for chunk in engine.scan(DATA, reverse=reverse):
                places += [key[2] for key, _ in chunk]
                assert len(chunk) == 1 or all(value == b"small" for _, value in chunk)
                assert all(value in (b"small", big) for _, value in chunk)
            assert list(range(14))[:: -1 if reverse else 1] == places

    def test_a_hundred_thousand_keys_in_one_batch(self, engine: Engine) -> None:
        """A batch of 100,000 keys is all there, in order, and one range deletes them all."""
        batch = WriteBatch()
        values = numbered(100_000)
        batch.put_many(DATA, list(values), list(values.values()))
        engine.write(batch)
        assert list(values.items()) == pairs(engine.scan(DATA))
        remove(engine, DATA, (1, 0, 0), (2, 0, 0))
        assert pairs(engine.scan(DATA)) == []

    def test_no_write_of_many_is_lost(self, subject: BackendSubject, engine: Engine) -> None:
        """Of thousands of small writes, each in a batch of its own, none is lost."""
        count = tries(3_000, 3_000, subject.capabilities)
        for number in range(count):
            put(engine, META, {b"%06d" % number: b"%d" % number})
        assert [(b"%06d" % number, b"%d" % number) for number in range(count)] == pairs(engine.scan(META))

    @pytest.mark.parametrize("filler", [b"\0", b"\xff"])
    def test_keys_that_end_in_the_lowest_and_highest_byte(self, engine: Engine, filler: bytes) -> None:
        """Keys that differ only in how many 0x00 or 0xff they end with are different keys, in order of length."""
        made = [b"k" + filler * count for count in range(40)]
        put(engine, META, {key: b"%d" % len(key) for key in reversed(made)})
        assert made == keys(engine.scan(META))
        for key in made:
            assert engine.get(META, key) == b"%d" % len(key)
            assert [key] == keys(engine.scan(META, key, key + b"\0"))
        remove(engine, META, made[10], made[30])
        assert made[:10] + made[30:] == keys(engine.scan(META))
