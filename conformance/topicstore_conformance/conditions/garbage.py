"""Garbage collector settings of the processes that run tests."""

from __future__ import annotations

import gc

__all__ = ["pytest_collection_finish"]


def pytest_collection_finish() -> None:
    """Make the garbage collector run less often and ignore the collected tests, which saves a tenth of the run time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
