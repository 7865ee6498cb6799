"""Tests of the stated limits, by every reading method: sizes of values and keys, counts of keys, unsigned numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from topicstore.contract.engine import DATA, INDEX, KEYS, KEYSPACES, META, STATE, Backend, Engine, WriteBatch

from topicstore_conformance.conditions.tries import MODE, full, tries
from topicstore_conformance.oracle.limits import COLLIDING, MEGABYTE, counts, numbers, sizes, unlike
from topicstore_conformance.subjects.subject import BackendSubject

from .changes import READINGS, Model, check, key_of
from .fixtures import Fixtures, keys, pairs, put, remove

__all__ = ["Limits"]

LARGEST = 300 * MEGABYTE
"""The size of the largest value that an engine takes, in bytes."""
LONGEST = 65_550
"""The size of the longest key of bytes."""
LARGE = 64 * MEGABYTE + 1
"""The size of the largest value that the quick mode tries, which is past the usual sizes of buffers."""
MARKS = (b"", b"\0", b"\1", b"\xff", b"None", b"null", b"\0\0\0\0", b"\xff" * 8, b"\x80\4K\1.", b"{}", b"-")
"""Values that an engine could take for marks of its own, such as that of a deleted key."""
COMPRESSED = (
    b"\x28\xb5\x2f\xfd\0",
    b"\x78\x9c\1",
    b"\x1f\x8b\x08\0",
    b"\x04\x22\x4d\x18",
    b"\xff\x06\0\0sNaPpY",
    b"BZh9",
)
"""The beginnings of compressed data: zstd, zlib, gzip, LZ4, Snappy and bzip2."""


class Limits(Fixtures):
    """Tests of sizes, counts and numbers at the stated limits and at the ends of common widths."""

    # --- values and keys ---

    def test_values_of_every_size_by_every_method(self, subject: BackendSubject, engine: Engine) -> None:
        """A value of any size, near each width and each buffer's size, is returned whole by every reading method."""
        some = [size for size in sizes(tries(MEGABYTE, 16 * MEGABYTE) + 1) if size <= 17 * MEGABYTE]
        model = Model()
        keyspaces = ((DATA, some), (META, some[::3]), (KEYS, some[1::3]))[: tries(3, 3, subject.capabilities)]
        for keyspace, chosen in keyspaces:
            for number, size in enumerate(chosen):
                batch = WriteBatch()
                batch.put(keyspace, key_of(keyspace, number), unlike(size, number))
                engine.write(batch)
                model.apply(batch)
        for keyspace, _ in keyspaces:
            check(model, engine, keyspace, "values of every size")
        with engine.snapshot() as snapshot:
            check(model, snapshot, DATA, "values of every size")
        engine.reclaim(DATA, (0, 0, 0), (2**32 - 1, 0, 0))
        check(model, engine, DATA, "values of every size, after they were reclaimed")

    def test_a_value_past_every_buffer(self, engine: Engine) -> None:
        """A value that is larger than 64 MB is returned whole by every reading method, and its neighbours, too."""
        self._large(engine, LARGE)

    @full
    @pytest.mark.parametrize("size", [*sizes(64 * MEGABYTE, 16 * MEGABYTE - 1)[:-1], LARGEST])
    def test_the_largest_values(self, engine: Engine, size: int) -> None:
        """A value of up to 300 MB is returned whole by every reading method, before and after reclaiming."""
        self._large(engine, size)
        engine.reclaim(DATA, (0, 0, 0), (9, 0, 0))
        assert engine.get(DATA, (1, 2, 1)) == unlike(size, 7)

    @staticmethod
    def _large(engine: Engine, size: int) -> None:
        value, near = unlike(size, 7), b"near"
        put(engine, DATA, {(1, 2, 0): near, (1, 2, 1): value, (1, 2, 2): near}, sync=True)
        whole = [((1, 2, 0), near), ((1, 2, 1), value), ((1, 2, 2), near)]
        assert engine.get(DATA, (1, 2, 1)) == value, "get"
        assert engine.get_many(DATA, [(1, 2, 2), (1, 2, 1)]) == [near, value], "get_many"
        assert pairs(engine.scan(DATA)) == whole, "scan"
        assert pairs(engine.scan(DATA, (1, 2, 1), (1, 2, 3), reverse=True)) == whole[:0:-1], "scan in reverse"
        with engine.snapshot() as snapshot:
            assert snapshot.get(DATA, (1, 2, 1)) == value, "get of a snapshot"

    def test_keys_of_every_size_by_every_method(self, engine: Engine) -> None:
        """A key of bytes of any size up to 65,550 is found by every method, bounds scans, and is deleted exactly."""
        lengths = [0, *sizes(LONGEST, 1)]
        for keyspace in (STATE, META, KEYS):
            model = Model()
            chosen = lengths if keyspace is META or MODE != "quick" else [*lengths[:4], *lengths[-9:]]
            texts = sorted(
                {fill * length + end for length in chosen for fill in (b"k",) for end in (b"", b"a", b"\xff")}
            )
            texts = [text for text in texts if len(text) <= LONGEST]
            batch = WriteBatch()
            batch.put_many(keyspace, texts, [b"%d" % len(text) + text[-1:] for text in texts])
            engine.write(batch)
            model.apply(batch)
            check(model, engine, keyspace, "keys of every size")
            for at in (1, len(texts) // 2, len(texts) - 3):
                batch = WriteBatch()
                batch.delete_range(keyspace, texts[at], texts[at + 1])
                batch.delete(keyspace, texts[at + 1])
                engine.write(batch)
                model.apply(batch)
            check(model, engine, keyspace, "deletes of keys of every size")

    def test_numbers_of_every_width(self, engine: Engine) -> None:
        """Keys with any unsigned number, near the end of each width, are in order, bound scans, and delete exactly."""
        first, others = numbers(32), numbers(64)
        for keyspace in (DATA, INDEX):
            model = Model()
            found: list[Any] = [(number, 0, 2**64 - 1) for number in first]
            found += [(7, number, number) for number in others] + [(8, 2**64 - 1, number) for number in others]
            batch = WriteBatch()
            batch.put_many(keyspace, found, [repr(key).encode() for key in found])
            engine.write(batch)
            model.apply(batch)
            check(model, engine, keyspace, "numbers of every width")
            ordered = sorted(found)
            for at in range(0, len(ordered) - 1, 5):
                batch = WriteBatch()
                batch.delete_range(keyspace, ordered[at], ordered[at + 1])
                engine.write(batch)
                model.apply(batch)
            check(model, engine, keyspace, "range deletes at numbers of every width")

    # --- counts ---

    @pytest.fixture
    def many(self, subject: BackendSubject, engine: Engine) -> tuple[Engine, list[int]]:
        """Return an engine and the counts of keys to test, ascending; its keyspace `DATA` has the largest count."""
        found = counts(tries(65_537, 100_001, subject.capabilities))
        if MODE == "quick":
            found = [count for count in found if count < 300 or count in (999, 1_000, 1_001, 4_096, 10_000, found[-1])]
        batch = WriteBatch()
        asked = [(1, 2, number) for number in range(found[-1])]
        batch.put_many(DATA, asked, [number.to_bytes(3, "big") for number in range(found[-1])])
        engine.write(batch)
        return engine, found

    def test_scans_of_every_count(self, many: tuple[Engine, list[int]]) -> None:
        """A scan bounded by keys or by a limit yields exactly the selected keys, however many, in both directions."""
        engine, found = many
        last = found[-1]
        for count in found:
            up, down = list(range(count)), list(range(last - 1, last - count - 1, -1))
            with engine.snapshot() as snapshot:
                for name, chunks, expected in (
                    ("end", engine.scan(DATA, None, (1, 2, count)), up),
                    ("start, reverse", snapshot.scan(DATA, (1, 2, last - count), reverse=True), down),
                    ("limit", snapshot.scan(DATA, limit=count), up),
                    ("limit, reverse", engine.scan(DATA, limit=count, reverse=True), down),
                ):
                    numbered = [(key[2], int.from_bytes(value, "big")) for key, value in pairs(chunks)]
                    assert len(expected) == len(numbered), f"scan of {count:,} keys by {name}"
                    assert [(each, each) for each in expected] == numbered, f"scan of {count:,} keys by {name}"

    def test_get_many_of_every_count(self, many: tuple[Engine, list[int]]) -> None:
        """`get_many` of any number of keys returns values in the keys' order, also for descending and repeated keys."""
        engine, found = many
        last = found[-1]
        for count in found:
            mixed = [(number * 7) % (last + 9) for number in range(count)]
            orders = {
                "descending": range(count - 1, -1, -1),
                "each twice": [number // 2 for number in range(count)],
                "one repeated": [5] * count,
                "of any order, some missing": mixed,
            }
            with engine.snapshot() as snapshot:
                for reader, (name, order) in product((engine, snapshot), orders.items()):
                    if reader is snapshot and count > 5_000:
                        continue
                    expected = [number.to_bytes(3, "big") if number < last else None for number in order]
                    got = reader.get_many(DATA, [(1, 2, number) for number in order])
                    assert expected == got, f"get_many of {count:,} keys, {name}"

    def test_batches_of_every_count(self, engine: Engine, subject: BackendSubject) -> None:
        """A batch of any number of puts, of deletes or of ranges is applied whole."""
        most = tries(65_537, 100_001, subject.capabilities)
        for count in [
            count for count in counts(most, 1) if MODE != "quick" or count in (1, 2, 255, 256, 257, 1_001, most)
        ]:
            batch = WriteBatch()
            some: Sequence[Any] = [b"%06d" % number for number in range(count)]
            batch.put_many(META, some, [b"v"] * count)
            engine.write(batch)
            assert count == len(keys(engine.scan(META))), f"{count:,} puts"
            batch = WriteBatch()
            for key in some[: count - 1]:
                batch.delete(META, key)
            engine.write(batch)
            assert [some[-1]] == keys(engine.scan(META)), f"{count - 1:,} deletes"
            remove(engine, META, b"", b"\xff")
        for count in counts(tries(257, 1_001, subject.capabilities), 1):
            put(engine, INDEX, {(1, 2, number): b"v" for number in range(2 * count)})
            batch = WriteBatch()
            for number in range(count):
                batch.delete_range(INDEX, (1, 2, 2 * number), (1, 2, 2 * number + 1))
            engine.write(batch)
            assert [(1, 2, 2 * number + 1) for number in range(count)] == keys(engine.scan(INDEX)), f"{count:,} ranges"
            remove(engine, INDEX, (0, 0, 0), (2, 0, 0))

    def test_every_page_ends_where_the_next_begins(self, engine: Engine, subject: BackendSubject) -> None:
        """A scan whose chunks end at their limit of bytes skips and repeats no key, for values of any size."""
        count = tries(40, 200, subject.capabilities)
        for number, size in enumerate((0, 4_096, 65_536, 104_857, 104_858, 174_763, 262_144, MEGABYTE // 2)):
            values = {(1, number, row): unlike(size, row) for row in range(count)}
            put(engine, DATA, values)
            span = (1, number, 0), (1, number + 1, 0)
            assert list(values) == keys(engine.scan(DATA, *span)), f"scan of values of {size:,} bytes"
            assert list(values)[::-1] == keys(engine.scan(DATA, *span, reverse=True)), f"in reverse, {size:,} bytes"
            assert list(values.items())[-9:] == pairs(engine.scan(DATA, (1, number, count - 9), span[1]))
            remove(engine, DATA, *span)

    # --- identity ---

    def test_values_are_byte_for_byte(self, engine: Engine, backend: Backend, subject: BackendSubject) -> None:
        """A value that looks like a marker or compressed data, or equals another key's, is returned unchanged."""
        model, batch = Model(), WriteBatch()
        values = [
            *MARKS,
            *COMPRESSED,
            *(bytes((byte,)) for byte in range(256)),
            *(unlike(size) for size in (20, 5_000)),
        ]
        values += [mark + unlike(5_000) for mark in COMPRESSED] + [b"same"] * 300
        for keyspace in KEYSPACES:
            batch.put_many(keyspace, [key_of(keyspace, number) for number in range(len(values))], values)
        engine.write(batch)
        model.apply(batch)
        for keyspace in KEYSPACES:
            for name in ("get", "get_many", "scan", "scan in reverse")[keyspace is not META :]:
                asked = [key_of(keyspace, number) for number in range(len(values))]
                read = READINGS[name]
                assert read(model, keyspace, asked) == read(engine, keyspace, asked), f"{name} of {keyspace.name!r}"

    def test_keys_are_compared_by_all_their_bytes(self, engine: Engine) -> None:
        """Keys with equal hashes, of other Unicode forms, or that differ in case or in one byte are different keys."""
        texts = [text.encode() for two in COLLIDING for text in two]
        texts += [
            "é".encode(),
            "e\u0301".encode(),
            b"K",
            b"k",
            b" k",
            b"k ",
            b"k\0",
            b"\xef\xbb\xbfk",
            b"k\n",
            b"k\r\n",
        ]
        texts += [bytes((byte,)) for byte in range(256) if bytes((byte,)) not in texts]
        texts += [b"%d" % number for number in range(1_000, 3_000)]
        for keyspace in (STATE, META, KEYS):
            put(engine, keyspace, {text: text[::-1] for text in texts})
            for text in texts[:20:2]:
                batch = WriteBatch()
                batch.delete(keyspace, text)
                engine.write(batch)
            left = [text for text in texts if text not in texts[:20:2]]
            assert [text[::-1] for text in left] == engine.get_many(keyspace, left)
            assert sorted(left) == keys(engine.scan(keyspace))
            assert [None] * 10 == [engine.get(keyspace, text) for text in texts[:20:2]]
