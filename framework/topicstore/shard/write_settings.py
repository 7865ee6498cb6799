"""What a database's manifest says of writing."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from topicstore.contract.positions import MAX_TIME

__all__ = ["WriteSettings"]


@attrs.frozen(kw_only=True)
class WriteSettings:
    """How a shard's messages get their positions, and when they are durable."""

    durability: str
    timestamps: str
    late: str
    max_skew: float
    """Seconds that a message's own time may lie ahead of the clock."""
    synced_at_once: bool
    """Whether the engine syncs every write, whatever the durability."""
    clock: Callable[[], int]
    """Returns the present as microseconds since the epoch."""

    def now(self) -> int:
        """Return the present; a clock before 1970 or after 2255 counts as their ends."""
        return min(max(self.clock(), 0), MAX_TIME)
