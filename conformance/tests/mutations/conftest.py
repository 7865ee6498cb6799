"""What meets the mutations is left to `make test-all`."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if "results" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)
