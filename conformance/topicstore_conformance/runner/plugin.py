"""The pytest plugin with the options that select the installed plugins to test.

It is loaded only by runs that name it; the suites themselves need no pytest plugin::

    pytest -p topicstore_conformance.runner.plugin --pyargs topicstore_conformance.installed --backend NAME
"""

from __future__ import annotations

import os

import pytest

from topicstore_conformance.conditions.garbage import pytest_collection_finish
from topicstore_conformance.conditions.modes import VARIABLE

__all__ = ["pytest_addoption", "pytest_collection_finish", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `topicstore_conformance.installed` reads."""
    group = parser.getgroup("topicstore conformance")
    group.addoption("--backend", metavar="NAME", help="test this installed backend only")
    group.addoption("--layout", metavar="NAME", help="test this installed layout only")
    group.addoption("--quick", action="store_true", help=f"the same as {VARIABLE}=quick")
    for suite, names in (("backend", "backends"), ("layout", "layouts"), ("database", "pairs")):
        group.addoption(f"--only-{suite}", metavar="NAMES", help=f"run the {suite} suite for these {names} only")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply ``--quick`` before pytest imports a suite or a ``conftest.py``, which read the environment variable."""
    if config.getoption("quick"):
        os.environ[VARIABLE] = "quick"
