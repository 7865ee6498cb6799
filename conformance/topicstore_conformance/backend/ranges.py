"""Tests of scans: their bounds, directions, limits and chunks."""

from __future__ import annotations

from typing import Any

import pytest
from topicstore.contract.engine import DATA, META, Engine, Reader

from .fixtures import Fixtures, keys, numbered, pairs, put, remove

__all__ = ["Ranges"]

MEGABYTE = 1 << 20
SPANS = [
    (None, None),
    (0, 300),
    (10, 11),
    (10, 10),
    (20, 10),
    (None, 25),
    (275, None),
    (299, 400),
    (300, 400),
    (50, 250),
]


class Ranges(Fixtures):
    """Tests of scans."""

    @pytest.mark.parametrize("of", ["engine", "snapshot"])
    def test_the_start_is_inside_and_the_end_is_not(self, engine: Engine, of: str) -> None:
        """A scan yields the keys from its start (inclusive) to its end (exclusive), in both directions."""
        put(engine, DATA, numbered(300))
        with engine.snapshot() as snapshot:
            reader: Reader = snapshot if of == "snapshot" else engine
            for start, end in SPANS:
                first = None if start is None else (1, 2, start)
                last = None if end is None else (1, 2, end)
                inside = [(1, 2, number) for number in range(start or 0, min(300, 300 if end is None else end))]
                assert inside == keys(reader.scan(DATA, first, last))
                assert inside[::-1] == keys(reader.scan(DATA, first, last, reverse=True))

    @pytest.mark.parametrize("of", ["engine", "snapshot"])
    def test_a_limit_bounds_all_lists_together(self, engine: Engine, of: str) -> None:
        """A scan with a limit yields at most that many pairs in total, the first ones in its direction."""
        put(engine, DATA, numbered(300))
        with engine.snapshot() as snapshot:
            reader: Reader = snapshot if of == "snapshot" else engine
            for start, end in SPANS:
                first = None if start is None else (1, 2, start)
                last = None if end is None else (1, 2, end)
                inside = keys(reader.scan(DATA, first, last))
                for limit in (0, 1, 7, 130, 10_000):
                    assert inside[:limit] == keys(reader.scan(DATA, first, last, limit=limit))
                    assert inside[::-1][:limit] == keys(reader.scan(DATA, first, last, reverse=True, limit=limit))

    def test_bounds_need_not_be_there(self, engine: Engine) -> None:
        """The bounds of a scan need not be existing keys: they are compared with keys in byte order."""
        put(engine, META, {b"b": b"", b"d": b"", b"f": b""})
        assert keys(engine.scan(META, b"a", b"e")) == [b"b", b"d"]
        assert keys(engine.scan(META, b"a", b"e", reverse=True)) == [b"d", b"b"]
        assert keys(engine.scan(META, b"b\0", b"f")) == [b"d"]
        assert keys(engine.scan(META, b"b", b"d\0")) == [b"b", b"d"]
        assert keys(engine.scan(META, b"", b"b")) == []
        assert keys(engine.scan(META, b"g", reverse=True)) == []
        put(engine, META, {b"": b""})
        with engine.snapshot() as snapshot:
            readers: list[Reader] = [engine, snapshot]
            for reader in readers:  # reverse scans of ranges whose only key is their start
                assert keys(reader.scan(META, b"b", b"c", reverse=True)) == [b"b"]
                assert keys(reader.scan(META, b"b", b"d", reverse=True)) == [b"b"]
                assert keys(reader.scan(META, b"f", reverse=True)) == [b"f"]
                assert keys(reader.scan(META, None, b"b", reverse=True)) == [b""]
                assert keys(reader.scan(META, b"c", b"d", reverse=True)) == []

    def test_a_range_whose_end_is_not_behind_its_start_is_empty(self, engine: Engine) -> None:
        """An empty or inverted range reads nothing and deletes nothing."""
        put(engine, META, {b"a": b"", b"b": b"", b"c": b""})
        for start, end in ((b"b", b"b"), (b"c", b"a"), (b"b\0", b"b")):
            for reverse in (False, True):
                assert keys(engine.scan(META, start, end, reverse=reverse)) == []
            remove(engine, META, start, end)
        assert keys(engine.scan(META)) == [b"a", b"b", b"c"]

    def test_scans_skip_a_large_deleted_range(self, engine: Engine) -> None:
        """A scan in either direction, around, beside or from within a range of many deleted keys, yields all others.

        An engine may hide such a range first, and remove its keys later.
        """
        values = {(1, 2, 2 * number): b"%d" % number for number in range(12_000)}
        put(engine, DATA, values)
        first, last = (1, 2, 1_000), (1, 2, 22_100)
        remove(engine, DATA, first, last)
        left = [(key, value) for key, value in values.items() if not first <= key < last]
        with engine.snapshot() as snapshot:
            for start, end in (
                *((None, None), (None, 22_100), (None, 22_101), (None, 9_000), (9_000, None)),
                *((999, None), (998, None), (1_000, None), (999, 22_101), (990, 1_000), (22_099, 22_103)),
            ):
                span = None if start is None else (1, 2, start), None if end is None else (1, 2, end)
                expected = [pair for pair in left if (start or 0) <= pair[0][2] < (end or 1 << 40)]
                for reader in (engine, snapshot):
                    assert expected == pairs(reader.scan(DATA, *span))
                    assert expected[::-1] == pairs(reader.scan(DATA, *span, reverse=True))

    def test_a_scan_reaches_the_last_key(self, engine: Engine) -> None:
        """A scan of several chunks yields every pair, including the last one and those at chunk boundaries."""
        values = {(1, 2, number): bytes(number % 700) for number in range(20_000)}
        put(engine, DATA, values)
        assert list(values.items()) == pairs(engine.scan(DATA))
        assert list(values.items())[::-1] == pairs(engine.scan(DATA, reverse=True))
        with engine.snapshot() as snapshot:
            assert list(values.items())[7:19_990] == pairs(snapshot.scan(DATA, (1, 2, 7), (1, 2, 19_990)))

    def test_lists_are_not_empty_and_hold_a_megabyte(self, engine: Engine) -> None:
        """No chunk of a scan is empty, and a chunk of several pairs holds at most a megabyte of values."""
        put(engine, DATA, {(1, 0, number): bytes(60_000 if number % 2 else 100) for number in range(400)})
        for reverse in (False, True):
            chunks = list(engine.scan(DATA, reverse=reverse))
            assert sum(map(len, chunks)) == 400
            assert all(chunks)
            assert max(sum(len(value) for _, value in chunk) for chunk in chunks) <= MEGABYTE

    def test_a_scan_can_be_dropped_or_closed_at_any_moment(self, engine: Engine) -> None:
        """A scan may be closed before its first chunk, between chunks or after the last one, or garbage-collected."""
        put(engine, DATA, numbered(200))
        for asked in (0, 1, 1000):
            scan: Any = engine.scan(DATA)
            for _ in zip(range(asked), scan, strict=False):
                pass
            scan.close()
            scan.close()
            assert list(scan) == []
        dropped = engine.scan(DATA)
        next(dropped)
        del dropped
        assert len(keys(engine.scan(DATA))) == 200

    def test_scans_take_turns(self, engine: Engine) -> None:
        """Interleaved scans of an engine or a snapshot don't affect each other."""
        values = numbered(700)
        put(engine, DATA, values)
        with engine.snapshot() as snapshot:
            readers: list[Reader] = [engine, snapshot, snapshot, engine]
            scans = [reader.scan(DATA, reverse=number % 2 == 1) for number, reader in enumerate(readers)]
            found: list[list[Any]] = [[] for _ in scans]
            running = set(range(4))
            while running:
                for number in sorted(running):
                    chunk = next(scans[number], None)
                    if chunk is None:
                        running.remove(number)
                    else:
                        found[number] += chunk
        everything = list(values.items())
        assert [everything, everything[::-1]] * 2 == found
