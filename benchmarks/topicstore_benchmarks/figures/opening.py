"""The section ``opening``: the time of opening a database with many messages."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import topicstore

from .cases import CASES, batches
from .figure import Figure, Section, Sheet

__all__ = ["measure_opening", "opening_section"]


def measure_opening(messages: int, rounds: int) -> float:
    """Return the median seconds of `topicstore.open` on a database of ``messages`` messages."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with topicstore.open(path, auto_compact=False) as db:
            for _ in range(messages // 100_000):
                for batch in batches(CASES[-1], "json", 100_000):
                    db.store(batch)
        for _ in range(rounds):
            started = time.perf_counter()
            with topicstore.open(path, auto_compact=False):
                seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def opening_section(messages: int, seconds: float) -> Section:
    """Return the one figure."""
    figure = Figure(
        data=f"{messages:,} messages", subject="block", name="open", value=seconds * 1_000, unit="ms", most=200
    )
    sheet = Sheet(
        title="Opening a database, ms",
        columns=["data", "layout", figure.name],
        rows=[[figure.data, figure.subject, figure.cell()]],
        note="median; at most, in brackets",
    )
    return Section(name="opening", figures=[figure], sheets=[sheet])
