"""Tests of extreme sizes: empty values, values of megabytes, a hundred thousand keys in a batch."""

from __future__ import annotations

import random

from topicstore.contract.engine import DATA, META, Engine, WriteBatch

from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.subjects.subject import BackendSubject

from .fixtures import Fixtures, numbered, pairs, put, remove

__all__ = ["Hostile"]

MEGABYTE = 1 << 20
SIZES = (0, 1, 2, 63, 64, 255, 256, 4_095, 4_096, 4_097, 65_535, 65_536, 65_537, MEGABYTE - 1, MEGABYTE, MEGABYTE + 1)


class Hostile(Fixtures):
    """Tests of extreme sizes."""

    def test_values_of_any_bytes_and_size(self, engine: Engine) -> None:
        """Values of any size and any bytes are read back unchanged: empty, at block boundaries, up to 16 MB."""
        draw = random.Random(4)
        values: dict[tuple[int, int, int], bytes] = {(1, 0, size): draw.randbytes(size) for size in SIZES}
        values |= {(2, 0, number): bytes((number,)) * 5_000 for number in (0, 10, 255)}
        values |= {
            (3, 0, number): draw.randbytes(16 * MEGABYTE) if number in (2, 3) else b"small" for number in range(6)
        }
        put(engine, DATA, values)
        assert list(values.items()) == pairs(engine.scan(DATA))
        assert list(values.values()) == engine.get_many(DATA, list(values))
        assert list(values.values()) == [engine.get(DATA, key) for key in values]
        with engine.snapshot() as snapshot:
            assert list(values.items())[::-1] == pairs(snapshot.scan(DATA, reverse=True))

    def test_a_hundred_thousand_keys_in_one_batch(self, engine: Engine) -> None:
        """A batch of 100,000 keys is read back completely and in order, and one range delete removes all of it."""
        batch = WriteBatch()
        values = numbered(100_000)
        batch.put_many(DATA, list(values), list(values.values()))
        engine.write(batch)
        assert list(values.items()) == pairs(engine.scan(DATA))
        remove(engine, DATA, (1, 0, 0), (2, 0, 0))
        assert pairs(engine.scan(DATA)) == []

    def test_no_write_of_many_is_lost(self, subject: BackendSubject, engine: Engine) -> None:
        """None of thousands of small writes, each in a batch of its own, is lost."""
        count = tries(3_000, 3_000, subject.capabilities)
        for number in range(count):
            put(engine, META, {b"%06d" % number: b"%d" % number})
        assert [(b"%06d" % number, b"%d" % number) for number in range(count)] == pairs(engine.scan(META))
