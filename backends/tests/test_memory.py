"""Tests of behaviour that only the memory engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topicstore.contract.engine import KEYSPACES, STATE, WriteBatch
from topicstore_backends.memory import SWEEP_KEYS, MemoryBackend, MemoryEngine, MemoryOptions

if TYPE_CHECKING:
    from pathlib import Path


def open_engine(path: Path) -> MemoryEngine:
    return MemoryBackend(MemoryOptions()).open_shard(path, KEYSPACES, create=True)


def put(engine: MemoryEngine, key: bytes, value: bytes) -> None:
    batch = WriteBatch()
    batch.put(STATE, key, value)
    engine.write(batch)


def test_versions_are_kept_for_living_views_only(tmp_path: Path) -> None:
    """A key has one version for each open snapshot and the current version, however often the key is written."""
    engine = open_engine(tmp_path)
    put(engine, b"k", b"first")
    snapshot = engine.snapshot()
    for number in range(10):
        put(engine, b"k", b"%d" % number)
    assert [value for _, value in engine._maps["state"][b"k"]] == [b"first", b"9"]
    snapshot.close()
    put(engine, b"k", b"last")
    assert [value for _, value in engine._maps["state"][b"k"]] == [b"last"]


def test_deleted_keys_go_when_no_view_needs_them(tmp_path: Path) -> None:
    """A sweep removes deleted keys that were kept for a scan that was dropped."""
    engine = open_engine(tmp_path)
    batch = WriteBatch()
    for number in range(SWEEP_KEYS):
        batch.put(STATE, b"%d" % number, b"v")
    engine.write(batch)
    scan = engine.scan(STATE)
    next(scan)
    for key in list(engine._maps["state"]):
        batch.delete(STATE, key)
    engine.write(batch)
    assert len(engine._maps["state"]) == SWEEP_KEYS
    del scan
    put(engine, b"k", b"v")
    assert list(engine._maps["state"]) == [b"k"]
