"""Promises about errors of the disk: they are reported, and what was acknowledged stays."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, STATE, Backend, Engine
from topicstore.contract.errors import EngineError, StorageFullError

from topicstore_conformance.conditions.capabilities import requires, without
from topicstore_conformance.subjects.subject import BackendSubject

from . import child, faults
from .child import Make
from .crashes import check_batches, last_batch, written
from .fixtures import Fixtures, pairs, put

__all__ = ["Failures"]

BATCHES = 10
UNNOTICED = 200
"""The number of batches after which an engine that noticed nothing is given up."""


def _tell(call: Callable[[], object]) -> None:
    """Report what a call returns, or which error it raises."""
    try:
        child.tell(call())
    except StorageFullError:
        child.tell("StorageFullError")
    except EngineError:
        child.tell("EngineError")
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        child.tell(repr(error))


def _write(engine: Engine, first: int, count: int) -> None:
    for number in written(engine, first, count):
        child.tell(number)


def fill_the_disk(make: Make, path: Path) -> None:
    """Write to a disk until it is full; report every batch, how it failed, and what can still be read."""
    engine = make().open_shard(path, KEYSPACES, create=True)
    _write(engine, 0, BATCHES)
    faults.fail(faults.WRITES, errno.ENOSPC)
    _tell(lambda: _write(engine, BATCHES, UNNOTICED))
    check_batches(engine)
    child.tell(last_batch(engine))
    child.end()


def sync_in_vain(make: Make, path: Path, *steps: str) -> None:
    """Write while nothing can be synced to the disk, for each text of steps to a shard; report how each step ended."""
    engines = [make().open_shard(Path(f"{path}-{number}"), KEYSPACES, create=True) for number in range(len(steps))]
    for engine in engines:
        put(engine, STATE, {b"warm": b"up"}, sync=True)
    faults.fail(faults.SYNCS, errno.EIO)
    for engine, text in zip(engines, steps, strict=True):
        for step in text.split():
            write = partial(put, engine, STATE, {step.encode(): b""}, sync=step == "sync")
            _tell(engine.flush_log if step == "flush_log" else write)
    child.end()


def read_in_vain(make: Make, path: Path) -> None:
    """Read everything while reads of files fail; report how much came, or the error."""
    engine: Engine = make().open_shard(path, KEYSPACES, create=False)
    faults.fail(faults.READS, errno.EIO)
    for reverse in (False, True):
        _tell(lambda reverse=reverse: len(pairs(engine.scan(DATA, reverse=reverse))))  # type: ignore[misc]
    keys = [(1, 1, number) for number in range(2_000)]
    _tell(lambda: sum(value is not None for value in engine.get_many(DATA, keys)))
    child.end()


class Failures(Fixtures):
    """Promises about errors of the disk."""

    @pytest.fixture(autouse=True)
    def _failing(self, _declared: None) -> None:
        if (reason := faults.why_not()) is not None:
            pytest.skip(reason)

    @requires("persistent")
    def test_a_full_disk_is_told(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A write to a full disk raises StorageFullError, nothing of it is applied, and what was acknowledged stays."""
        *acknowledged, error, last = child.run(subject.make, fill_the_disk, shard)
        assert error == "StorageFullError"
        assert acknowledged[-1] == last
        engine = backend.open_shard(shard, KEYSPACES, create=False)
        assert last == last_batch(engine)
        check_batches(engine)
        put(engine, STATE, {b"more": b"1"})
        assert engine.get(STATE, b"more") == b"1"
        engine.close()

    @requires("persistent", "sync")
    def test_sync_is_told_from_commit(self, subject: BackendSubject, shard: Path) -> None:
        """What can't be brought to the disk raises in a write with sync and in flush_log; else nothing is tried."""
        told = child.run(subject.make, sync_in_vain, shard, "commit again sync", "commit flush_log")
        assert told == [None, None, "EngineError", None, "EngineError"]

    @requires("persistent")
    @without("sync")
    def test_a_failed_sync_is_told(self, subject: BackendSubject, shard: Path) -> None:
        """If commit and sync are the same, every write that can't be brought to the disk raises EngineError."""
        assert child.run(subject.make, sync_in_vain, shard, "commit") == ["EngineError"]

    @requires("persistent")
    def test_a_failed_read_is_told(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """If files can't be read, scans and gets raise EngineError or answer wholly from memory; never with less."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, DATA, {(1, 1, number): bytes(1_000) for number in range(2_000)})
        engine.close()
        told = child.run(subject.make, read_in_vain, shard)
        assert [2_000 if outcome == "EngineError" else outcome for outcome in told] == [2_000] * 3
