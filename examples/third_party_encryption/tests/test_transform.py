"""Runs topicstore's conformance suite for plugins that transform messages."""

import pytest
from topicstore_conformance import PluginSuite, pair_of
from topicstore_encrypting import KEY_VARIABLE, new_key


class TestEncrypting(PluginSuite):
    """All tests of a transform, on RocksDB."""

    @pytest.fixture
    def pair(self, monkeypatch):
        monkeypatch.setenv(KEY_VARIABLE, new_key())
        return pair_of("rocksdb", "block", plugins=["encrypting"])
