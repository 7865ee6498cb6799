"""Fixtures shared by all tests of backends: the engine of an empty shard, and helpers to write and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from topicstore.contract.engine import KEYSPACES, Backend, Engine, K, Key, Keyspace, Reader, WriteBatch

from topicstore_conformance.conditions.capabilities import check_capabilities
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.threads import PATIENCE, begin
from topicstore_conformance.subjects.subject import BackendSubject

__all__ = ["Fixtures", "Pair", "contents", "keys", "numbered", "pairs", "put", "remove"]

MEGABYTE = 1 << 20
Pair = tuple[Key, bytes]


def put(engine: Engine, keyspace: Keyspace[K], values: Mapping[K, bytes], *, sync: bool = False) -> None:
    """Write values in one batch."""
    batch = WriteBatch()
    for key, value in values.items():
        batch.put(keyspace, key, value)
    engine.write(batch, sync=sync)


def remove(engine: Engine, keyspace: Keyspace[K], start: K, end: K) -> None:
    """Delete the keys from ``start`` (inclusive) to ``end`` (exclusive) in one batch."""
    batch = WriteBatch()
    batch.delete_range(keyspace, start, end)
    engine.write(batch)


def pairs(chunks: Iterable[list[tuple[K, bytes]]]) -> list[tuple[K, bytes]]:
    """Return the pairs of all chunks of a scan in one list.

    Checks that no chunk is empty, and that each chunk of several pairs has at most a megabyte of values.
    """
    found: list[tuple[K, bytes]] = []
    for chunk in chunks:
        assert chunk, "a list of a scan is empty"
        assert len(chunk) == 1 or sum(len(value) for _, value in chunk) <= MEGABYTE, "a list has more than a megabyte"
        found += chunk
    return found


def keys(chunks: Iterable[list[tuple[K, bytes]]]) -> list[K]:
    """Return the keys of all chunks of a scan in one list."""
    return [key for key, _ in pairs(chunks)]


def contents(reader: Reader) -> dict[str, list[Pair]]:
    """Return all pairs that a reader sees, in key order, by keyspace."""
    return {keyspace.name: pairs(reader.scan(keyspace)) for keyspace in KEYSPACES}


def numbered(count: int) -> dict[tuple[int, int, int], bytes]:
    """Return ``count`` values under keys of three numbers, of which only the last differs."""
    return {(1, 2, number): number.to_bytes(3, "big") for number in range(count)}


class Fixtures:
    """Fixtures of all tests of backends; a subclass overrides ``subject``."""

    @pytest.fixture
    def subject(self) -> BackendSubject:
        """Return the backend under test."""
        raise NotImplementedError("override the fixture 'subject': it returns a BackendSubject")

    @pytest.fixture(autouse=True)
    def _declared(self, request: pytest.FixtureRequest, subject: BackendSubject) -> None:
        check_capabilities(request.function, subject.capabilities)

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        """Yield an empty directory, in memory if possible: tests of fsync inject errors and need no real disk."""
        with quick_directory() as name:
            yield Path(name)

    @pytest.fixture
    def backend(self, subject: BackendSubject) -> Backend:
        """Return a new backend object."""
        return subject.make()

    @pytest.fixture
    def shard(self, directory: Path) -> Path:
        """Return the path of the shard, which may not exist yet."""
        return directory / "shard"

    @pytest.fixture
    def engine(self, backend: Backend, shard: Path) -> Iterator[Engine]:
        """Yield the engine of a new shard, and close it afterwards."""
        opened = backend.open_shard(shard, KEYSPACES, create=True)
        yield opened
        begin(opened.close).result(PATIENCE)  # a close that hangs fails its own test and doesn't block the others
