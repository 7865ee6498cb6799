"""Decorators by which a test declares the capabilities that it needs; tests never name engines.

::

    @requires("persistent")
    def test_it(self, subject): ...

A suite's autouse fixture passes its subject's capabilities to `check_capabilities`. The requirements are attributes
of the test function and not pytest marks, because marks would have to be registered in every run that imports a suite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pytest

__all__ = ["check_capabilities", "declaring", "leaving_out", "requires", "without"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_REQUIRED, _ABSENT = "topicstore_requires", "topicstore_without"


def requires(*names: str) -> Callable[[F], F]:
    """Declare that a test needs these capabilities: it is skipped if one is not declared."""
    return _keeping(_REQUIRED, names)


def without(*names: str) -> Callable[[F], F]:
    """Declare that a test applies only without these capabilities: it is skipped if one is declared."""
    return _keeping(_ABSENT, names)


def _keeping(attribute: str, names: tuple[str, ...]) -> Callable[[F], F]:
    def keep(test: F) -> F:
        setattr(test, attribute, (*getattr(test, attribute, ()), *names))
        return test

    return keep


def declaring(capabilities: Collection[str]) -> Callable[[type[T]], type[T]]:
    """Remove, from a suite's subclass, the tests that can't apply to these capabilities, instead of skipping them."""

    def leave_out(suite: type[T]) -> type[T]:
        for name in dir(suite):
            if name.startswith("test_") and _why_not(getattr(suite, name), capabilities):
                setattr(suite, name, None)  # pytest doesn't collect None
        return suite

    return leave_out


def leaving_out(*parts: type) -> Callable[[type[T]], type[T]]:
    """Remove, from a suite's subclass, the tests of these parts of the suite, which another class has."""

    def leave_out(suite: type[T]) -> type[T]:
        for name in [name for part in parts for name in vars(part) if name.startswith("test_")]:
            setattr(suite, name, None)  # pytest doesn't collect None
        return suite

    return leave_out


def check_capabilities(test: object, capabilities: Collection[str]) -> None:
    """Skip a test whose subject lacks a required capability, or has one that must be absent; the reason names it.

    test: the test's function, as ``request.function`` in a fixture.
    """
    reason = _why_not(test, capabilities)
    if reason:
        pytest.skip(reason)


def _why_not(test: object, capabilities: Collection[str]) -> str:
    """Return why a test can't apply to these capabilities, or an empty text if it can."""
    lacking = [name for name in getattr(test, _REQUIRED, ()) if name not in capabilities]
    if lacking:
        return f"needs {', '.join(lacking)}"
    declared = [name for name in getattr(test, _ABSENT, ()) if name in capabilities]
    return f"is about what lacks {', '.join(declared)}" if declared else ""
