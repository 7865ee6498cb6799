"""Promises of the backend suite that are judged by processor time or by counts of the process's handles."""

from __future__ import annotations

import pytest

_MEASURED = (
    "test_dropped_scans_give_back_what_they_hold",
    "test_openings_do_not_pile_up",
    "test_seeks_are_fast",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave them to `make test-all`: the machine, and other tests of the process, take part in what they measure."""
    if item.name.partition("[")[0] in _MEASURED:
        item.add_marker(pytest.mark.slow)
