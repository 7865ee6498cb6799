"""Tests of closing and opening: the data that persists, and the processes that may open a shard."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    KEYSPACES,
    META,
    STATE,
    Backend,
    Engine,
    Key,
    Keyspace,
    WriteBatch,
)
from topicstore.contract.errors import (
    CorruptionError,
    DataLossError,
    EngineError,
    ForkedProcessError,
    TopicstoreError,
)

from topicstore_conformance.conditions.capabilities import requires, without
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .child import Make
from .fixtures import Fixtures, contents, numbered, pairs, put

__all__ = ["Reopening"]

EDGES: list[tuple[Keyspace[Any], Key, bytes]] = [
    (STATE, b"", b"empty key"),
    (STATE, b"empty value", b""),
    (META, b"\0", b"\0"),
    (META, b"\xff\xff", b"\xff" * 300),
    (KEYS, b"\0\0\0\1key", bytes(range(256)) * 300),
    (DATA, (0, 0, 0), b"lowest"),
    (DATA, (2**32 - 1, 2**64 - 1, 2**64 - 1), b"highest"),
    (INDEX, (1, 2, 3), b"between"),
]


def open_and_write(make: Make, path: Path) -> None:
    """Open the shard and write to it; report "refused" if opening raises EngineError."""
    try:
        engine = make().open_shard(path, KEYSPACES, create=False)
    except EngineError:
        child.tell("refused")
        return
    put(engine, STATE, {b"child": b"was here"})
    engine.close()


def use_new(make: Make, path: Path) -> None:
    """Create a shard, and write, reclaim and read in it."""
    with closing(make().open_shard(path, KEYSPACES, create=True)) as engine:
        put(engine, DATA, numbered(500))
        engine.reclaim(DATA, (1, 2, 0), (1, 2, 500))
        assert list(numbered(500).items()) == pairs(engine.scan(DATA))


def fork(make: Make, path: Path) -> None:
    """Fork a child that uses its parent's engine, scan and snapshot, and exits normally.

    The child also opens a shard of its own, which is refused or works, but may not hang: an alarm ends the child then.
    Reports each attempt that succeeded in the child, then the child's return code, then the number of pairs that the
    parent reads from a scan begun before the fork.
    """
    engine = make().open_shard(path, KEYSPACES, create=True)
    put(engine, DATA, numbered(500))
    engine.reclaim(DATA, (1, 2, 0), (1, 2, 1))  # some engines start threads only then
    scan, snapshot = engine.scan(DATA), engine.snapshot()
    first = next(scan)
    attempts: list[Callable[[], object]] = [
        lambda: next(scan),
        lambda: engine.get(DATA, (1, 2, 3)),
        lambda: snapshot.get(DATA, (1, 2, 3)),
        lambda: put(engine, STATE, {b"child": b"was here"}),
    ]
    forked = os.fork()
    if not forked:
        signal.alarm(int(PATIENCE))
        with suppress(ForkedProcessError):
            use_new(make, path.with_name("own"))
        for number, attempt in enumerate(attempts):
            try:
                attempt()
            except TopicstoreError:
                continue
            child.tell(number)
        for close in (engine.close, snapshot.close):
            with suppress(TopicstoreError):
                close()
        del engine, scan, snapshot, attempts, attempt, close
        sys.exit(0)  # runs Python's exit handlers and finalizers
    child.tell(["ended", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])])
    child.tell(["read", len(first + pairs(scan))])
    put(engine, STATE, {b"parent": b"is here"}, sync=True)
    engine.close()


class Reopening(Fixtures):
    """Tests that a shard has its data after it was closed and opened again, and that only one engine has it open.

    They also test the errors of opening, forked processes, and the bytes in the underlying store.
    """

    @requires("persistent")
    def test_everything_is_there_after_reopening(self, backend: Backend, shard: Path) -> None:
        """After close and open the shard reflects all puts, deletes and range deletes, including the last batch."""
        expected: dict[tuple[int, int, int], bytes] = {}

        def delete(*, single: bool, start: tuple[int, int, int], end: tuple[int, int, int]) -> None:
            batch = WriteBatch()
            batch.delete_range(DATA, start, end)
            if single:
                batch.delete(DATA, end)
            engine.write(batch)
            for key in [key for key in expected if start <= key < end or (single and key == end)]:
                del expected[key]

        for opening in range(6):
            engine = backend.open_shard(shard, KEYSPACES, create=opening == 0)
            assert sorted(expected.items()) == pairs(engine.scan(DATA))
            assert [(b"last", b"%d" % (opening - 1))] * (opening > 0) == pairs(engine.scan(STATE))
            for number in range(40):
                put(engine, DATA, {(1, opening, number): b"%d" % number}, sync=number == 20)
                expected[1, opening, number] = b"%d" % number
            if opening % 2:
                delete(single=True, start=(1, opening // 2, 7), end=(1, opening, 9))
            put(engine, STATE, {b"last": b"%d" % opening})
            if opening > 2:
                delete(single=opening > 3, start=(1, opening, 20), end=(1, opening, 30))
            engine.close()

    @requires("persistent")
    def test_creating_what_is_there_opens_it(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """Opening an existing shard with ``create`` doesn't change the shard, also with another backend object."""
        for number, maker in enumerate((backend, backend, subject.make())):
            engine = maker.open_shard(shard, KEYSPACES, create=True)
            assert [b"%d" % earlier for earlier in range(number)] == [value for _, value in pairs(engine.scan(META))]
            put(engine, META, {b"%d" % number: b"%d" % number})
            engine.close()

    @requires("persistent")
    def test_a_shard_that_is_not_there_is_not_made(self, backend: Backend, directory: Path) -> None:
        """Without create, opening a missing shard raises DataLossError, which names it, and creates nothing."""
        with pytest.raises(DataLossError, match=str(directory / "shard")):
            backend.open_shard(directory / "shard", KEYSPACES, create=False)
        assert list(directory.iterdir()) == []

    @requires("persistent")
    def test_what_can_not_be_opened_is_an_engine_error(self, backend: Backend, directory: Path) -> None:
        """If a file lies in place of a shard, opening the shard raises EngineError and nothing else."""
        (directory / "shard").write_bytes(b"not a shard")
        for create in (False, True):
            with pytest.raises(EngineError):
                backend.open_shard(directory / "shard", KEYSPACES, create=create)
        assert (directory / "shard").read_bytes() == b"not a shard"

    @requires("persistent")
    def test_a_second_engine_is_refused(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A second opening of an open shard, in any process, raises EngineError and doesn't affect the first engine.

        The error is no `CorruptionError`, because nothing is damaged.
        """
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, DATA, numbered(5))
        for other in (backend, subject.make()):
            with pytest.raises(EngineError) as raised:
                other.open_shard(shard, KEYSPACES, create=True)
            assert not isinstance(raised.value, CorruptionError)
        assert child.run(subject.make, open_and_write, shard) == ["refused"]
        put(engine, STATE, {b"k": b"v"})
        engine.close()
        engine = backend.open_shard(shard, KEYSPACES, create=False)
        assert [list(numbered(5).items()), [(b"k", b"v")]] == [pairs(engine.scan(each)) for each in (DATA, STATE)]
        engine.close()

    @requires("persistent")
    def test_a_forked_child_leaves_the_shard_alone(
        self, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """A forked child's calls on its parent's engine raise, and neither these calls nor its exit harm the shard.

        An engine that the child opens itself works, or its opening raises ForkedProcessError.
        """
        assert child.run(subject.make, fork, shard) == [["ended", 0], ["read", 500]]
        engine = backend.open_shard(shard, KEYSPACES, create=False)
        assert list(numbered(500).items()) == pairs(engine.scan(DATA))
        assert pairs(engine.scan(STATE)) == [(b"parent", b"is here")]
        engine.close()

    @without("persistent")
    def test_what_does_not_persist_leaves_no_trace(self, backend: Backend, directory: Path) -> None:
        """An engine that is not persistent loses its data at close, and creates no file at its path."""
        engine = backend.open_shard(directory / "shard", KEYSPACES, create=True)
        put(engine, DATA, numbered(100))
        assert list(directory.iterdir()) == []
        engine.close()
        engine = backend.open_shard(directory / "shard", KEYSPACES, create=False)
        assert {keyspace.name: [] for keyspace in KEYSPACES} == contents(engine)
        engine.close()

    # --- bypassing the API ---

    def test_what_was_written_lies_there(
        self, engine: Engine, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """The underlying store has every written value under its key, byte for byte, and no deleted value."""
        if subject.raw_get is None:
            pytest.skip("needs raw_get, a way around the API")
        batch = WriteBatch()
        for keyspace, key, value in EDGES:
            batch.put(keyspace, key, value)
        batch.put(STATE, b"deleted", b"")
        batch.put(KEYS, b"range", b"")
        engine.write(batch)
        batch = WriteBatch()
        batch.delete(STATE, b"deleted")
        batch.delete_range(KEYS, b"range", b"range\0")
        engine.write(batch, sync=True)
        where = self._around(engine, subject, shard)
        for keyspace, key, value in EDGES:
            assert value == subject.raw_get(where, keyspace, key)
        for keyspace, key in ((STATE, b"deleted"), (KEYS, b"range"), (META, b"never")):
            assert subject.raw_get(where, keyspace, key) is None

    def test_what_was_put_around_is_read(
        self, engine: Engine, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """Values put directly into the underlying store are read by get, get_many, scans and snapshots."""
        if subject.raw_put is None:
            pytest.skip("needs raw_put, a way around the API")
        put(engine, STATE, {b"own": b"old"})
        where = self._around(engine, subject, shard)
        for keyspace, key, value in EDGES:
            subject.raw_put(where, keyspace, key, value)
        subject.raw_put(where, STATE, b"own", b"new")
        if "persistent" in subject.capabilities:
            engine = backend.open_shard(shard, KEYSPACES, create=False)
        expected: dict[str, list[tuple[Key, bytes]]] = {keyspace.name: [] for keyspace in KEYSPACES}
        for keyspace, key, value in [*EDGES, (STATE, b"own", b"new")]:
            expected[keyspace.name].append((key, value))
            assert value == engine.get(keyspace, key)
            assert [value, None] == engine.get_many(keyspace, [key, b"no" if keyspace.shape is None else (7, 7, 7)])
        with engine.snapshot() as snapshot:
            assert expected == contents(engine) == contents(snapshot)
        engine.close()

    @staticmethod
    def _around(engine: Engine, subject: BackendSubject, shard: Path) -> object:
        """Return the first argument of ``raw_get`` and ``raw_put``.

        Closes a persistent engine and returns its shard's path; else returns the open engine.
        """
        if "persistent" not in subject.capabilities:
            return engine
        engine.close()
        return shard
