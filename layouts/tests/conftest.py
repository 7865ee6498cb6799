"""What the tests of several layouts use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from topicstore.contract.engine import KEYSPACES, Engine


@pytest.fixture
def open_rocksdb(tmp_path: Path) -> Callable[[], Engine]:
    """Open one database of RocksDB, made by the first call, as often as it was closed."""
    pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
    from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

    backend, path = RocksdbBackend(RocksdbOptions()), tmp_path / "shard"
    return lambda: backend.open_shard(path, KEYSPACES, create=not path.exists())
