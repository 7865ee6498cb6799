"""The settings of a database that concern writing."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from topicstore.contract.positions import MAX_TIME

__all__ = ["WriteSettings"]


@attrs.frozen(kw_only=True)
class WriteSettings:
    """The settings by which a shard assigns positions and makes messages durable."""

    durability: str
    timestamps: str
    late: str
    max_skew: float
    """The number of seconds by which a message's own time may be ahead of the clock."""
    synced_at_once: bool
    """Whether the engine syncs every write, whatever the durability."""
    clock: Callable[[], int]
    """A function that returns the present time in microseconds since the epoch."""

    def now(self) -> int:
        """Return the present time, clamped to the range of positions, from 1970 to 2255."""
        return min(max(self.clock(), 0), MAX_TIME)
