"""Tests of disk errors: they are reported, and acknowledged batches stay."""

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
"""The number of batches after which the test stops waiting for an engine to report a full disk."""


def _tell(call: Callable[[], object]) -> None:
    """Report the result of a call, or the error that it raises, to the parent."""
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
    """Write until writing fails with ENOSPC; report every batch, the error, and the last batch that can be read."""
    engine = make().open_shard(path, KEYSPACES, create=True)
    _write(engine, 0, BATCHES)
    faults.fail(faults.WRITES, errno.ENOSPC)
    _tell(lambda: _write(engine, BATCHES, UNNOTICED))
    check_batches(engine)
    child.tell(last_batch(engine))
    child.end()


def sync_in_vain(make: Make, path: Path, *steps: str) -> None:
    """Run steps while every fsync fails, and report the outcome of each.

    Each text in ``steps`` holds the steps of a shard of its own, separated by spaces: "flush_log", "sync" for a write
    with sync, and any other word for a write without.
    """
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
    """Read everything in three ways while reads of files fail; report the number of pairs, or the error, of each."""
    engine: Engine = make().open_shard(path, KEYSPACES, create=False)
    faults.fail(faults.READS, errno.EIO)
    for reverse in (False, True):
        _tell(lambda reverse=reverse: len(pairs(engine.scan(DATA, reverse=reverse))))  # type: ignore[misc]
    keys = [(1, 1, number) for number in range(2_000)]
    _tell(lambda: sum(value is not None for value in engine.get_many(DATA, keys)))
    child.end()


class Failures(Fixtures):
    """Tests of disk errors."""

    @pytest.fixture(autouse=True)
    def _failing(self, _declared: None) -> None:
        if (reason := faults.why_not()) is not None:
            pytest.skip(reason)

    @requires("persistent")
    def test_a_full_disk_is_reported(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A write to a full disk raises StorageFullError and applies nothing, and acknowledged batches stay."""
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
    def test_sync_is_distinguished_from_commit(self, subject: BackendSubject, shard: Path) -> None:
        """A failing fsync raises EngineError in a write with sync and in flush_log; a write without sync succeeds."""
        told = child.run(subject.make, sync_in_vain, shard, "commit again sync", "commit flush_log")
        assert told == [None, None, "EngineError", None, "EngineError"]

    @requires("persistent")
    @without("sync")
    def test_a_failed_sync_is_reported(self, subject: BackendSubject, shard: Path) -> None:
        """In an engine that syncs on every commit, every write whose fsync fails raises EngineError."""
        assert child.run(subject.make, sync_in_vain, shard, "commit") == ["EngineError"]

    @requires("persistent")
    def test_a_failed_read_is_reported(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """If files can't be read, scans and gets raise EngineError or return everything from memory, never a part."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, DATA, {(1, 1, number): bytes(1_000) for number in range(2_000)})
        engine.close()
        told = child.run(subject.make, read_in_vain, shard)
        assert [2_000 if outcome == "EngineError" else outcome for outcome in told] == [2_000] * 3
