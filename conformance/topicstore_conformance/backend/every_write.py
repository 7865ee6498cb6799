"""Tests of errors and of verification at every kind of write and in every keyspace."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import closing
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, Backend, Engine, Keyspace, Reader, WriteBatch
from topicstore.contract.errors import EngineError, InvalidArgumentError, StorageFullError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import MODE
from topicstore_conformance.faults.threads import PATIENCE, begin
from topicstore_conformance.oracle.limits import unlike
from topicstore_conformance.subjects.subject import BackendSubject

from . import child, faults
from .changes import CHANGES, changed, filled, key_of
from .child import Make
from .damage import flip, value_of
from .fixtures import Fixtures, contents, put

__all__ = ["EveryWrite"]

MOMENTS = 0.3
"""The seconds for which a call may wait for another thread's call: an engine may run them one after the other."""
Kind = Callable[[WriteBatch, Keyspace[Any], Callable[[int], Any]], object]
KINDS: dict[str, Kind] = {
    "put": lambda batch, keyspace, key: batch.put(keyspace, key(3), b"new"),
    "put_many": lambda batch, keyspace, key: batch.put_many(keyspace, [key(3), key(4)], [b"new", b"new"]),
    "change_many": lambda batch, keyspace, key: batch.change_many(keyspace, [key(3), key(0)], [b"new", None]),
    "delete": lambda batch, keyspace, key: batch.delete(keyspace, key(0)),
    "delete_range": lambda batch, keyspace, key: batch.delete_range(keyspace, key(0), key(2)),
}
"""The kinds of writes; keys 0 to 2 exist before each write."""


def cases() -> list[tuple[str, Keyspace[Any]]]:
    """Return each kind of write with one keyspace in the quick mode, and with each keyspace in other modes."""
    if MODE == "quick":
        return [(kind, KEYSPACES[number]) for number, kind in enumerate(KINDS)]
    return list(product(KINDS, KEYSPACES))


def batch_of(kind: str, keyspace: Keyspace[Any]) -> WriteBatch:
    """Return a batch with one write of a kind."""
    batch = WriteBatch()
    KINDS[kind](batch, keyspace, lambda number: key_of(keyspace, number))
    return batch


def opened(make: Make, path: Path) -> list[tuple[str, Keyspace[Any], Engine]]:
    """Open a shard for each of `cases`, with three keys in each keyspace that are on disk."""
    found = []
    for number, (kind, keyspace) in enumerate(cases()):
        engine = make().open_shard(Path(f"{path}-{number}"), KEYSPACES, create=True)
        batch = WriteBatch()
        for each in KEYSPACES:
            batch.put_many(each, [key_of(each, at) for at in range(3)], [b"old"] * 3)
        engine.write(batch, sync=True)
        engine.flush_log()
        found.append((kind, keyspace, engine))
    return found


def outcome(call: Callable[[], object]) -> str:
    """Return the name of the error that a call raises, or an empty text."""
    try:
        call()
    except StorageFullError:
        return "StorageFullError"
    except EngineError:
        return "EngineError"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        return repr(error)
    return ""


def sync_every_kind(make: Make, path: Path, how: str) -> None:
    """Make each kind of write durable while every fsync fails, and report the outcomes.

    how: "sync" for writes with ``sync``, "flush_log" for a call of `Engine.flush_log` by the writing thread, "thread"
    for one by another thread.
    """
    engines = opened(make, path)
    faults.fail(faults.SYNCS, errno.EIO)
    for kind, keyspace, engine in engines:
        batch = batch_of(kind, keyspace)
        if how == "sync":
            ended = outcome(lambda engine=engine, batch=batch: engine.write(batch, sync=True))  # type: ignore[misc]
        else:
            engine.write(batch)
            flush = engine.flush_log
            ended = outcome(flush if how == "flush_log" else lambda flush=flush: begin(flush).result(PATIENCE))  # type: ignore[misc]
        child.tell([kind, keyspace.name, ended])
    child.end()


def fill_at_every_kind(make: Make, path: Path) -> None:
    """Make each kind of write while the disk is full; report its outcome, and whether the contents agree with that."""
    engines = opened(make, path)
    faults.fail(faults.WRITES, errno.ENOSPC)
    for kind, keyspace, engine in engines:
        before = contents(engine)
        batch = batch_of(kind, keyspace)
        ended = outcome(lambda engine=engine, batch=batch: engine.write(batch))  # type: ignore[misc]
        same = before == contents(engine)
        child.tell(
            [kind, keyspace.name, ended if same is bool(ended) else f"{ended or 'no error'}, but changed {not same}"]
        )
    child.end()


def flush_in_a_flush(make: Make, path: Path) -> None:
    """Write and flush while another thread's flush is held in its fsync; then fail every later fsync.

    Reports whether an fsync was held, and the outcome of the second flush.
    """
    gate = faults.Gate()
    engine = make().open_shard(path, KEYSPACES, create=True)
    put(engine, DATA, {(1, 2, 0): b"on disk"}, sync=True)
    put(engine, DATA, {(1, 2, 1): b"first"})
    gate.close()
    first = begin(engine.flush_log)
    child.tell(gate.held())

    written = Event()

    def write_and_flush() -> None:
        put(engine, DATA, {(1, 2, 2): b"second"})
        written.set()
        engine.flush_log()

    second = begin(write_and_flush)
    written.wait(MOMENTS)
    gate.let()
    child.tell(outcome(lambda: second.result(PATIENCE)))
    outcome(lambda: first.result(PATIENCE))
    child.end()


def close_within_a_call(make: Make, path: Path, how: str) -> None:
    """Close an engine while another thread's call is held in its fsync; report whether an fsync was held.

    Then report whether close returned before that call, and the outcomes of both.

    how: "write", "flush_log" or "checkpoint".
    """
    gate = faults.Gate()
    engine = make().open_shard(path, KEYSPACES, create=True)
    put(engine, DATA, {(1, 2, 0): b"on disk"})
    batch = WriteBatch()
    batch.put(DATA, (1, 2, 1), b"more")
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: engine.write(batch, sync=True),
        "flush_log": engine.flush_log,
        "checkpoint": lambda: engine.checkpoint(path.with_name("copy")),
    }
    gate.close()
    call = begin(calls[how])
    child.tell(gate.held())
    closing = begin(engine.close)
    closed = bool(wait([closing], MOMENTS).done)
    # Not if the call has ended, too: then its fsync was held for too short a time.
    child.tell(closed and not wait([call], MOMENTS).done)
    gate.let()
    child.tell([outcome(lambda: call.result(PATIENCE)), outcome(lambda: closing.result(PATIENCE))])
    child.end()


WRONG_NUMBERS = (
    (1, 2),
    (1, 2, 3, 4),
    (2**32, 0, 0),
    (0, 2**64, 0),
    (0, 0, 2**64),
    (0, -1, 0),
    (-1, 0, 0),
    b"bytes",
    (),
)
WRONG_TEXTS = ((1, 2, 3), (), "text", 7)


class EveryWrite(Fixtures):
    """Tests of errors and of verification, at every kind of write and keyspace."""

    @requires("persistent", "sync")
    @pytest.mark.parametrize("how", ["sync", "flush_log", "thread"])
    def test_every_kind_of_write_is_made_durable(self, subject: BackendSubject, shard: Path, how: str) -> None:
        """Every kind of write in every keyspace is fsynced by `sync`, and by any thread's `flush_log`."""
        self._can_fail()
        told = child.run(subject.make, sync_every_kind, shard, how)
        assert [one for one in told if one[2] != "EngineError"] == [], "no error, although every fsync failed"
        assert len(told) == len(cases())

    @requires("persistent", "sync")
    def test_a_flush_within_a_flush_covers_its_own_writes(self, subject: BackendSubject, shard: Path) -> None:
        """`flush_log` covers all writes before its call, also while another thread's earlier flush is running."""
        self._can_fail()
        held, ended = child.run(subject.make, flush_in_a_flush, shard)
        if not held:
            pytest.skip("the engine calls neither fsync nor fdatasync in its own process")
        assert ended == "EngineError", "it returned, although no fsync that began after the write succeeded"

    @requires("persistent", "sync")
    @pytest.mark.parametrize("how", ["write", "flush_log"])
    def test_close_waits_for_a_call_that_makes_durable(self, subject: BackendSubject, shard: Path, how: str) -> None:
        """Close waits for another thread's `write` with `sync`, or its `flush_log`."""
        self._close_waits(subject, shard, how)

    @requires("persistent", "checkpoint")
    def test_close_waits_for_a_checkpoint(self, subject: BackendSubject, shard: Path) -> None:
        """Close waits for a checkpoint that another thread is making."""
        self._close_waits(subject, shard, "checkpoint")

    def _close_waits(self, subject: BackendSubject, shard: Path, how: str) -> None:
        self._can_fail()
        held, early, ended = child.run(subject.make, close_within_a_call, shard, how)
        if not held:
            pytest.skip("the engine calls neither fsync nor fdatasync in its own process")
        assert not early, f"close returned while {how} was running"
        assert [one for one in ended if one not in ("", "EngineError")] == [], "not as if one had followed the other"

    @requires("persistent")
    def test_every_kind_of_write_tells_of_a_full_disk(self, subject: BackendSubject, shard: Path) -> None:
        """A write of any kind in any keyspace on a full disk raises StorageFullError and changes nothing."""
        self._can_fail()
        told = child.run(subject.make, fill_at_every_kind, shard)
        assert [one for one in told if one[2] not in ("StorageFullError", "")] == []
        assert len(told) == len(cases())

    @staticmethod
    def _can_fail() -> None:
        if (reason := faults.why_not()) is not None:
            pytest.skip(reason)

    def test_every_call_refuses_a_wrong_key(self, engine: Engine) -> None:
        """A key of another shape raises InvalidArgumentError in every kind of write and read, and changes nothing."""
        batch, _ = filled()
        engine.write(batch)
        before = contents(engine)
        with engine.snapshot() as snapshot:
            for keyspace in KEYSPACES:
                right = key_of(keyspace, 1)
                for wrong in WRONG_NUMBERS if keyspace.shape else WRONG_TEXTS:
                    self._refused(engine, keyspace, right, wrong)
                    for reader in (engine, snapshot):
                        self._not_read(reader, keyspace, right, wrong)
        assert before == contents(engine)

    def _not_read(self, reader: Reader, keyspace: Keyspace[Any], right: Any, wrong: Any) -> None:
        for name, call in {
            "get": lambda: reader.get(keyspace, wrong),
            "get_many": lambda: reader.get_many(keyspace, [right, wrong]),
            "scan from it": lambda: list(reader.scan(keyspace, wrong)),
            "scan to it": lambda: list(reader.scan(keyspace, None, wrong, reverse=True)),
        }.items():
            self._raises(call, f"{name}, keyspace {keyspace.name!r}, key {wrong!r}")

    def _refused(self, engine: Engine, keyspace: Keyspace[Any], right: Any, wrong: Any) -> None:
        kinds: dict[str, Callable[[WriteBatch], None]] = {
            "put": lambda batch: batch.put(keyspace, wrong, b"wrong"),
            "put_many": lambda batch: batch.put_many(keyspace, [right, wrong], [b"wrong", b"wrong"]),
            "change_many": lambda batch: batch.change_many(keyspace, [right, wrong], [None, None]),
            "delete": lambda batch: batch.delete(keyspace, wrong),
            "delete_range from it": lambda batch: batch.delete_range(keyspace, wrong, right),
            "delete_range to it": lambda batch: batch.delete_range(keyspace, right, wrong),
        }
        for name, add in kinds.items():
            batch = WriteBatch()
            batch.put(keyspace, right, b"wrong")
            add(batch)
            self._raises(lambda batch=batch: engine.write(batch), f"{name}, keyspace {keyspace.name!r}, key {wrong!r}")  # type: ignore[misc]

    @staticmethod
    def _raises(call: Callable[[], object], what: str) -> None:
        try:
            call()
        except InvalidArgumentError:
            return
        except Exception as error:
            raise AssertionError(f"{what}: {error!r} instead of InvalidArgumentError") from error
        raise AssertionError(f"{what}: no error")

    @requires("persistent", "checksums")
    def test_damage_in_each_keyspace_is_reported(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A flipped byte in a value of any keyspace is reported by `verify`, and reads raise or are right."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        for number, keyspace in enumerate(KEYSPACES):
            put(engine, keyspace, {key_of(keyspace, at): value_of(1_000 + 100 * number + at) for at in range(60)})
            engine.reclaim(keyspace, key_of(keyspace, 0), key_of(keyspace, 100))
        engine.close()
        backend.open_shard(shard, KEYSPACES, create=False).close()
        tried = 0
        for number, keyspace in enumerate(KEYSPACES):
            value = value_of(1_000 + 100 * number + 7)
            found = [(f, at) for f in shard.rglob("*") if f.is_file() and (at := f.read_bytes().find(value)) >= 0]
            for file, at in found[:1]:
                flip(file, at + 50)
                self._check_is_reported(subject.make(), shard, keyspace, value)
                flip(file, at + 50)
                tried += 1
        if not tried:
            pytest.skip("no value lies in a file as it was written")

    @staticmethod
    def _check_is_reported(backend: Backend, shard: Path, keyspace: Keyspace[Any], value: bytes) -> None:
        try:
            engine = backend.open_shard(shard, KEYSPACES, create=False)
        except EngineError:
            return
        with closing(engine):
            assert list(engine.verify()), f"verify finds no damage in keyspace {keyspace.name!r}"
            key = key_of(keyspace, 7)
            reads: list[Callable[[], object]] = [
                lambda: engine.get(keyspace, key),
                lambda: engine.get_many(keyspace, [key])[0],
            ]
            for read in reads:
                try:
                    assert value == read(), f"damage was read in {keyspace.name!r}"
                except EngineError:
                    continue

    def test_batches_of_any_content(self, engine: Engine) -> None:
        """A batch of all kinds of changes in all keyspaces is applied like these changes one after another."""
        batch, model = filled()
        engine.write(batch)
        together = WriteBatch()
        for group, change in enumerate(CHANGES.values()):
            one = changed(group, change)
            model.apply(one)
            together.ranges += one.ranges
            together.runs += one.runs
        engine.write(together)
        for keyspace in KEYSPACES:
            expected = sorted(model.maps[keyspace.name].items())
            assert expected == contents(engine)[keyspace.name], keyspace.name
        assert unlike(70_000) in model.maps["data"].values()
