"""Skips tests that need missing plugins or data; the reason names the package to install."""

from __future__ import annotations

import pytest

from topicstore_conformance.subjects import datasets
from topicstore_conformance.subjects.pairs import Pair, absent

__all__ = ["need", "need_data"]


def need(*plugins: str | Pair) -> None:
    """Skip the test, or the module that is being imported, unless these backends, layouts and pairs can be loaded."""
    missing = absent()
    for plugin in plugins:
        for name in (plugin,) if isinstance(plugin, str) else (plugin.backend, plugin.layout):
            if name in missing:
                pytest.skip(missing[name], allow_module_level=True)


def need_data(name: str) -> None:
    """Skip the test unless the named file of real messages exists."""
    reason = datasets.why_absent(name)
    if reason is not None:
        pytest.skip(reason)
