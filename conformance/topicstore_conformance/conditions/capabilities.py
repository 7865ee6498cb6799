"""Marks by which a test says what it needs: tests ask for capabilities, never for engines.

::

    @requires("persistent")
    def test_it(self, subject): ...

A suite's autouse fixture hands its subject's capabilities to `check_capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

__all__ = ["MARKERS", "check_capabilities", "declaring", "requires", "without"]

MARKERS = {
    "requires(*names)": "the test needs these capabilities, and is skipped where one is not declared",
    "without(*names)": "the test needs these capabilities to be absent, and is skipped where one is declared",
}
"""What `topicstore_conformance.runner.plugin` tells pytest of the marks."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def requires(*names: str) -> Callable[[F], F]:
    """Mark a test that needs capabilities."""
    return pytest.mark.requires(*names)


def without(*names: str) -> Callable[[F], F]:
    """Mark a test of what happens where capabilities are not declared."""
    return pytest.mark.without(*names)


def declaring(capabilities: Collection[str]) -> Callable[[type[T]], type[T]]:
    """Leave out of a suite's subclass, instead of skipping, the tests that can't apply to these capabilities."""

    def leave_out(suite: type[T]) -> type[T]:
        for name in dir(suite):
            marks = getattr(getattr(suite, name), "pytestmark", []) if name.startswith("test_") else []
            if _why_not(marks, capabilities):
                setattr(suite, name, None)  # which pytest doesn't collect
        return suite

    return leave_out


def check_capabilities(item: pytest.Item, capabilities: Collection[str]) -> None:
    """Skip a test whose subject lacks what it requires, or has what it must be without; the reason names it."""
    reason = _why_not(item.iter_markers(), capabilities)
    if reason:
        pytest.skip(reason)


def _why_not(marks: Iterable[pytest.Mark], capabilities: Collection[str]) -> str:
    """Return why a test with these marks can't apply to these capabilities: nothing if it can."""
    named = [(mark.name, name) for mark in marks for name in mark.args if mark.name in ("requires", "without")]
    lacking = [name for mark, name in named if mark == "requires" and name not in capabilities]
    if lacking:
        return f"needs {', '.join(lacking)}"
    declared = [name for mark, name in named if mark == "without" and name in capabilities]
    return f"is about what lacks {', '.join(declared)}" if declared else ""
