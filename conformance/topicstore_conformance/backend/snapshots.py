"""Promises about isolation: a scan sees the moment of its first list, a snapshot that of its making."""

from __future__ import annotations

from topicstore.contract.engine import DATA, Engine, WriteBatch

from .fixtures import Fixtures, numbered, pairs, put, remove

__all__ = ["Snapshots", "disturb"]


def disturb(engine: Engine) -> None:
    """Overwrite, delete and add values, over keys that were there and between them."""
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 2, 100), (1, 2, 150))
    for number in range(0, 2000, 2):
        batch.put(DATA, (1, 2, number), b"later")
        batch.delete(DATA, (1, 2, number + 1))
        batch.put(DATA, (1, 3, number), b"later")
    engine.write(batch)


class Snapshots(Fixtures):
    """Promises about isolation."""

    def test_a_scan_sees_the_moment_of_its_first_list(self, engine: Engine) -> None:
        """A scan sees what was written before its first list was asked for, and nothing later."""
        for reverse in (False, True):
            scan = engine.scan(DATA, reverse=reverse)
            put(engine, DATA, numbered(1000))
            first = next(scan, [])
            disturb(engine)
            expected = list(numbered(1000).items())
            assert (expected[::-1] if reverse else expected) == first + pairs(scan)
            remove(engine, DATA, (0, 0, 0), (9, 0, 0))

    def test_a_scan_outlives_a_range_delete(self, engine: Engine) -> None:
        """A scan that has begun goes on over keys that a range delete removes, as dropping a generation does."""
        values = numbered(5_000)
        put(engine, DATA, values)
        scans = [engine.scan(DATA), engine.scan(DATA, reverse=True)]
        firsts = [next(scan) for scan in scans]
        remove(engine, DATA, (0, 0, 0), (2, 0, 0))
        engine.reclaim(DATA, (0, 0, 0), (2, 0, 0))
        put(engine, DATA, {(1, 2, 17): b"new"})
        expected = list(values.items())
        assert [expected, expected[::-1]] == [first + pairs(scan) for first, scan in zip(firsts, scans, strict=True)]
        assert pairs(engine.scan(DATA)) == [((1, 2, 17), b"new")]
