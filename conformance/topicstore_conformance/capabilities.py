"""Marks by which a test says what it needs: tests ask for capabilities, never for engines.

::

    @requires("persistent")
    def test_it(self, subject): ...

A suite's autouse fixture hands its subject's capabilities to `check_capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pytest

__all__ = ["MARKERS", "check_capabilities", "requires", "without"]

MARKERS = {
    "requires(*names)": "the test needs these capabilities, and is skipped where one is not declared",
    "without(*names)": "the test needs these capabilities to be absent, and is skipped where one is declared",
}
"""What `topicstore_conformance.plugin` tells pytest of the marks."""

F = TypeVar("F", bound=Callable[..., Any])


def requires(*names: str) -> Callable[[F], F]:
    """Mark a test that needs capabilities."""
    return pytest.mark.requires(*names)


def without(*names: str) -> Callable[[F], F]:
    """Mark a test of what happens where capabilities are not declared."""
    return pytest.mark.without(*names)


def check_capabilities(item: pytest.Item, capabilities: Collection[str]) -> None:
    """Skip a test whose subject lacks what it requires, or has what it must be without; the reason names it."""
    lacking = [name for name in _named(item, "requires") if name not in capabilities]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}")
    declared = [name for name in _named(item, "without") if name in capabilities]
    if declared:
        pytest.skip(f"is about what lacks {', '.join(declared)}")


def _named(item: pytest.Item, mark: str) -> list[str]:
    return [name for found in item.iter_markers(mark) for name in found.args]
