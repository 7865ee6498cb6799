"""The suite of transforms, for the selected plugins on the selected pairs."""

from __future__ import annotations

import pytest

from topicstore_conformance.installed.choosing import chosen_transforms
from topicstore_conformance.plugins.suite import PluginSuite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each pair."""
    metafunc.parametrize("pair", chosen_transforms(metafunc.config), ids=str, scope="class")


class TestPlugins(PluginSuite):
    """The suite for the plugins on each pair in turn."""
