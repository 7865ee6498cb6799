"""One timed store and one timed replay of a contender, for the phases of a worker and the figures of layouts."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import attrs

from topicstore_benchmarks.contenders.contender import Contender
from topicstore_benchmarks.timing import consume

from .expected import ExpectedReplay

__all__ = ["Replayed", "replayed", "stored"]


@attrs.frozen
class Replayed:
    """Seconds that a replay took."""

    first: float
    """Seconds until its first message."""
    all: float


def stored(contender: Contender, batches: Iterable[Any]) -> float:
    """Store batches that are ready; return the seconds that it took."""
    gc.collect()
    started = time.perf_counter()
    for batch in batches:
        contender.store(batch)
    return time.perf_counter() - started


def replayed(contender: Contender, expected: ExpectedReplay) -> Replayed:
    """Replay everything that a request asks for. Raises `WrongReplayError` if the number of messages is wrong."""
    started = time.perf_counter()
    replay = iter(contender.replay(expected.topic_filter, expected.start))
    count = consume(islice(replay, 1))
    first = time.perf_counter()
    count += consume(replay)
    ended = time.perf_counter()
    expected.check_count(count)
    return Replayed(first - started, ended - started)
