"""How often the processes that run tests collect garbage."""

from __future__ import annotations

import gc

__all__ = ["pytest_collection_finish"]


def pytest_collection_finish() -> None:
    """Let the collector run less often, and skip the collected tests: it took a tenth of the time of a run."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
