"""Random histories: operations, crashes and disk errors in any order, compared with a dict as the model."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from topicstore.contract.engine import KEYSPACES, Backend, Key, Keyspace, Reader, WriteBatch
from topicstore.contract.engine import encode_generation as prefix
from topicstore.contract.errors import DatabaseClosedError, EngineError, StorageFullError

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.subjects.subject import BackendSubject

from .crashes import appended, files_of, leave, open_killed
from .faults import full_disk
from .fixtures import Fixtures, pairs

__all__ = ["EngineMachine", "Histories"]

READ = "After any writes {} returns exactly what is stored."
"""The promise of a reading method."""
NUMBERS, LONG = (0, 1, 7, 100), 2**64 - 1
TUPLES: st.SearchStrategy[Key] = st.sampled_from(
    [
        (0, 0, LONG),
        *((1, 0, number) for number in NUMBERS),
        (1, 0, LONG),
        (1, 255, 0),
        (1, 256, 0),
        (2**32 - 1, LONG, LONG),
    ]
)
TEXTS = (
    *(b"", b"\0", b"\0\0", b"\0\xff", prefix(255), prefix(256), prefix(256) + b"\xff", b"a", b"a\0"),
    *(b"a%04d" % number for number in NUMBERS),
    *(b"a\xff", b"b", b"k" * 65_549, b"k" * 65_550, b"k" * 65_549 + b"l", b"\xff", b"\xff" * 40),
)
BYTES: st.SearchStrategy[Key] = st.integers(0, len(TEXTS) - 1).map(lambda number: TEXTS[number])
"""Keys drawn by index, so that Hypothesis doesn't print the long ones when it shows the strategy."""
SIZES = st.sampled_from([0, 1, 8, 100, 3_999, 4_001, 9_000, 400_000, 700_000])
"""The sizes of values in bytes; the large ones make a scan's chunks end early."""
SPACES: st.SearchStrategy[Keyspace[Any]] = st.sampled_from(KEYSPACES)

Model = dict[tuple[str, Any], bytes]
Change = tuple[Keyspace[Any], list[Key], "list[int | None]"]
"""A keyspace, keys, and the sizes of their new values in bytes; None removes a key."""
Batch = tuple[list[Change], list[tuple[Keyspace[Any], Key, Key]]]


@st.composite
def places(draw: st.DrawFn) -> tuple[Keyspace[Any], Key]:
    """Draw a keyspace and one of its keys."""
    keyspace = draw(SPACES)
    return keyspace, draw(TUPLES if keyspace.shape else BYTES)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Keyspace[Any], Key, Key]:
    """Draw a keyspace and two of its keys, in any order."""
    keyspace = draw(SPACES)
    of = TUPLES if keyspace.shape else BYTES
    return keyspace, draw(of), draw(of)


@st.composite
def runs(draw: st.DrawFn) -> Change:
    """Draw a change of adjacent keys, some of which may be removed; the largest makes a scan yield several chunks."""
    keyspace, first, count = draw(SPACES), draw(st.sampled_from([0, 90])), draw(st.sampled_from([2, 30, 300]))
    numbers, sizes = range(first, first + count), draw(st.lists(st.none() | st.integers(0, 40), min_size=1, max_size=4))
    keys: list[Key] = [(1, 0, number) if keyspace.shape else b"a%04d" % number for number in numbers]
    return keyspace, keys, [sizes[number % len(sizes)] for number in numbers]


def single(place: tuple[Keyspace[Any], Key], size: int | None) -> Change:
    """Return the change of one key."""
    return place[0], [place[1]], [size]


CHANGES = st.lists(st.builds(single, places(), st.none() | SIZES) | runs(), max_size=12)
BATCHES: st.SearchStrategy[Batch] = st.tuples(CHANGES, st.lists(spans(), max_size=2))
"""The changes and the deleted ranges of a batch."""


def expected_scan(
    model: Model, keyspace: Keyspace[Any], start: Any, end: Any, *, reverse: bool = False, limit: int | None = None
) -> list[Any]:
    """Return the pairs that a scan must yield."""
    inside = [
        (key, value)
        for (name, key), value in model.items()
        if name == keyspace.name and (start is None or start <= key) and (end is None or key < end)
    ]
    return sorted(inside, reverse=reverse)[:limit]


@attrs.define(eq=False)
class Held:
    """A snapshot, or an engine with an open scan: the contents that it must show, and whether it was closed."""

    reader: Any
    model: Model
    closed: bool = False


class EngineMachine(RuleBasedStateMachine):
    """A state machine over one engine. Subclass it with ``backend`` and ``capabilities`` set."""

    backend: Backend
    capabilities: Collection[str]
    snapshots: Bundle[Any] = Bundle("snapshots")
    scans: Bundle[Any] = Bundle("scans")
    persistent = precondition(lambda self: "persistent" in self.capabilities)

    @initialize(first=BATCHES)
    def start(self, first: Batch) -> None:
        """Open an empty shard, and write to it."""
        self.directory = quick_directory()
        self.shard = Path(self.directory.name) / "shard"
        self.engine = self.backend.open_shard(self.shard, KEYSPACES, create=True)
        self.model: Model = {}
        self.held: list[Held] = []
        self.count = 0
        self.write(first, sync=False)

    def teardown(self) -> None:
        """Close the engine, open it once more, and check that it has all written pairs."""
        with getattr(self, "directory", nullcontext()):
            if not hasattr(self, "engine"):  # an error of closing or opening ended the run
                return
            if "persistent" in self.capabilities:
                self.reopen(([], []))
            self.check(self.engine, READ.format("a scan"))
            self.engine.close()

    @rule(batch=BATCHES, sync=st.booleans())
    def write(self, batch: Batch, sync: bool) -> None:
        """Write a batch: its ranges apply first, then its operations in order."""
        made, after = self.batch_of(*batch)
        self.engine.write(made, sync=sync)
        self.model = after

    @rule(asked=st.lists(places(), max_size=9))
    def get(self, asked: list[Any]) -> None:
        """Read some keys, which may be missing, with `get_many` and `get`, from the engine and from a snapshot."""
        with self.engine.snapshot() as snapshot:
            for keyspace, reader in product({place for place, _ in asked}, (self.engine, snapshot)):
                keys = [key for place, key in asked if place is keyspace]
                expected = [self.model.get((keyspace.name, key)) for key in keys]
                assert expected == reader.get_many(keyspace, keys), READ.format("get_many")
                assert expected == [reader.get(keyspace, key) for key in keys], READ.format("get")

    @rule(span=spans(), open_start=st.booleans(), open_end=st.booleans(), limit=st.none() | st.integers(0, 9))
    def scan(self, span: Any, open_start: bool, open_end: bool, limit: int | None) -> None:
        """Read a range in both directions and compare it with the model."""
        keyspace, start, end = span[0], None if open_start else span[1], None if open_end else span[2]
        with self.engine.snapshot() as snapshot:
            for reader, reverse in product((self.engine, snapshot), (False, True)):
                expected = expected_scan(self.model, keyspace, start, end, reverse=reverse, limit=limit)
                found = pairs(reader.scan(keyspace, start, end, reverse=reverse, limit=limit))
                assert expected == found, READ.format("a scan in reverse" if reverse else "a scan")

    @rule(target=snapshots, batch=BATCHES)
    def snapshot(self, batch: Batch) -> Held:
        """Write a batch and take a snapshot, which later rules read."""
        self.write(batch, sync=False)
        return self.hold(self.engine.snapshot())

    @rule(held=snapshots)
    def read_snapshot(self, held: Held) -> None:
        """Read everything from a snapshot and compare it with the model."""
        if not held.closed:
            self.check(held.reader, "A snapshot shows its engine as of its creation.", held.model)

    @rule(held=consumes(snapshots))
    def close_snapshot(self, held: Held) -> None:
        """Close a snapshot, even if its engine is closed or scans of the snapshot are half read."""
        held.reader.close()
        held.closed = True

    @rule(target=scans, keyspace=SPACES, reverse=st.booleans())
    def begin_scan(self, keyspace: Keyspace[Any], reverse: bool) -> Any:
        """Read the first chunk of a scan of everything."""
        return self.begun(self.hold(self.engine), keyspace, None, None, reverse=reverse)

    @rule(target=scans, held=snapshots, span=spans(), reverse=st.booleans())
    def begin_scan_of_snapshot(self, held: Held, span: Any, reverse: bool) -> Any:
        """Read the first chunk of a scan of a range of a snapshot."""
        return multiple() if held.closed else self.begun(held, *span, reverse=reverse)

    @rule(scan=consumes(scans))
    def end_scan(self, scan: Any) -> None:
        """Read the rest of a scan, which must show the state when the scan began, unless its reader was closed."""
        held, chunks, first, expected = scan
        try:
            found = first + pairs(chunks)
        except DatabaseClosedError:
            assert held.closed, "A scan is valid until it, its snapshot or its engine is closed."
        else:
            assert expected == found, "A scan shows its reader as of the request of its first chunk."

    @rule(scan=consumes(scans))
    def close_scan(self, scan: Any) -> None:
        """Close a scan twice, between two chunks or after the last one; the scan yields nothing more."""
        held, chunks, _, _ = scan
        if not held.closed:
            chunks.close()
            chunks.close()
            assert list(chunks) == [], "A closed scan yields nothing."

    @rule(batch=BATCHES, span=spans())
    def reclaim(self, batch: Batch, span: Any) -> None:
        """Write a batch and reclaim a range, which doesn't change the stored pairs."""
        self.write(batch, sync=False)
        self.engine.reclaim(*span)
        self.check(self.engine, "Reclaiming changes no stored pair.")

    @precondition(lambda self: "checkpoint" in self.capabilities)
    @rule(batch=BATCHES)
    def checkpoint(self, batch: Batch) -> None:
        """Write a batch, make a checkpoint, and write to the checkpoint only, which doesn't change the original."""
        self.write(batch, sync=False)
        copy = self.shard.with_name("checkpoint")
        self.engine.checkpoint(copy)
        engine = self.backend.open_shard(copy, KEYSPACES, create=False)
        self.check(engine, "A checkpoint has every write that came before it.")
        engine.write(self.batch_of(*batch)[0])
        self.check(self.engine, "A write to a checkpoint doesn't change the original.")
        engine.close()
        shutil.rmtree(copy)

    # --- closing, killing and failing writes, while scans and snapshots are open ---

    @persistent
    @rule(batch=BATCHES)
    def reopen(self, batch: Batch) -> None:
        """Write a batch, close the engine, and open it again."""
        self.write(batch, sync=False)
        self.close()
        self.engine = self.backend.open_shard(self.shard, KEYSPACES, create=False)
        self.check(self.engine, "A shard that is opened again has all that was written.")

    @persistent
    @rule(batch=BATCHES, within=st.none() | st.integers(0, 99))
    def kill(self, batch: Batch, within: int | None) -> None:
        """Write a batch and continue with the files that a kill would leave, after the write or with a torn write."""
        earlier, before = self.model, files_of(self.backend, self.shard)
        self.write(batch, sync=False)
        after = files_of(self.backend, self.shard)
        if within is not None and (log := appended(before, after)) is not None:
            least, most = len(before[log]), len(after[log])
            after[log] = after[log][: least + (most - least) * within // 100]
            self.model = earlier
        self.close()
        shutil.rmtree(self.shard)
        leave(after, self.shard)
        self.engine = open_killed(self.backend, self.shard)
        self.check(self.engine, "After a kill each batch is there whole or not at all, and every acknowledged one is.")

    @persistent
    @rule(batch=BATCHES)
    def fill_the_disk(self, batch: Batch) -> None:
        """Write a batch while no file can grow. A failed write changes nothing, neither before nor after reopening."""
        made, after = self.batch_of(*batch)
        if not made:
            return  # an empty batch needs no space
        try:
            with full_disk():
                self.engine.write(made)
        except (EngineError, StorageFullError):
            failed = self.engine
            del self.engine  # so that teardown doesn't close the engine if the check fails
            self.check(failed, "A write that failed changes nothing.")
            self.engine = failed
        else:
            self.model = after
        with suppress(EngineError, StorageFullError) if self.model is not after else nullcontext():
            self.close()
        self.engine = open_killed(self.backend, self.shard)
        self.check(self.engine, "A write that failed is not there after reopening, and every other one is.")

    # --- the model ---

    def batch_of(self, changes: list[Change], ranges: list[Any]) -> tuple[WriteBatch, Model]:
        """Return a batch, whose values all differ as far as their sizes allow, and the model after that batch."""
        batch, after = WriteBatch(), dict(self.model)
        for keyspace, start, end in ranges:
            batch.delete_range(keyspace, start, end)
            for key, _ in expected_scan(after, keyspace, start, end):
                del after[keyspace.name, key]
        for keyspace, keys, sizes in changes:
            values = [None if size is None else self.value(size) for size in sizes]
            whole = [value for value in values if value is not None]
            if len(whole) == len(keys) > 1:
                batch.put_many(keyspace, keys, whole)
            elif len(keys) > 1:
                batch.change_many(keyspace, keys, values)
            elif whole:
                batch.put(keyspace, keys[0], whole[0])
            else:
                batch.delete(keyspace, keys[0])
            for key, value in zip(keys, values, strict=True):
                after.pop((keyspace.name, key), None)
                if value is not None:
                    after[keyspace.name, key] = value
        return batch, after

    def value(self, size: int) -> bytes:
        """Return a value of ``size`` bytes that differs from earlier ones of that size, if three bytes or longer."""
        self.count += 1
        return (self.count.to_bytes(3, "little") * (size // 3 + 1))[:size]

    def close(self) -> None:
        """Close the engine and thereby all held readers; ``engine`` is unset until the shard is opened again."""
        for held in self.held:
            held.closed = True
        engine = self.engine
        del self.engine
        engine.close()

    def hold(self, reader: Reader) -> Held:
        """Record the contents that a reader must show; closing the engine marks the record as closed."""
        self.held.append(Held(reader, self.model))
        return self.held[-1]

    def check(self, reader: Reader, promise: str, model: Model | None = None) -> None:
        """Compare all pairs of an engine or a snapshot with the model; a failure names the promise."""
        for keyspace in KEYSPACES:
            expected = expected_scan(self.model if model is None else model, keyspace, None, None)
            assert expected == pairs(reader.scan(keyspace)), promise
            assert [value for _, value in expected] == reader.get_many(keyspace, [key for key, _ in expected]), promise

    @staticmethod
    def begun(held: Held, keyspace: Keyspace[Any], start: Any, end: Any, *, reverse: bool) -> Any:
        """Return the held reader, a scan of it after one chunk, that chunk, and all pairs that the scan must yield."""
        chunks = held.reader.scan(keyspace, start, end, reverse=reverse)
        return held, chunks, next(chunks, []), expected_scan(held.model, keyspace, start, end, reverse=reverse)


class Histories(Fixtures):
    """A test of all guarantees together, by random histories."""

    def test_random_histories(self, backend: Backend, subject: BackendSubject) -> None:
        """In any order of writes, open scans, kills and reopenings, reads return the values that a dict would have."""
        machine = type("Machine", (EngineMachine,), {"backend": backend, "capabilities": subject.capabilities})
        examples = tries(6, 48, subject.capabilities)
        run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=examples, stateful_step_count=30))
