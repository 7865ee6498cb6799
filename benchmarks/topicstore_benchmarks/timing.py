"""How time is taken: on one core, of complete replays only, in rounds that follow each other.

Every section measures all its sides in each round, takes ratios within a round, so that they
hold on a machine whose speed drifts, and reports the median over the rounds.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version

__all__ = ["check", "drained", "machine", "one_core", "timed"]


def one_core() -> None:
    """Bind the process to one core, the engine's threads included."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def machine() -> str:
    """Return what the figures were measured with."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("topicstore", "rocksdict", "msgspec", "pyarrow"))
    return f"Python {platform.python_version()}, {platform.machine()}, one core; {packages}"


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drained(found: Iterable[object]) -> int:
    """Read a replay to its end, keeping nothing; return how much it gave."""
    rows = 0
    for _row in found:
        rows += 1
    return rows


def check(rows: int, wanted: int) -> None:
    """Raise `AssertionError` if a replay was not complete."""
    if rows != wanted:
        raise AssertionError(f"a replay returned {rows:,} of {wanted:,} messages")
