"""The suite of a database's parts, for the selected pairs."""

from __future__ import annotations

import pytest

from topicstore_conformance.installed.choosing import chosen_pairs
from topicstore_conformance.parts.suite import DatabasePartsSuite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each pair."""
    metafunc.parametrize("pair", chosen_pairs(metafunc.config, "parts"), ids=str, scope="class")


class TestParts(DatabasePartsSuite):
    """The suite for each pair in turn."""
