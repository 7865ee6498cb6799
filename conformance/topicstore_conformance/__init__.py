"""The promises that every backend and layout must keep, as tests that anybody can run on their own plugin.

A subclass of a suite overrides one fixture and lists capabilities::

    from topicstore_conformance import DatabaseSuite, Pair, pair_of

    class TestMine(DatabaseSuite):
        @pytest.fixture
        def pair(self) -> Pair:
            return pair_of("mine", "block")

Names are loaded when they are used, because other modules of this package do without what the suites need.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend.suite import BackendSuite
    from .database.suite import DatabaseSuite
    from .layout.suite import LayoutSuite
    from .subjects.pairs import Pair, pair_of
    from .subjects.subject import BackendSubject, LayoutSubject

__all__ = [
    "BackendSubject",
    "BackendSuite",
    "DatabaseSuite",
    "LayoutSubject",
    "LayoutSuite",
    "Pair",
    "pair_of",
]

_MODULES = {
    "BackendSubject": "subjects.subject",
    "BackendSuite": "backend.suite",
    "DatabaseSuite": "database.suite",
    "LayoutSubject": "subjects.subject",
    "LayoutSuite": "layout.suite",
    "Pair": "subjects.pairs",
    "pair_of": "subjects.pairs",
}

if "pytest" in sys.modules:  # before any of them is imported, so that a failing assertion shows what was compared
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{part}" for part in ("backend", "database", "faults", "layout", "oracle"))
    )


if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
