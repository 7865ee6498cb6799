"""Conformance suites: pytest classes for storage engines, layouts, databases of both, transforms, and MQTT brokers.

Plugin authors subclass a suite, override one fixture and list capabilities::

    from topicstore_conformance import DatabaseSuite, Pair, pair_of

    class TestMine(DatabaseSuite):
        @pytest.fixture
        def pair(self) -> Pair:
            return pair_of("mine", "block")

Public names are imported on first use, because some modules of this package don't need the suites' dependencies.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend.suite import BackendSuite
    from .broker.fixtures import Broker
    from .broker.suite import BrokerSuite
    from .database.suite import DatabaseSuite
    from .layout.suite import LayoutSuite
    from .parts.suite import DatabasePartsSuite
    from .plugins.suite import PluginSuite
    from .subjects.pairs import Pair, pair_of
    from .subjects.subject import BackendSubject, LayoutSubject

__all__ = [
    "BackendSubject",
    "BackendSuite",
    "Broker",
    "BrokerSuite",
    "DatabasePartsSuite",
    "DatabaseSuite",
    "LayoutSubject",
    "LayoutSuite",
    "Pair",
    "PluginSuite",
    "pair_of",
]

_MODULES = {
    "BackendSubject": "subjects.subject",
    "BackendSuite": "backend.suite",
    "Broker": "broker.fixtures",
    "BrokerSuite": "broker.suite",
    "DatabasePartsSuite": "parts.suite",
    "DatabaseSuite": "database.suite",
    "LayoutSubject": "subjects.subject",
    "LayoutSuite": "layout.suite",
    "Pair": "subjects.pairs",
    "PluginSuite": "plugins.suite",
    "pair_of": "subjects.pairs",
}

# Pytest rewrites modules only if they are registered before their import. Then failing assertions show the compared
# values.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        *(
            f"{__name__}.{part}"
            for part in ("backend", "broker", "database", "faults", "layout", "mqtt", "oracle", "parts", "plugins")
        )
    )


if not TYPE_CHECKING:  # type checkers would accept any name if they saw this function

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
