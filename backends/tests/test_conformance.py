"""The backends of this package hold what `topicstore.contract.engine` promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import KEYSPACES, Backend, Key, Keyspace
from topicstore_backends.memory import MemoryBackend, MemoryEngine, MemoryOptions
from topicstore_backends.plugin import topicstore_backends
from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.conditions.capabilities import declaring
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
    """Return the database as rocksdict opens it, and a keyspace's column family."""
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


@declaring(CAPABILITIES["duckdb"])
class TestDuckdb(BackendSuite):
    @pytest.fixture
    def subject(self) -> BackendSubject:
        need("duckdb")
        return BackendSubject(
            make=make_duckdb, capabilities=CAPABILITIES["duckdb"], raw_get=duckdb_get, raw_put=duckdb_put
        )
