"""The pytest plugin with the options that select the installed plugins to test.

It is loaded only by runs that name it; the suites themselves need no pytest plugin::

    pytest -p topicstore_conformance.runner.plugin --pyargs topicstore_conformance.installed --backend NAME
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topicstore_conformance.conditions.garbage import pytest_collection_finish
from topicstore_conformance.conditions.modes import VARIABLE

__all__ = ["pytest_addoption", "pytest_collection_finish", "pytest_configure", "pytest_ignore_collect"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `topicstore_conformance.installed` reads."""
    group = parser.getgroup("topicstore conformance")
    group.addoption("--backend", metavar="NAME", help="test this installed backend only")
    group.addoption("--layout", metavar="NAME", help="test this installed layout only")
    # The default destination, ``plugins``, is that of one of pytest's own options.
    plugins = {"dest": "tested_plugins", "metavar": "NAMES"}
    group.addoption("--plugins", help="test these installed plugins, outermost first, comma-separated", **plugins)
    group.addoption("--quick", action="store_true", help=f"the same as {VARIABLE}=quick")
    for suite, names in (
        ("backend", "backends"),
        ("layout", "layouts"),
        ("database", "pairs"),
        ("parts", "pairs"),
        ("plugins", "pairs"),
        ("broker", "address"),
    ):
        group.addoption(f"--only-{suite}", metavar="NAMES", help=f"run the {suite} suite for these {names} only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the suite of transforms if the run names no plugins, and the suite of brokers if it names no broker."""
    needed = {"test_plugins.py": "tested_plugins", "test_broker.py": "only_broker"}.get(collection_path.name)
    suite = needed is not None and collection_path.parent.name == "installed"
    return True if suite and config.getoption(str(needed)) is None else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply ``--quick`` before pytest imports a suite or a ``conftest.py``, which read the environment variable."""
    if config.getoption("quick"):
        os.environ[VARIABLE] = "quick"
