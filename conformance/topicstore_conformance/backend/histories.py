"""Random histories: writes, reads, snapshots, interrupted scans and reopenings in any order, against a plain dict."""

from __future__ import annotations

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
from topicstore.contract.engine import DATA, KEYSPACES, META, Backend, Key, Keyspace, Reader, WriteBatch
from topicstore.contract.errors import DatabaseClosedError

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MACHINE, tries
from topicstore_conformance.subjects.subject import BackendSubject

from .fixtures import Fixtures, pairs

__all__ = ["EngineMachine", "Histories"]

NUMBERS = st.sampled_from([0, 1, 2, 255, 256, 2**32 - 1])
TUPLES: st.SearchStrategy[Key] = st.tuples(NUMBERS, NUMBERS, st.sampled_from([0, 1, 2**63, 2**64 - 1]))
BYTES: st.SearchStrategy[Key] = st.binary(max_size=3) | st.sampled_from([b"\xff" * 4, b"\0" * 4])
SIZES = st.integers(0, 8) | st.sampled_from([400_000, 700_000])
"""The sizes of values, which distinguish them; the large ones make lists of a scan end early."""
FEW: st.SearchStrategy[Keyspace[Any]] = st.sampled_from([DATA, META])

Model = dict[tuple[str, Any], bytes]


@st.composite
def places(draw: st.DrawFn) -> tuple[Keyspace[Any], Key]:
    """Draw a keyspace and one of its keys."""
    keyspace = draw(FEW)
    return keyspace, draw(TUPLES if keyspace is DATA else BYTES)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Keyspace[Any], Key, Key]:
    """Draw a keyspace and two of its keys, in any order."""
    keyspace = draw(FEW)
    of = TUPLES if keyspace is DATA else BYTES
    return keyspace, draw(of), draw(of)


OPERATIONS = st.lists(st.tuples(places(), st.none() | SIZES), max_size=30)


def expected_scan(
    model: Model, keyspace: Keyspace[Any], start: Any, end: Any, *, reverse: bool = False, limit: int | None = None
) -> list[Any]:
    """Return the pairs that a scan must give."""
    inside = [
        (key, value)
        for (name, key), value in model.items()
        if name == keyspace.name and (start is None or start <= key) and (end is None or key < end)
    ]
    return sorted(inside, reverse=reverse)[:limit]


@attrs.define(eq=False)
class Held:
    """A snapshot, or an engine with a scan held open: what it must show, and whether it was closed."""

    reader: Any
    model: Model
    closed: bool = False


class EngineMachine(RuleBasedStateMachine):
    """A state machine over one engine. Subclass it with ``backend`` and ``persistent`` set."""

    backend: Backend
    persistent: bool
    snapshots: Bundle[Any] = Bundle("snapshots")
    scans: Bundle[Any] = Bundle("scans")

    @initialize()
    def start(self) -> None:
        """Open an empty shard."""
        self.directory = quick_directory()
        self.shard = Path(self.directory.name) / "shard"
        self.engine = self.backend.open_shard(self.shard, KEYSPACES, create=True)
        self.model: Model = {}
        self.held: list[Held] = []

    def teardown(self) -> None:
        """Close the engine, open it once more, and check that it has all that was written."""
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        if self.persistent:
            engine = self.backend.open_shard(self.shard, KEYSPACES, create=False)
            for keyspace in KEYSPACES:
                assert expected_scan(self.model, keyspace, None, None) == pairs(engine.scan(keyspace))
            engine.close()
        self.directory.cleanup()

    @rule(operations=OPERATIONS, ranges=st.lists(spans(), max_size=2), sync=st.booleans())
    def write(self, operations: list[Any], ranges: list[Any], sync: bool) -> None:
        """Write a batch: its ranges apply first, then its operations in order."""
        batch = WriteBatch()
        for (keyspace, key), size in operations:
            if size is None:
                batch.delete(keyspace, key)
            else:
                batch.put(keyspace, key, bytes(size))
        for keyspace, start, end in ranges:
            batch.delete_range(keyspace, start, end)
        self.engine.write(batch, sync=sync)
        for keyspace, start, end in ranges:
            for key, _ in expected_scan(self.model, keyspace, start, end):
                del self.model[keyspace.name, key]
        for (keyspace, key), size in operations:
            self.model.pop((keyspace.name, key), None)
            if size is not None:
                self.model[keyspace.name, key] = bytes(size)

    @rule(asked=st.lists(places(), max_size=5))
    def get(self, asked: list[Any]) -> None:
        """Read some keys."""
        self.check_gets(self.engine, self.model, asked)

    @rule(
        span=spans(),
        open_start=st.booleans(),
        open_end=st.booleans(),
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 9),
    )
    def scan(self, span: Any, open_start: bool, open_end: bool, reverse: bool, limit: int | None) -> None:
        """Read a range and compare it with the model."""
        keyspace, start, end = span[0], None if open_start else span[1], None if open_end else span[2]
        expected = expected_scan(self.model, keyspace, start, end, reverse=reverse, limit=limit)
        assert expected == pairs(self.engine.scan(keyspace, start, end, reverse=reverse, limit=limit))

    @rule(target=snapshots)
    def snapshot(self) -> Held:
        """Take a snapshot, to read it later."""
        return self.hold(self.engine.snapshot())

    @rule(held=snapshots, asked=st.lists(places(), max_size=5))
    def get_from_snapshot(self, held: Held, asked: list[Any]) -> None:
        """Read some keys from a snapshot."""
        if not held.closed:
            self.check_gets(held.reader, held.model, asked)

    @rule(held=consumes(snapshots))
    def close_snapshot(self, held: Held) -> None:
        """Close a snapshot, whether its engine is open or closed, and whatever scans of it are half read."""
        held.reader.close()
        held.closed = True

    @rule(target=scans, keyspace=FEW, reverse=st.booleans())
    def begin_scan(self, keyspace: Keyspace[Any], reverse: bool) -> Any:
        """Read the first list of a scan of everything."""
        return self.begun(self.hold(self.engine), keyspace, None, None, reverse=reverse)

    @rule(target=scans, held=snapshots, span=spans(), reverse=st.booleans())
    def begin_scan_of_snapshot(self, held: Held, span: Any, reverse: bool) -> Any:
        """Read the first list of a scan of a range of a snapshot."""
        return multiple() if held.closed else self.begun(held, *span, reverse=reverse)

    @rule(scan=consumes(scans))
    def end_scan(self, scan: Any) -> None:
        """Read the rest of a scan: all of it is of the moment of the first list, unless its reader was closed."""
        held, chunks, first, expected = scan
        try:
            found = first + pairs(chunks)
        except DatabaseClosedError:
            assert held.closed
        else:
            assert expected == found

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        """Close and open the engine while scans and snapshots are held."""
        self.engine.close()
        for held in self.held:
            held.closed = True
        self.engine = self.backend.open_shard(self.shard, KEYSPACES, create=False)

    def hold(self, reader: Reader) -> Held:
        """Remember what a reader must show from now on; closing the engine closes it."""
        self.held.append(Held(reader, dict(self.model)))
        return self.held[-1]

    @staticmethod
    def begun(held: Held, keyspace: Keyspace[Any], start: Any, end: Any, *, reverse: bool) -> Any:
        """Return a scan of which one list was read, that list, and everything that the scan must give."""
        chunks = held.reader.scan(keyspace, start, end, reverse=reverse)
        return held, chunks, next(chunks, []), expected_scan(held.model, keyspace, start, end, reverse=reverse)

    @staticmethod
    def check_gets(reader: Reader, model: Model, asked: list[Any]) -> None:
        """Compare gets with the model."""
        for keyspace in (DATA, META):
            keys = [key for place, key in asked if place is keyspace]
            expected = [model.get((keyspace.name, key)) for key in keys]
            assert expected == reader.get_many(keyspace, keys)
            assert expected == [reader.get(keyspace, key) for key in keys]


class Histories(Fixtures):
    """The promise that covers all others."""

    def test_random_histories(self, backend: Backend, subject: BackendSubject) -> None:
        """Whatever is written, deleted, held open and opened again, in any order, reads give what a dict would."""
        persistent = "persistent" in subject.capabilities
        machine = type("Machine", (EngineMachine,), {"backend": backend, "persistent": persistent})
        chosen = settings(
            MACHINE, max_examples=tries(8, 40, subject.capabilities), stateful_step_count=30, derandomize=True
        )
        run_state_machine_as_test(machine, settings=chosen)
