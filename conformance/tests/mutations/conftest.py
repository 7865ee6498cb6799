"""Marks tests that run mutations as slow, so that only `make test-all` runs them."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if "results" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)
