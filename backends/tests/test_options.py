"""Tests of each engine's options: validation, changes between openings, and the limits that they set."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, STATE, Engine
from topicstore.plugins import load_target, registry
from topicstore_conformance.backend.fixtures import pairs, put
from topicstore_conformance.conditions.skipping import need


def open_engine(name: str, path: Path, **options: Any) -> Engine:
    need(name)
    target = load_target(registry().backend(name))
    engine: Engine = target(target.Options(**options)).open_shard(path, KEYSPACES, create=True)
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rocksdb", {"compression": "zlib"}),  # rocksdict's zlib doesn't compress
        ("rocksdb", {"write_buffer_bytes": 0}),
        ("rocksdb", {"cache_bytes": -1}),
        ("leveldb", {"compression": "zstd"}),
        ("leveldb", {"write_buffer_bytes": 0}),
        ("leveldb", {"cache_bytes": -1}),
        ("leveldb", {"max_open_files": 1}),
        ("duckdb", {"threads": 0}),
        ("duckdb", {"threads": "many"}),
        ("duckdb", {"memory_bytes": 1}),
        ("duckdb", {"log_bytes": -1}),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any]) -> None:
    """An invalid value raises an error that names the option."""
    need(name)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        load_target(registry().backend(name)).Options(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rocksdb", [{"compression": kind} for kind in ("none", "zstd", "lz4", "snappy", "none")]),
        ("leveldb", [{"compression": "snappy"}, {"block_bytes": 1 << 10}, {"file_bytes": 1 << 20}]),
        ("duckdb", [{"log_bytes": 64 << 10, "threads": 2}, {"log_bytes": 64 << 20}, {"memory_bytes": 64 << 20}]),
    ],
)  # fmt: skip
def test_options_may_differ_each_time(tmp_path: Path, name: str, options: list[dict[str, Any]]) -> None:
    """An engine reads everything from logs and tables that were written with other options."""
    for opening, chosen in enumerate(options):
        engine = open_engine(name, tmp_path / "shard", **chosen)
        assert [((1, 0, number), b"%d" % number * 100) for number in range(opening)] == pairs(engine.scan(DATA))
        put(engine, DATA, {(1, 0, opening): b"%d" % opening * 100})
        engine.close()


@pytest.mark.parametrize(("name", "most"), [("rocksdb", 200_000), ("leveldb", 200_000), ("duckdb", 2 << 20)])
def test_an_empty_shard_is_lean(tmp_path: Path, name: str, most: int) -> None:
    """A nearly empty shard takes little disk space however often it was opened, preallocated blocks included."""
    for number in range(5):
        engine = open_engine(name, tmp_path / "shard")
        put(engine, STATE, {b"k": b"%d" % number})
        engine.close()
        assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "shard").iterdir()) <= most


@pytest.mark.parametrize("name", ["rocksdb", "leveldb"])
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    """Buffers and cache stay near the sizes of their options however much is stored."""
    engine = open_engine(name, tmp_path / "shard", write_buffer_bytes=2 << 20, cache_bytes=1 << 20)
    value, most = random.Random(0).randbytes(40_000), 0
    for number in range(1500):
        put(engine, DATA, {(1, 0, number): value})
        if number % 50 == 0:
            most = max(most, engine.info().memory_bytes)
    assert len(pairs(engine.scan(DATA))) == 1500
    assert max(most, engine.info().memory_bytes) < 12 << 20
    assert engine.info().disk_bytes > 50_000_000
    engine.close()
