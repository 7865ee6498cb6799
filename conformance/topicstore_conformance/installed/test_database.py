"""The database suite, run for each selected pair of a backend and a layout."""

from __future__ import annotations

import pytest

from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.installed.choosing import chosen_pairs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each selected pair."""
    metafunc.parametrize("pair", chosen_pairs(metafunc.config), ids=str, scope="class")


class TestDatabase(DatabaseSuite):
    """The database suite, once for each selected pair."""
