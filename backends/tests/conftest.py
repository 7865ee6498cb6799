"""Marks tests as slow that measure processor time or count the handles of the process."""

from __future__ import annotations

import pytest

_MEASURED = (
    "test_dropped_scans_give_back_what_they_hold",
    "test_openings_do_not_pile_up",
    "test_seeks_are_fast",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of processor time and of handles as slow: the machine and other tests would influence them."""
    if item.name.partition("[")[0] in _MEASURED:
        item.add_marker(pytest.mark.slow)
