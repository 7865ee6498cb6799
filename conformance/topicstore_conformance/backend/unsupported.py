"""Tests of capabilities: a declared one works, and calls that need an undeclared one raise `UnsupportedError`.

Also tests of the statistics and of the damage reports that every engine returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pytest
from topicstore.contract.engine import CAPABILITIES, DATA, KEYSPACES, META, STATE, Backend, Engine, WriteBatch
from topicstore.contract.errors import EngineError, InvalidArgumentError, TopicstoreError, UnsupportedError

from topicstore_conformance.conditions.capabilities import requires, without
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults import namespaces
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .crashes import check_batches, last_batch, written
from .fixtures import Fixtures, keys, numbered, pairs, put, remove

__all__ = ["Unsupported"]

SEEKS_A_WALK = 30
"""The least ratio of the CPU time of a full scan of 60,000 keys to that of a seek, if seeks are declared fast.

The ratio is usually some hundreds.
"""


def rows(generation: int, first: int, count: int) -> pa.Table:
    """Return rows for `WriteBatch.put_rows` into the keyspace ``data``."""
    positions = range(first, first + count)
    return pa.table(
        {
            "generation": pa.array([generation] * count, pa.uint32()),
            "stream": pa.array([0] * count, pa.uint64()),
            "position": pa.array(positions, pa.uint64()),
            "word": [f"w{number}" for number in positions],
        }
    )


def read(make: child.Make, path: Path) -> None:
    """Open the shard read-only while its writer has it open; report the number of pairs, then the error of a write."""
    engine = make().open_reader(path, KEYSPACES, alone=False)
    child.tell(sum(map(len, engine.scan(DATA))))
    try:
        put(engine, STATE, {b"child": b"was here"})
    except TopicstoreError as refused:
        child.tell(type(refused).__name__)
    engine.close()


def seconds(work: Callable[[], None]) -> float:
    """Return the CPU time in seconds that this process spends, in all its threads, during a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


WRONG = (
    "",
    "selec",
    "select 1; select 2",
    "select nothing from words",
    "select * from nothing",
    "select cast('a' as integer)",
    "select ? + ?",
    "select * from read_csv('/missing/words.csv')",
    "insert into words select * from words",
    "delete from words",
    "with gone as (delete from words returning *) select * from gone",
    "explain analyze delete from words",
    "drop table words",
    "create table t as select 1",
    "create temp table t as select 1",
    "begin",
    "select 1; delete from words",
)
"""Texts that are not one valid read-only SQL statement."""


def positions(engine: Engine, *beside: Engine) -> list[int]:
    """Return the positions of all rows, in the order in which SQL returns them."""
    found: list[int] = engine.sql("select position from words", beside=beside)["position"].to_pylist()
    return found


def put_rows(engine: Engine, table: pa.Table) -> None:
    """Append rows in one batch."""
    batch = WriteBatch()
    batch.put_rows(DATA, "words", table, table.num_rows)
    engine.write(batch)


class Unsupported(Fixtures):
    """Tests of capabilities, statistics and damage reports."""

    def test_capabilities_are_known(self, subject: BackendSubject) -> None:
        """Only a ``persistent`` backend declares ``sync``, ``reclaims_disk`` or ``concurrent_readers``."""
        told = subject.capabilities & CAPABILITIES
        assert "persistent" in told or not told & {"sync", "reclaims_disk", "concurrent_readers"}

    # --- checkpoint ---

    @without("checkpoint")
    def test_checkpoints_raise_where_undeclared(self, engine: Engine, directory: Path) -> None:
        """Without the capability ``checkpoint``, `checkpoint` raises UnsupportedError and creates nothing."""
        put(engine, STATE, {b"k": b"v"})
        with pytest.raises(UnsupportedError):
            engine.checkpoint(directory / "copy")
        assert not (directory / "copy").exists()

    @requires("checkpoint")
    def test_a_checkpoint_is_of_its_second_step(
        self, backend: Backend, subject: BackendSubject, shard: Path, directory: Path
    ) -> None:
        """A checkpoint made in steps holds all writes before its second step, and none after.

        Another backend object can open it at once, also while reads of the engine that began meanwhile are open.
        """
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            put(engine, STATE, {b"1": b"before"})
            steps = engine.checkpoint_steps(directory / "copy")
            next(steps)
            put(engine, STATE, {b"2": b"between"})
            next(steps)
            put(engine, STATE, {b"3": b"after"})
            with engine.snapshot() as snapshot:
                scan = engine.scan(STATE)
                seen = [*next(scan), *pairs(snapshot.scan(STATE))]
                assert [] == list(steps)
                with closing(subject.make().open_shard(directory / "copy", KEYSPACES, create=False)) as copy:
                    assert [(b"1", b"before"), (b"2", b"between")] == pairs(copy.scan(STATE))
                assert [(b"1", b"before"), (b"2", b"between"), (b"3", b"after")] == sorted(set(seen))

    @requires("checkpoint")
    def test_a_checkpoint_needs_a_new_directory(self, engine: Engine, directory: Path) -> None:
        """A checkpoint into an existing directory raises EngineError and doesn't change the directory."""
        (directory / "copy").mkdir()
        (directory / "copy" / "precious").write_text("kept")
        with pytest.raises(EngineError):
            engine.checkpoint(directory / "copy")
        assert [file.read_text() for file in (directory / "copy").iterdir()] == ["kept"]

    # --- rows and SQL ---

    @without("sql")
    def test_rows_and_sql_raise_where_undeclared(self, engine: Engine) -> None:
        """Without the capability ``sql``, `sql` and batches with rows raise UnsupportedError and apply nothing."""
        with pytest.raises(UnsupportedError):
            engine.sql("select 1")
        batch = WriteBatch()
        batch.put(STATE, b"before", b"")
        batch.put_rows(DATA, "words", rows(1, 0, 3), 3)
        with pytest.raises(UnsupportedError):
            engine.write(batch)
        assert engine.get(STATE, b"before") is None

    @requires("sql")
    def test_rows_are_read_by_sql(self, engine: Engine) -> None:
        """SQL returns rows in the order in which they were put, without rows that range deletes have removed."""
        for first in (0, 10, 20):
            put_rows(engine, rows(1, first, 10))
        put_rows(engine, rows(2, 0, 3))
        remove(engine, DATA, (1, 0, 5), (1, 0, 25))
        found = engine.sql("select generation, position, word from words").to_pylist()
        expected = [(1, number) for number in (*range(5), *range(25, 30))] + [(2, number) for number in range(3)]
        assert [{"generation": g, "position": p, "word": f"w{p}"} for g, p in expected] == found
        assert engine.sql("select count(*) as n from words where position >= ?", [28]).to_pylist() == [{"n": 2}]
        batch = WriteBatch()
        batch.delete(DATA, (1, 0, 29))
        batch.delete_range(DATA, (1, 0, 0), (1, 0, 28))
        batch.put_rows(DATA, "words", rows(1, 5, 1), 0)
        engine.write(batch)
        assert [28, 0, 1, 2, 5] == positions(engine)

    @requires("sql")
    def test_refused_rows_apply_nothing(self, engine: Engine) -> None:
        """Rows with another schema, in a keyspace of bytes, or named like a keyspace raise and apply nothing."""
        put_rows(engine, rows(1, 0, 1))
        wider = rows(1, 1, 1).append_column("more", pa.array([1]))
        wrong: list[tuple[Any, str, pa.Table, type[Exception]]] = [
            (DATA, "words", wider, EngineError),
            (META, "others", rows(1, 1, 1), InvalidArgumentError),
            (DATA, "state", rows(1, 1, 1), InvalidArgumentError),
        ]
        for keyspace, name, table, error in wrong:
            batch = WriteBatch()
            batch.put(STATE, b"k", b"v")
            batch.put_rows(keyspace, name, table, 0)
            with pytest.raises(error):
                engine.write(batch)
            assert engine.get(STATE, b"k") is None
            assert [0] == positions(engine)

    @requires("sql", "persistent")
    def test_several_shards_are_one_table(self, backend: Backend, subject: BackendSubject, directory: Path) -> None:
        """A statement reads the tables of several shards as one, if all were opened with the same backend object."""
        first, second, third = (backend.open_shard(directory / name, KEYSPACES, create=True) for name in "abc")
        other = subject.make().open_shard(directory / "other", KEYSPACES, create=True)
        put_rows(first, rows(1, 1, 2))
        put_rows(third, rows(1, 7, 1))
        assert [1, 2, 7] == sorted(positions(first, second, third)) == sorted(positions(second, first, third))
        assert [1, 2] == positions(first)
        with pytest.raises(InvalidArgumentError):
            positions(first, other)
        for engine in (first, second, third, other):
            engine.close()

    @requires("sql")
    def test_sql_only_reads(self, engine: Engine) -> None:
        """Statements that are invalid, several in one call, or write raise InvalidArgumentError and change nothing."""
        put_rows(engine, rows(1, 0, 3))
        for statement in WRONG:
            with pytest.raises(InvalidArgumentError):
                engine.sql(statement)
        assert engine.sql("select count(*) as n from words").to_pylist() == [{"n": 3}]

    @requires("sql", "persistent")
    def test_rows_are_there_after_reopening(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """Rows persist over close and open and in checkpoints, and can be added and range-deleted afterwards."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put_rows(engine, rows(1, 0, 3))
        engine.close()
        engine = backend.open_shard(shard, KEYSPACES, create=False)
        put_rows(engine, rows(1, 3, 3))
        assert [*range(6)] == positions(engine)
        remove(engine, DATA, (1, 0, 0), (1, 0, 2))
        assert [*range(2, 6)] == positions(engine)
        if "checkpoint" in subject.capabilities:
            engine.checkpoint(shard.with_name("copy"))
            put_rows(engine, rows(1, 6, 1))
            copy = backend.open_shard(shard.with_name("copy"), KEYSPACES, create=False)
            assert [*range(2, 6)] == positions(copy)
            copy.close()
        engine.close()

    # --- other processes ---

    @requires("concurrent_readers")
    def test_another_process_reads(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A read-only process sees the writes made before it opened the shard, and its own write raises."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, DATA, numbered(5))
        put(engine, DATA, numbered(9))
        assert child.run(subject.make, read, shard) == [9, "ReadOnlyDatabaseError"]
        assert engine.get(STATE, b"child") is None
        engine.close()

    @requires("concurrent_readers")
    def test_another_process_reads_what_it_cannot_write(
        self, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """A process for which the shard's directory is on a read-only file system reads the shard."""
        if (reason := namespaces.why_not()) is not None:
            pytest.skip(reason)
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            put(engine, DATA, numbered(9))
            inside = namespaces.mounted(namespaces.READ_ONLY, shard)
            assert [9, "ReadOnlyDatabaseError"] == child.run(subject.make, read, shard, inside=inside)

    @requires("persistent")
    @without("concurrent_readers")
    def test_nobody_reads_beside_the_writer(self, backend: Backend, shard: Path) -> None:
        """Without the capability, `open_reader` raises UnsupportedError unless no other process has the shard open."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, DATA, numbered(5))
        with pytest.raises(UnsupportedError):
            backend.open_reader(shard, KEYSPACES, alone=False)
        engine.close()
        engine = backend.open_reader(shard, KEYSPACES, alone=True)
        assert list(numbered(5).items()) == pairs(engine.scan(DATA))
        engine.close()

    # --- seeks and space ---

    @requires("fast_seek")
    def test_seeks_are_fast(self, engine: Engine) -> None:
        """If fast seeks are declared, a scan's first chunk costs far less CPU time than a full scan, at any start."""
        draw = random.Random(3)
        batch = WriteBatch()
        count = 60_000
        batch.put_many(DATA, [(1, number, 0) for number in range(count)], [bytes(20)] * count)
        engine.write(batch)

        def walk() -> None:
            assert count == sum(map(len, engine.scan(DATA)))

        def seek() -> None:
            start = draw.randrange(count)
            first = next(engine.scan(DATA, (1, start, 0), (2, 0, 0)))
            assert first[0][0] == (1, start, 0)

        walking, seeking = [seconds(walk) for _ in range(3)], [seconds(seek) for _ in range(51)]
        assert SEEKS_A_WALK * median(seeking) < median(walking)

    @requires("reclaims_disk")
    def test_deleted_bytes_go_back(self, engine: Engine) -> None:
        """Reclaiming a deleted range frees the disk space of its values, also beside scans that have ended."""
        draw = random.Random(3)
        for generation in (1, 2):
            for number in range(100):
                put(engine, DATA, {(generation, 0, number): draw.randbytes(100_000)})
        engine.flush_log()
        ended = [engine.scan(DATA, reverse=reverse) for reverse in (False, True)]
        assert [200, 200] == [len(keys(scan)) for scan in ended]
        full = engine.info().disk_bytes
        remove(engine, DATA, (1, 0, 0), (2, 0, 0))
        engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
        wait_until(lambda: engine.info().disk_bytes < 0.7 * full, "the deleted bytes to go back")
        assert len(keys(engine.scan(DATA))) == 100

    @requires("reclaims_disk")
    def test_deleted_bytes_that_were_never_flushed_go_back(self, engine: Engine) -> None:
        """Reclaiming also frees the disk space of values that no call has moved from the log to other files."""
        draw = random.Random(4)
        before = engine.info().disk_bytes
        for number in range(50):
            put(engine, DATA, {(1, 0, number): draw.randbytes(20_000)})
        put(engine, DATA, {(2, 0, 0): b"kept"})
        remove(engine, DATA, (1, 0, 0), (2, 0, 0))
        engine.reclaim(DATA, (1, 0, 0), (2, 0, 0))
        wait_until(lambda: engine.info().disk_bytes < before + 500_000, "the deleted bytes to go back")
        assert pairs(engine.scan(DATA)) == [((2, 0, 0), b"kept")]

    # --- statistics and verification ---

    def test_stats_are_sizes(self, engine: Engine, subject: BackendSubject) -> None:
        """`info` returns sizes in bytes that grow with the stored data: on disk, or in memory if not persistent."""
        before = engine.info()
        put(engine, DATA, {(1, 0, number): random.Random(number).randbytes(20_000) for number in range(100)}, sync=True)
        after = engine.info()
        persistent = "persistent" in subject.capabilities
        grown = after.disk_bytes - before.disk_bytes if persistent else after.memory_bytes - before.memory_bytes
        assert grown > 1_000_000
        numbers = [value for value in (*before.details.values(), *after.details.values()) if isinstance(value, int)]
        assert min(before.disk_bytes, before.memory_bytes, after.memory_bytes, *numbers) >= 0

    def test_nothing_is_damaged(self, engine: Engine) -> None:
        """`verify` reports nothing for an undamaged engine."""
        put(engine, DATA, numbered(1_000))
        remove(engine, DATA, (1, 2, 100), (1, 2, 900))
        assert list(engine.verify()) == []

    @requires("persistent")
    def test_much_that_is_written_and_deleted_stays_right(
        self, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """After many batches that each delete an earlier one, exactly the last are stored, also after reopening."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        count = tries(40, 40, subject.capabilities)
        for first in range(0, 3 * count, count):
            assert list(range(first, first + count)) == list(written(engine, first, count))
            check_batches(engine)
            engine.close()
            engine = backend.open_shard(shard, KEYSPACES, create=False)
            assert first + count - 1 == last_batch(engine)
            check_batches(engine)
        engine.close()
