"""Runs topicstore's conformance suites for the layout: alone, and in whole databases."""

import pytest
from topicstore.contract.options import NoOptions
from topicstore_conformance import DatabaseSuite, LayoutSubject, LayoutSuite, pair_of
from topicstore_per_topic.layout import PerTopicLayout
from topicstore_per_topic.plugin import topicstore_layouts

(SPEC,) = topicstore_layouts()


def make():
    """Return a new layout object."""
    return PerTopicLayout(NoOptions())


class TestLayout(LayoutSuite):
    """All tests of a layout."""

    @pytest.fixture
    def subject(self):
        return LayoutSubject(make=make, capabilities=SPEC.capabilities)


class TestDatabase(DatabaseSuite):
    """All tests of a database, on RocksDB."""

    @pytest.fixture
    def pair(self):
        return pair_of("rocksdb", "per_topic")
