"""Marks all tests of this folder as slow, so that only `make test-all` runs them."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
