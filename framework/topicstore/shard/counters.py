"""What a shard counts from the moment it is opened."""

from __future__ import annotations

import attrs

__all__ = ["ShardCounters"]


@attrs.define
class ShardCounters:
    """Work done and time spent since the database was opened. Times are seconds.

    What is written is counted under the shard's lock. Reads are counted under none: of two at once one may be missed.
    """

    batches: int = 0
    """Committed."""
    messages: int = 0
    """Committed."""
    bytes: int = 0
    """Of the values written for them, indexes and state included."""
    failures: int = 0
    """Writes and flushes that failed."""
    commit_seconds: float = 0.0
    """Spent in the engine's writes."""
    flushes: int = 0
    """Of the engine's log; with ``durability="sync"`` one may serve many batches."""
    flush_seconds: float = 0.0
    deleted: int = 0
    """Messages deleted."""
    compacted: int = 0
    """Messages rewritten by compactions."""
    reads: int = 0
    """Batches read by iterators."""
    read_messages: int = 0
    """Messages in them."""
    read_seconds: float = 0.0
    """Spent reading them."""
