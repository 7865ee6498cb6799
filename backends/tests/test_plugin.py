"""The specs of the backends."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from topicstore.contract.engine import CAPABILITIES, Backend
from topicstore_backends.plugin import topicstore_backends


def test_every_target_is_a_backend_with_options() -> None:
    """Targets import, their options have defaults, and their capabilities are known."""
    pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
    pytest.importorskip("plyvel", reason="the extra 'leveldb' is not installed")
    for spec in topicstore_backends():
        module, _, name = spec.target.partition(":")
        backend = getattr(import_module(module), name)
        assert issubclass(backend, Backend)
        assert isinstance(backend(backend.Options()), Backend)
        assert frozenset() == spec.capabilities - CAPABILITIES


def test_listing_imports_no_engine() -> None:
    """The plugin can be listed where rocksdict is not installed."""
    program = (
        "import sys; from topicstore_backends.plugin import topicstore_backends; topicstore_backends();"
        "print([name for name in ('rocksdict', 'plyvel', 'duckdb', 'sortedcontainers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
