"""The database suite, for the selected pairs."""

from __future__ import annotations

import pytest

from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.installed.choosing import chosen_pairs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each pair."""
    metafunc.parametrize("pair", chosen_pairs(metafunc.config), ids=str, scope="class")


class TestDatabase(DatabaseSuite):
    """The suite for each pair in turn."""
