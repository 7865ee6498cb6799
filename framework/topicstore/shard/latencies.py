"""How long a shard's batches take, as histograms, which start empty when it is opened."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["BOUNDS", "Latencies", "ShardLatencies"]

BOUNDS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The longest duration of each class, in seconds; one more class has those that took longer."""


class Latencies:
    """Durations by class. Observed without a lock, so one of two at once may be missed."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """How many durations there were in each class of `BOUNDS`, and how many above them."""
        self.seconds = 0.0
        """All of them together."""

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


class ShardLatencies:
    """The durations of one shard's work."""

    __slots__ = ("read", "store")

    def __init__(self) -> None:
        self.store = Latencies()
        """From a batch's arrival, with its wait for the shard, until it was as durable as promised, and visible."""
        self.read = Latencies()
        """Of reading the next messages of a stream."""
