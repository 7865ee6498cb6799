"""The pytest plugin: the marks, readable assertions, and the choice of what is tested.

It is loaded in every run of pytest where topicstore is installed. So it imports nothing of the
suites, and adds its options to those runs only that name the suites for what is installed::

    pytest --pyargs topicstore_conformance.installed --backend NAME [--layout NAME] [--quick]
"""

from __future__ import annotations

import os

import pytest

from topicstore_conformance.conditions.capabilities import MARKERS
from topicstore_conformance.conditions.modes import VARIABLE

__all__ = ["pytest_configure", "pytest_load_initial_conftests"]

_PACKAGE = "topicstore_conformance"

pytest.register_assert_rewrite(
    *(f"{_PACKAGE}.{name}" for name in ("backend", "database", "faults", "layout", "oracle"))
)


def pytest_load_initial_conftests(args: list[str], parser: pytest.Parser) -> None:
    """Add options to runs that name `topicstore_conformance.installed`."""
    if any(argument.startswith(f"{_PACKAGE}.installed") for argument in args):
        group = parser.getgroup("topicstore conformance")
        group.addoption("--backend", metavar="NAME", help="test this installed backend only")
        group.addoption("--layout", metavar="NAME", help="test this installed layout only")
        group.addoption("--quick", action="store_true", help=f"the same as {VARIABLE}=quick")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marks; choose the mode before any suite, or what a ``conftest.py`` wants, is imported."""
    for mark, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if config.getoption("quick", default=False):
        os.environ[VARIABLE] = "quick"
