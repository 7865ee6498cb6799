"""How long it takes to open a database that holds much."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import topicstore

from .cases import CASES, batches

__all__ = ["measure_opening"]


def measure_opening(messages: int, rounds: int) -> float:
    """Return the median seconds of `topicstore.open` on a database of so many messages."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with topicstore.open(path) as db:
            for _ in range(messages // 100_000):
                for batch in batches(CASES[-1], "json", 100_000):
                    db.store(batch)
        for _ in range(rounds):
            started = time.perf_counter()
            with topicstore.open(path):
                seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
