"""Tests of thread safety: reads during writes, threads that share a snapshot, and close during other calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Backend, Engine, Key, Keyspace, WriteBatch
from topicstore.contract.errors import DatabaseClosedError

from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, together, wait_until
from topicstore_conformance.subjects.subject import BackendSubject

from .changes import key_of
from .fixtures import Fixtures, keys, numbered, pairs, put, remove

__all__ = ["Concurrency"]

SEEN = 30
"""The number of reads after which a concurrent writer may stop."""
SPOTS: list[tuple[Keyspace[Any], Key]] = [
    (STATE, b"k"),
    (META, b"k"),
    (DATA, (1, 1, 1)),
    (DATA, (1, 1, 2)),
    (INDEX, (9, 9, 9)),
]


class Concurrency(Fixtures):
    """Tests of thread safety."""

    def test_readers_beside_a_writer_see_whole_batches(self, subject: BackendSubject, engine: Engine) -> None:
        """A reader concurrent with a writer sees each batch whole or not at all, by get_many, scans and snapshots."""
        done, seen = Event(), list[set[bytes]]()

        def write(number: int) -> None:
            batch = WriteBatch()
            for keyspace, key in SPOTS:
                batch.put(keyspace, key, number.to_bytes(4, "big"))
            for row in range(50):  # so many rows that half a batch would be visible for a while
                batch.put(DATA, (2, number % 7, row), b"")
            engine.write(batch)

        def write_all() -> None:
            try:
                for number in range(1, tries(500, 2_000, subject.capabilities)):
                    write(number)
                while len(seen) < SEEN and not done.wait(MOMENT):
                    write(1)
            finally:
                done.set()

        def read() -> None:
            try:
                while not done.wait(MOMENT):
                    with engine.snapshot() as snapshot:
                        values = {snapshot.get(keyspace, key) or b"" for keyspace, key in SPOTS}
                        values |= {value for _, value in pairs(snapshot.scan(DATA, (1, 0, 0), (2, 0, 0)))}
                    seen.append(values)
                    seen.append({value for _, value in pairs(engine.scan(DATA, (1, 0, 0), (2, 0, 0)))})
                    seen.append({value or b"" for value in engine.get_many(DATA, [(1, 1, 1), (1, 1, 2)])})
            finally:
                done.set()

        write(0)
        together(write_all, read, read)
        assert [values for values in seen if len(values) != 1] == []

    def test_scans_beside_a_writer_are_whole(self, subject: BackendSubject, engine: Engine) -> None:
        """A scan concurrent with puts and range deletes yields exactly the pairs that existed when the scan began."""
        done, odd, seen = Event(), list[Any](), list[int]()
        least = tries(20, 600, subject.capabilities)
        whole = {(1, 2, number): b"same" for number in range(1_000)}
        put(engine, DATA, whole)
        put(engine, DATA, {(2, 0, row): b"0" for row in range(100)})

        def write() -> None:
            try:
                number = 0
                while number < least or (len(seen) < SEEN and not done.wait(MOMENT)):
                    number += 1
                    batch = WriteBatch()
                    batch.put_many(DATA, [(2, number, row) for row in range(100)], [b"%d" % number] * 100)
                    batch.delete_range(DATA, (2, 0, 0), (2, number, 0))
                    engine.write(batch)
            finally:
                done.set()

        def read(*, reverse: bool) -> None:
            try:
                while not done.wait(MOMENT):
                    found = pairs(engine.scan(DATA, reverse=reverse))
                    moving = [key for key, _ in found if key[0] == 2]
                    numbers = {key[1] for key in moving}
                    seen.append(len(found))
                    if len(found) - len(moving) != 1_000 or len(moving) != 100 or len(numbers) != 1:
                        odd.append((len(found), len(moving), sorted(numbers)))
            finally:
                done.set()

        together(write, lambda: read(reverse=False), lambda: read(reverse=True))
        assert odd == []

    def test_any_thread_may_go_on_with_a_scan(self, engine: Engine) -> None:
        """One thread can continue a scan that another began, and several threads can read one snapshot."""
        values = numbered(3_000)
        put(engine, DATA, values)
        scan = engine.scan(DATA)
        first = next(scan)
        assert list(values.items()) == first + together(lambda: pairs(scan))[0]
        with engine.snapshot() as snapshot:
            put(engine, DATA, {(1, 2, 9): b"later"})
            forward, backward, got = together(
                lambda: pairs(snapshot.scan(DATA)),
                lambda: pairs(snapshot.scan(DATA, reverse=True)),
                lambda: snapshot.get_many(DATA, list(values)),
            )
        assert [list(values.items()), list(values.items())[::-1]] == [forward, backward]
        assert list(values.values()) == got

    # --- close ---

    def test_everything_raises_after_close(self, subject: BackendSubject, engine: Engine) -> None:
        """After close every call raises DatabaseClosedError, also on open scans and snapshots; close is idempotent."""
        put(engine, DATA, numbered(500))
        scan, unasked, snapshot = engine.scan(DATA), engine.scan(DATA), engine.snapshot()
        within = snapshot.scan(DATA, reverse=True)
        next(scan)
        next(within)
        engine.close()
        engine.close()
        batch = WriteBatch()
        batch.put(STATE, b"k", b"v")
        optional: dict[str, Callable[[], object]] = {
            "sql": lambda: engine.sql("select 1"),
            "checksums": lambda: list(engine.verify()),
            "reclaims_disk": lambda: engine.reclaim(DATA, (0, 0, 0), (9, 0, 0)),
        }
        for call in (
            *(call for capability, call in optional.items() if capability in subject.capabilities),
            lambda: next(scan),
            lambda: next(unasked),
            lambda: next(within),
            lambda: next(snapshot.scan(DATA)),
            lambda: snapshot.get(DATA, (1, 2, 3)),
            lambda: snapshot.get_many(DATA, [(1, 2, 3)]),
            *(
                partial(read, keyspace)
                for keyspace in KEYSPACES
                for read in (
                    lambda keyspace: engine.get(keyspace, key_of(keyspace, 1)),
                    lambda keyspace: engine.get_many(keyspace, [key_of(keyspace, 1)]),
                    lambda keyspace: next(engine.scan(keyspace)),
                )
            ),
            lambda: engine.write(batch),
            engine.flush_log,
            engine.snapshot,
            engine.info,
        ):
            with pytest.raises(DatabaseClosedError):
                call()
        snapshot.close()

    def test_a_closed_snapshot_reads_nothing(self, engine: Engine) -> None:
        """Reads from a closed snapshot raise DatabaseClosedError, its engine still reads, and close is idempotent."""
        put(engine, DATA, numbered(500))
        snapshot = engine.snapshot()
        scan, unasked = snapshot.scan(DATA), snapshot.scan(DATA)
        next(scan)
        snapshot.close()
        snapshot.close()
        for read in (lambda: next(scan), lambda: next(unasked), lambda: snapshot.get(DATA, (1, 2, 3))):
            with pytest.raises(DatabaseClosedError):
                read()
        assert len(keys(engine.scan(DATA))) == 500

    def test_close_beside_all_other_calls(self, engine: Engine) -> None:
        """A call that runs during close returns its result or raises DatabaseClosedError, and never hangs."""
        put(engine, DATA, numbered(5000))
        shared = engine.snapshot()

        def scan() -> None:
            assert len(keys(engine.scan(DATA))) == 5000
            with engine.snapshot() as snapshot:
                assert len(keys(snapshot.scan(DATA, reverse=True))) == 5000

        def get() -> None:
            for reader in (engine, shared):
                assert None not in reader.get_many(DATA, [(1, 2, number) for number in range(100)])
            assert engine.get(DATA, (1, 2, 3)) == b"\0\0\3"

        def write() -> None:
            put(engine, INDEX, {(1, 0, number): bytes(1_000) for number in range(100)})
            engine.flush_log()
            engine.reclaim(INDEX, (0, 0, 0), (2, 0, 0))

        def look() -> None:
            assert list(engine.verify()) == []
            engine.info()

        def repeat(work: Callable[[], None], begun: Event) -> str:
            try:
                while True:
                    work()
                    begun.set()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
                return type(error).__name__
            finally:
                begun.set()

        works = [(work, Event()) for work in (scan, get, write, look)]
        ends = [begin(partial(repeat, *work)) for work in works]
        assert all(begun.wait(PATIENCE) for _, begun in works)
        begin(engine.close).result(PATIENCE)
        assert [end.result(PATIENCE) for end in ends] == ["DatabaseClosedError"] * 4

    def test_close_beside_a_long_look_up(self, backend: Backend, shard: Path) -> None:
        """Close waits for another thread's `get_many` of many keys, which then returns all values."""
        for number in range(3):
            engine = backend.open_shard(shard.with_name(f"shard-{number}"), KEYSPACES, create=True)
            put(engine, DATA, numbered(5_000))
            descending, begun = [(1, 2, key) for key in reversed(range(5_000))] * 4, Event()

            def repeat(engine: Engine = engine, asked: list[Any] = descending, begun: Event = begun) -> None:
                while True:
                    assert None not in engine.get_many(DATA, asked)
                    begun.set()

            looking = begin(repeat)
            assert begun.wait(PATIENCE)
            engine.close()
            with pytest.raises(DatabaseClosedError):
                looking.result(PATIENCE)

    def test_close_waits_for_no_scan_that_nobody_reads(self, engine: Engine) -> None:
        """Close doesn't wait for half-read scans or snapshots; reading them afterwards raises DatabaseClosedError."""
        put(engine, DATA, numbered(2_000))
        held: list[Any] = [engine.scan(DATA) for _ in range(20)]
        for scan in held:
            next(scan)
        snapshots = [engine.snapshot() for _ in range(20)]
        closing = begin(engine.close)
        wait_until(closing.done, "close to return")
        closing.result()
        for scan in held:
            with pytest.raises(DatabaseClosedError):
                next(scan)
        for snapshot in snapshots:
            with pytest.raises(DatabaseClosedError):
                snapshot.get(DATA, (1, 2, 3))

    def test_writes_go_on_beside_what_is_left_open(self, engine: Engine) -> None:
        """Open scans and snapshots block no writer."""
        put(engine, DATA, numbered(2_000))
        scan, snapshot = engine.scan(DATA), engine.snapshot()
        next(scan)
        within = snapshot.scan(DATA)
        next(within)

        def write() -> None:
            for number in range(50):
                put(engine, DATA, {(1, 3, number): b""}, sync=number % 10 == 0)
            remove(engine, DATA, (1, 0, 0), (2, 0, 0))
            engine.flush_log()

        writing = begin(write)
        wait_until(writing.done, "the writes to return")
        writing.result()
        assert pairs(engine.scan(DATA)) == []
        snapshot.close()
