"""Random histories, over both engines, against a plain dict."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from topicstore.engine import DATA, KEYSPACES, META, Backend, Keyspace, WriteBatch
from topicstore_backends.memory import MemoryBackend, MemoryOptions

NUMBERS = st.sampled_from([0, 1, 2, 255, 256, 2**32 - 1])
TUPLES = st.tuples(NUMBERS, NUMBERS, st.sampled_from([0, 1, 2**63, 2**64 - 1]))
BYTES = st.binary(max_size=3) | st.sampled_from([b"\xff" * 4, b"\0" * 4])
SIZES = st.integers(0, 8) | st.sampled_from([400_000, 700_000])
"""Values are told apart by their sizes; the large ones make lists of a scan end early."""


@st.composite
def places(draw: st.DrawFn) -> tuple[Keyspace, Any]:
    keyspace = draw(st.sampled_from([DATA, META]))
    return keyspace, draw(TUPLES if keyspace is DATA else BYTES)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Keyspace, Any, Any]:
    keyspace = draw(st.sampled_from([DATA, META]))
    keys = TUPLES if keyspace is DATA else BYTES
    return keyspace, draw(keys), draw(keys)


OPERATIONS = st.lists(st.tuples(places(), st.none() | SIZES), max_size=30)

Model = dict[tuple[str, Any], bytes]


def expected_scan(
    model: Model, keyspace: Keyspace, start: Any, end: Any, reverse: bool, limit: int | None
) -> list[Any]:
    inside = [
        (key, value)
        for (name, key), value in model.items()
        if name == keyspace.name and (start is None or start <= key) and (end is None or key < end)
    ]
    return sorted(inside, reverse=reverse)[:limit]


class Histories(RuleBasedStateMachine):
    """Writes, reads, snapshots and interrupted scans in any order."""

    backend: Backend
    persistent: bool
    snapshots: Bundle[Any] = Bundle("snapshots")
    scans: Bundle[Any] = Bundle("scans")

    @initialize()
    def start(self) -> None:
        self.directory = TemporaryDirectory()
        self.engine = self.backend.open_shard(Path(self.directory.name) / "shard", KEYSPACES, create=True)
        self.model: Model = {}
        self.opening = 0

    def teardown(self) -> None:
        self.engine.close()
        self.directory.cleanup()

    @rule(operations=OPERATIONS, ranges=st.lists(spans(), max_size=2), sync=st.booleans())
    def write(self, operations: list[Any], ranges: list[Any], sync: bool) -> None:
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
            for key, _ in expected_scan(self.model, keyspace, start, end, False, None):
                del self.model[keyspace.name, key]
        for (keyspace, key), size in operations:
            self.model.pop((keyspace.name, key), None)
            if size is not None:
                self.model[keyspace.name, key] = bytes(size)

    @rule(asked=st.lists(places(), max_size=5))
    def get(self, asked: list[Any]) -> None:
        self.check_gets(self.engine, self.model, asked)

    @rule(
        span=spans(),
        open_start=st.booleans(),
        open_end=st.booleans(),
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 9),
    )
    def scan(self, span: Any, open_start: bool, open_end: bool, reverse: bool, limit: int | None) -> None:
        keyspace, start, end = span[0], None if open_start else span[1], None if open_end else span[2]
        chunks = list(self.engine.scan(keyspace, start, end, reverse=reverse, limit=limit))
        expected = expected_scan(self.model, keyspace, start, end, reverse, limit)
        assert expected == [pair for chunk in chunks for pair in chunk]

    @rule(target=snapshots)
    def snapshot(self) -> Any:
        return self.opening, self.engine.snapshot(), dict(self.model)

    @rule(held=snapshots, asked=st.lists(places(), max_size=5))
    def get_from_snapshot(self, held: Any, asked: list[Any]) -> None:
        opening, snapshot, model = held
        if opening == self.opening:
            self.check_gets(snapshot, model, asked)

    @rule(held=consumes(snapshots))
    def close_snapshot(self, held: Any) -> None:
        held[1].close()

    @rule(target=scans, keyspace=st.sampled_from([DATA, META]), reverse=st.booleans())
    def begin_scan(self, keyspace: Keyspace, reverse: bool) -> Any:
        scan = self.engine.scan(keyspace, reverse=reverse)
        first = next(scan, [])
        return self.opening, scan, first, expected_scan(self.model, keyspace, None, None, reverse, None)

    @rule(target=scans, held=snapshots, span=spans(), reverse=st.booleans())
    def begin_scan_of_snapshot(self, held: Any, span: Any, reverse: bool) -> Any:
        opening, snapshot, model = held
        keyspace, start, end = span
        expected = expected_scan(model, keyspace, start, end, reverse, None)
        if opening != self.opening:
            return opening, None, None, None
        scan = snapshot.scan(keyspace, start, end, reverse=reverse)
        return opening, scan, next(scan, []), expected

    @rule(held=consumes(scans))
    def end_scan(self, held: Any) -> None:
        opening, scan, first, expected = held
        if opening == self.opening:
            assert expected == first + [pair for chunk in scan for pair in chunk]

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.engine = self.backend.open_shard(Path(self.directory.name) / "shard", KEYSPACES, create=False)
        self.opening += 1

    @staticmethod
    def check_gets(reader: Any, model: Model, asked: list[Any]) -> None:
        for keyspace in (DATA, META):
            keys = [key for place, key in asked if place is keyspace]
            expected = [model.get((keyspace.name, key)) for key in keys]
            assert expected == reader.get_many(keyspace, keys)
            assert expected == [reader.get(keyspace, key) for key in keys]


@pytest.mark.parametrize(("name", "examples"), [("memory", 60), ("rocksdb", 40)])
def test_random_histories(name: str, examples: int) -> None:
    """Reads, snapshots, scans and reopenings give what a dict gives."""
    if name == "memory":
        backend: Backend = MemoryBackend(MemoryOptions())
    else:
        pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
        from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

        backend = RocksdbBackend(RocksdbOptions())
    machine = type("Machine", (Histories,), {"backend": backend, "persistent": name != "memory"})
    # A snapshot of a closed engine is closed, so the bundle may hold some that a rule skips.
    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
