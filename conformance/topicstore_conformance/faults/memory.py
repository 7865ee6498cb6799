"""Counts the memory blocks that a process keeps, for tests of leaks: blocks of Python's allocator, without garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

__all__ = ["kept_by"]

_NOISE = 64
"""The number of blocks that come and go with other threads and with Python's own caches."""


def kept_by(work: Callable[[int], object], times: int, warm_up: int = 50) -> int:
    """Return the number of blocks that ``times`` calls of ``work`` leave in memory: the lower one of two rounds.

    `_NOISE` blocks are subtracted. ``warm_up`` calls before the first round fill bounded memory, such as caches.

    work: a function of the number of the call.
    """
    for number in range(warm_up):
        work(number)
    grown = []
    for first in (warm_up, warm_up + times):
        before = _blocks()
        for number in range(first, first + times):
            work(number)
        grown.append(_blocks() - before)
    return max(min(grown) - _NOISE, 0)


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()
