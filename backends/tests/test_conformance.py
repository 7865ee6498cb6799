"""Tests that the backends of this package fulfil `topicstore.contract.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import KEYSPACES, Backend, Key, Keyspace
from topicstore.plugins import load_target, registry
from topicstore_backends.memory import MemoryBackend, MemoryEngine, MemoryOptions
from topicstore_backends.plugin import topicstore_backends
from topicstore_conformance.backend.changes import Changes
from topicstore_conformance.backend.concurrency import Concurrency
from topicstore_conformance.backend.crashes import Crashes
from topicstore_conformance.backend.histories import Histories
from topicstore_conformance.backend.lifecycles import LifeCycles
from topicstore_conformance.backend.limits import Limits
from topicstore_conformance.backend.ordering import Ordering
from topicstore_conformance.backend.snapshots import Snapshots
from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.conditions.capabilities import declaring, leaving_out
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.subject import BackendSubject

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_backends()}


def make_memory() -> Backend:
    return MemoryBackend(MemoryOptions())


def memory_get(engine: MemoryEngine, keyspace: Keyspace, key: Key) -> bytes | None:
    versions: list[Any] = engine._maps[keyspace.name].get(key, [(0, None)])
    found: bytes | None = versions[-1][1]
    return found


def memory_put(engine: MemoryEngine, keyspace: Keyspace, key: Key, value: bytes) -> None:
    engine._maps[keyspace.name][key] = [(0, value)]


@declaring(CAPABILITIES["memory"])
class TestMemory(BackendSuite):
    @pytest.fixture
    def subject(self) -> BackendSubject:
        return BackendSubject(
            make=make_memory, capabilities=CAPABILITIES["memory"], raw_get=memory_get, raw_put=memory_put
        )


def make_rocksdb() -> Backend:
    from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

    return RocksdbBackend(RocksdbOptions(write_buffer_bytes=1 << 20))


def rocksdb_files(path: Path, keyspace: Keyspace) -> tuple[Any, Any]:
    """Open the database with rocksdict; return the database and the column family of a keyspace."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    database = rocksdict.Rdict(str(path), options, {each.name: options for each in KEYSPACES})
    return database, database.get_column_family(keyspace.name)


def packed(keyspace: Keyspace, key: Key) -> bytes:
    if keyspace.shape is None:
        return bytes(key)
    return b"".join(number.to_bytes(width, "big") for number, width in zip(key, keyspace.shape, strict=True))


def rocksdb_get(path: Path, keyspace: Keyspace, key: Key) -> bytes | None:
    database, family = rocksdb_files(path, keyspace)
    found: bytes | None = family.get(packed(keyspace, key))
    family.close()
    database.close()
    return found


def rocksdb_put(path: Path, keyspace: Keyspace, key: Key, value: bytes) -> None:
    database, family = rocksdb_files(path, keyspace)
    family.put(packed(keyspace, key), value)
    family.close()
    database.close()


@declaring(CAPABILITIES["rocksdb"])
class TestRocksdb(BackendSuite):
    @pytest.fixture
    def subject(self) -> BackendSubject:
        need("rocksdb")
        return BackendSubject(
            make=make_rocksdb,
            capabilities=CAPABILITIES["rocksdb"],
            raw_get=rocksdb_get,
            raw_put=rocksdb_put,
        )


def make_leveldb() -> Backend:
    from topicstore_backends.leveldb import LeveldbBackend, LeveldbOptions

    return LeveldbBackend(LeveldbOptions(write_buffer_bytes=1 << 20))


def leveldb_key(keyspace: Keyspace, key: Key) -> bytes:
    return bytes((0x10 + KEYSPACES.index(keyspace),)) + packed(keyspace, key)


def leveldb_get(path: Path, keyspace: Keyspace, key: Key) -> bytes | None:
    import plyvel

    with plyvel.DB(str(path)) as database:
        found: bytes | None = database.get(leveldb_key(keyspace, key))
    return found


def leveldb_put(path: Path, keyspace: Keyspace, key: Key, value: bytes) -> None:
    import plyvel

    with plyvel.DB(str(path)) as database:
        database.put(leveldb_key(keyspace, key), value)


@declaring(CAPABILITIES["leveldb"])
class TestLeveldb(BackendSuite):
    @pytest.fixture
    def subject(self) -> BackendSubject:
        need("leveldb")
        return BackendSubject(
            make=make_leveldb, capabilities=CAPABILITIES["leveldb"], raw_get=leveldb_get, raw_put=leveldb_put
        )


def make_duckdb() -> Backend:
    from topicstore_backends.duckdb import DuckdbBackend, DuckdbOptions

    return DuckdbBackend(DuckdbOptions())


def duckdb_columns(keyspace: Keyspace, key: Key) -> tuple[list[str], list[Any]]:
    """Return the names of the columns that hold a keyspace's keys, and a key's parts."""
    if keyspace.shape is None:
        return ["key"], [key]
    return [f"key_{number}" for number in range(len(key))], list(key)


def duckdb_get(path: Path, keyspace: Keyspace, key: Key) -> bytes | None:
    import duckdb

    names, parts = duckdb_columns(keyspace, key)
    condition = " AND ".join(f"{name} = ?" for name in names)
    with duckdb.connect(str(path / "shard.duckdb")) as database:
        statement = f"SELECT value FROM {keyspace.name} WHERE {condition} ORDER BY part"
        found = database.execute(statement, parts).fetchall()
    return b"".join(piece for (piece,) in found) if found else None


def duckdb_put(path: Path, keyspace: Keyspace, key: Key, value: bytes) -> None:
    import duckdb

    names, parts = duckdb_columns(keyspace, key)
    condition = " AND ".join(f"{name} = ?" for name in names)
    with duckdb.connect(str(path / "shard.duckdb")) as database:
        database.execute(f"DELETE FROM {keyspace.name} WHERE {condition}", parts)
        places = ", ".join("?" for _ in range(len(parts) + 3))
        database.execute(f"INSERT INTO {keyspace.name} VALUES ({places})", [*parts, 0, len(value), value])


class Duckdb:
    @pytest.fixture
    def subject(self) -> BackendSubject:
        need("duckdb")
        return BackendSubject(
            make=make_duckdb, capabilities=CAPABILITIES["duckdb"], raw_get=duckdb_get, raw_put=duckdb_put
        )


@leaving_out(Limits, Changes, LifeCycles)
@declaring(CAPABILITIES["duckdb"])
class TestDuckdb(Duckdb, BackendSuite):
    """The suite without its tests of thousands of reads, because each read takes milliseconds."""


@pytest.mark.slow
@declaring(CAPABILITIES["duckdb"])
class TestDuckdbAtLimits(Duckdb, Limits, Changes, LifeCycles):
    """The suite's tests that read thousands of times."""


# --- with tiny buffers, blocks and steps -------------------------------------------------------

TINY: dict[str, dict[str, dict[str, int]]] = {
    "memory": {"memory": {"CHUNK_PAIRS": 3, "CHUNK_BYTES": 500, "SWEEP_KEYS": 2}},
    "rocksdb": {
        "rocksdb.backend": {"BLOCK_BYTES": 256, "OPEN_FILES": 16},
        "rocksdb.engine": {"MANY_KEYS": 4},
        "rocksdb.scans": {"FIRST_PAIRS": 2, "MOST_PAIRS": 5, "FIRST_BYTES": 100, "MOST_BYTES": 500},
        "rocksdb.small_tables": {"FEWEST": 2},
    },
    "leveldb": {
        "leveldb.engine": {"MOST_DELETES": 2, "REMOVED_A_WRITE": 1, "REMOVED_AT_ONCE": 2},
        "leveldb.scans": {"FIRST_PAIRS": 2, "MOST_PAIRS": 5, "FIRST_BYTES": 100, "MOST_BYTES": 500, "PART_PAIRS": 3},
    },
    "duckdb": {
        "duckdb.engine": {"FIRST_KEYS": 16, "_COPIED": 4},
        "duckdb.tables": {"PIECE": 1_000, "FIRST_PIECES": 4, "MOST_NUMBERS": 500, "MOST_BLOBS": 300, "LIST_PAIRS": 50},
    },
}
"""Tiny values for constants of each engine's modules, by module and name."""
SMALL: dict[str, dict[str, int]] = {
    "memory": {},
    "rocksdb": {"write_buffer_bytes": 256 << 10, "cache_bytes": 0},
    "leveldb": {"write_buffer_bytes": 256 << 10, "cache_bytes": 0, "block_bytes": 1 << 10, "max_open_files": 74},
    "duckdb": {"log_bytes": 256 << 10},
}
"""Options of each engine with buffers that hold only a few batches of the suite."""


def tiny_constants(name: str) -> Iterator[tuple[Any, str, int]]:
    """Yield module, name and tiny value of each of an engine's constants."""
    for module, constants in TINY[name].items():
        for constant, value in constants.items():
            yield import_module(f"topicstore_backends.{module}"), constant, value


def make_tiny(name: str) -> Backend:
    """Set an engine's constants to tiny values in this process, and return a backend whose buffers are small, too."""
    for module, constant, value in tiny_constants(name):
        setattr(module, constant, value)
    target = load_target(registry().backend(name))
    backend: Backend = target(target.Options(**SMALL[name]))
    return backend


class Tiny(Ordering, Snapshots, Crashes, Histories):
    """The parts of the suite whose results could depend on the sizes of an engine's buffers, blocks and steps."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], Backend]]:
    """Return a function that returns a factory of tiny backends; the constants are restored after the test."""

    def of(name: str) -> Callable[[], Backend]:
        need(name)
        for change in tiny_constants(name):
            monkeypatch.setattr(*change)
        return partial(make_tiny, name)

    return of


@declaring(CAPABILITIES["memory"])
class TestTinyMemory(Tiny):
    @pytest.fixture
    def subject(self, tiny: Callable[[str], Callable[[], Backend]]) -> BackendSubject:
        return BackendSubject(make=tiny("memory"), capabilities=CAPABILITIES["memory"])


@declaring(CAPABILITIES["rocksdb"])
class TestTinyRocksdb(Tiny):
    @pytest.fixture
    def subject(self, tiny: Callable[[str], Callable[[], Backend]]) -> BackendSubject:
        return BackendSubject(make=tiny("rocksdb"), capabilities=CAPABILITIES["rocksdb"])


@declaring(CAPABILITIES["leveldb"])
class TestTinyLeveldb(Tiny, Concurrency):
    @pytest.fixture
    def subject(self, tiny: Callable[[str], Callable[[], Backend]]) -> BackendSubject:
        return BackendSubject(make=tiny("leveldb"), capabilities=CAPABILITIES["leveldb"])


@declaring(CAPABILITIES["duckdb"])
class TestTinyDuckdb(Tiny):
    @pytest.fixture
    def subject(self, tiny: Callable[[str], Callable[[], Backend]]) -> BackendSubject:
        return BackendSubject(make=tiny("duckdb"), capabilities=CAPABILITIES["duckdb"])
