"""Tests of isolation: a scan shows the state when its first chunk is read, a snapshot the state when it is made."""

from __future__ import annotations

from typing import Any

from topicstore.contract.engine import DATA, KEYSPACES, META, STATE, Engine, Key, Keyspace, WriteBatch

from .fixtures import Fixtures, Pair, contents, numbered, pairs, put, remove

__all__ = ["Snapshots", "disturb"]

MUCH = 100
"""The number of large values that are written: together they exceed the smallest write buffers."""


def disturb(engine: Engine) -> None:
    """Overwrite some of the values of `numbered`, delete the others, and add new keys."""
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 2, 100), (1, 2, 150))
    for number in range(0, 2000, 2):
        batch.put(DATA, (1, 2, number), b"later")
        batch.delete(DATA, (1, 2, number + 1))
        batch.put(DATA, (1, 3, number), b"later")
    engine.write(batch)


class Snapshots(Fixtures):
    """Tests of isolation."""

    def test_a_scan_sees_the_moment_of_its_first_list(self, engine: Engine) -> None:
        """A scan shows the writes before its first chunk was requested, and no later ones."""
        for reverse in (False, True):
            scan = engine.scan(DATA, reverse=reverse)
            put(engine, DATA, numbered(1000))
            first = next(scan, [])
            disturb(engine)
            expected = list(numbered(1000).items())
            assert (expected[::-1] if reverse else expected) == first + pairs(scan)
            remove(engine, DATA, (0, 0, 0), (9, 0, 0))

    def test_a_scan_outlives_a_range_delete(self, engine: Engine) -> None:
        """A scan still yields keys that a range delete removes after the scan began."""
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

    def test_a_snapshot_sees_the_moment_it_was_made(self, engine: Engine) -> None:
        """A snapshot shows no later write, in get, in get_many, and in scans that begin before or after the write."""
        put(engine, DATA, numbered(1000))
        put(engine, STATE, {b"p": b"1"})
        expected = list(numbered(1000).items())
        with engine.snapshot() as snapshot:
            early = snapshot.scan(DATA)
            first = next(early)
            disturb(engine)
            put(engine, STATE, {b"p": b"2", b"q": b"2"})
            late, down = snapshot.scan(DATA, (1, 2, 100)), snapshot.scan(DATA, end=(1, 2, 900), reverse=True)
            turns = [first, next(late), next(down)]
            assert snapshot.get_many(STATE, [b"p", b"q"]) == [b"1", None]
            assert snapshot.get(DATA, (1, 2, 1)) == b"\0\0\1"
            assert snapshot.get(DATA, (1, 3, 0)) is None
            assert expected == turns[0] + pairs(early)
            assert expected[100:] == turns[1] + pairs(late)
            assert expected[:900][::-1] == turns[2] + pairs(down)
            assert expected[-3:][::-1] == pairs(snapshot.scan(DATA, reverse=True, limit=3))
            assert pairs(snapshot.scan(DATA, (1, 3, 0))) == []
        assert engine.get(DATA, (1, 3, 0)) == b"later"

    def test_scans_that_take_turns_lose_no_key(self, engine: Engine) -> None:
        """Interleaved scans of a snapshot or of the engine each yield every key once, also neighbouring ones."""
        near: dict[Any, bytes] = {b"k" + bytes(length): b"%d" % length for length in range(500)}
        next_to: dict[Any, bytes] = {(1, 1, number): b"%d" % number for number in range(500)}
        put(engine, META, near)
        put(engine, DATA, next_to)
        with engine.snapshot() as snapshot:
            for reader in (snapshot, engine):
                spaces: list[tuple[Keyspace[Any], dict[Any, bytes]]] = [(META, near), (DATA, next_to)]
                for keyspace, given in spaces:
                    expected = list(given.items())
                    rows: list[list[Pair]] = [expected, expected[::-1], expected[:300], expected[200:][::-1]]
                    scans = [
                        reader.scan(keyspace),
                        reader.scan(keyspace, reverse=True),
                        reader.scan(keyspace, limit=300),
                        reader.scan(keyspace, expected[200][0], reverse=True),
                    ]
                    found: list[list[Pair]] = [[], [], [], []]
                    while chunks := [next(scan, []) for scan in scans]:
                        for row, chunk in zip(found, chunks, strict=True):
                            row += chunk
                        if not any(chunks):
                            break
                    assert rows == found

    def test_a_snapshot_is_one_moment_of_all_keyspaces(self, engine: Engine) -> None:
        """A snapshot is consistent over all keyspaces, even after later writes exceed the write buffers."""
        for keyspace in KEYSPACES:
            some: list[Key] = [b"a", b"b"] if keyspace.shape is None else [(1, 0, 0), (1, 0, 1)]
            put(engine, keyspace, dict.fromkeys(some, b"before"))
        before = contents(engine)
        with engine.snapshot() as snapshot:
            for number in range(MUCH):
                put(engine, DATA, {(1, 1, number): b"%d" % number * 50_000})
            remove(engine, DATA, (0, 0, 0), (2, 0, 0))
            remove(engine, META, b"", b"z")
            put(engine, STATE, {b"a": b"after", b"c": b"after"})
            engine.reclaim(DATA, (0, 0, 0), (2, 0, 0))
            assert before == contents(snapshot)
        assert pairs(engine.scan(DATA)) + pairs(engine.scan(META)) == []

    def test_two_snapshots_see_two_moments(self, engine: Engine) -> None:
        """Two snapshots each show the state when they were made, and closing one doesn't affect the other."""
        put(engine, STATE, {b"k": b"1"})
        first = engine.snapshot()
        put(engine, STATE, {b"k": b"2"})
        second = engine.snapshot()
        put(engine, STATE, {b"k": b"3"})
        assert [reader.get(STATE, b"k") for reader in (first, second, engine)] == [b"1", b"2", b"3"]
        first.close()
        assert pairs(second.scan(STATE)) == [(b"k", b"2")]
        second.close()
