"""Measures time within one process: on one core, of complete replays only, in consecutive rounds.

Each round measures all compared variants. Ratios are taken within a round, so that they are valid on a machine whose
speed drifts, and the median over the rounds is reported.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version

__all__ = ["Progress", "check", "consume", "machine", "median_of", "one_core", "progress", "timed"]

Progress = Callable[[str], None]
"""A function that reports the progress of a measurement, as one line of text."""
_STARTED = time.monotonic()


def progress(text: str) -> None:
    """Report progress on standard error, with the seconds since the program began."""
    print(f"{time.monotonic() - _STARTED:6.0f} s  {text}", file=sys.stderr, flush=True)


def one_core() -> None:
    """Bind this process, including the engine's threads, to one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def machine() -> str:
    """Return a description of the machine and the versions of the measurement."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("topicstore", "rocksdict", "msgspec", "pyarrow"))
    return f"Python {platform.python_version()}, {platform.machine()}, one core; {packages}"


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_of(work: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of ``rounds`` calls of ``work``, after one that warms up and doesn't count."""
    work()
    gc.collect()
    return statistics.median(timed(work) for _ in range(rounds))


def consume(found: Iterable[object]) -> int:
    """Read a replay to its end without storing messages; return their number."""
    rows = 0
    for _row in found:
        rows += 1
    return rows


def check(rows: int, wanted: int) -> None:
    """Raise `AssertionError` if a replay was not complete."""
    if rows != wanted:
        raise AssertionError(f"a replay returned {rows:,} of {wanted:,} messages")
