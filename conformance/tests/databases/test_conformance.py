"""The database suite on three pairs of a backend and a layout: in memory, in memory with epochs, and on disk."""

from __future__ import annotations

import pytest
from topicstore_conformance import DatabaseSuite, Pair, pair_of
from topicstore_conformance.conditions.capabilities import declaring
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.pairs import known

CAPABILITIES = {str(pair): pair.capabilities for pair in known()}


@declaring(CAPABILITIES["memory-block"])
class TestMemoryBlock(DatabaseSuite):
    @pytest.fixture
    def pair(self) -> Pair:
        return pair_of("memory", "block")


@declaring(CAPABILITIES["memory-wildcard_optimized"])
class TestMemoryWildcardOptimized(DatabaseSuite):
    @pytest.fixture
    def pair(self) -> Pair:
        return pair_of("memory", "wildcard_optimized")


@declaring(CAPABILITIES["rocksdb-block"])
class TestRocksdbBlock(DatabaseSuite):
    @pytest.fixture
    def pair(self) -> Pair:
        need("rocksdb")
        return pair_of("rocksdb", "block")
