"""Average latencies of stores, commits and reads over the last seconds and minutes, by shard."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from topicstore.shard.shard import Shard

__all__ = ["INTERVALS", "Averages", "Kind"]

INTERVALS = {"current": 10.0, "last5m": 300.0}
"""The lengths of the intervals in seconds, by name."""

Kind = Literal["store", "commit", "read"]
_KINDS: tuple[Kind, ...] = ("store", "commit", "read")
_Totals = tuple[tuple[tuple[int, float], ...], ...]
"""By kind and shard, the number of operations, and their total duration in seconds."""


class Averages:
    """Rolling averages, computed from samples of totals over the last five minutes. Thread-safe."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        """Guards the samples."""
        self._samples: deque[tuple[float, _Totals]] = deque()
        """Times and totals; all samples but the first are within the longest interval."""
        self.sample()

    def sample(self) -> None:
        """Take a sample of the current totals. To be called about once a second."""
        now, totals = time.monotonic(), self._totals()
        with self._lock:
            self._samples.append((now, totals))
            while len(self._samples) > 1 and self._samples[1][0] <= now - max(INTERVALS.values()):
                self._samples.popleft()

    def microseconds(self, kind: Kind) -> dict[tuple[int, str], float]:
        """Return averages by shard and interval, in microseconds; 0 without operations."""
        now, place, totals = time.monotonic(), _KINDS.index(kind), self._totals()[_KINDS.index(kind)]
        with self._lock:
            samples = list(self._samples)
        found = {}
        for interval, seconds in INTERVALS.items():
            before = next((old for at, old in reversed(samples) if at <= now - seconds), samples[0][1])[place]
            for shard, ((times, took), (times_before, took_before)) in enumerate(zip(totals, before, strict=True)):
                done = times - times_before
                found[shard, interval] = (took - took_before) / done * 1e6 if done else 0.0
        return found

    def _totals(self) -> _Totals:
        counters = [(shard.writer.counters, shard.writer.latencies) for shard in self._shards]
        return (
            tuple((sum(latencies.store.counts), latencies.store.seconds) for _, latencies in counters),
            tuple((one.batches + one.state_writes, one.commit_seconds) for one, _ in counters),
            tuple((one.reads, one.read_seconds) for one, _ in counters),
        )
