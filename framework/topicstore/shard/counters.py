"""The counters of a shard, which start at 0 when it is opened."""

from __future__ import annotations

import attrs

__all__ = ["ShardCounters"]


@attrs.define
class ShardCounters:
    """Work done and time spent since the database was opened. Times are in seconds.

    Writes are counted under the shard's lock. Reads are counted without a lock, so one of two at once may be missed.
    """

    batches: int = 0
    """Batches committed."""
    messages: int = 0
    """Messages committed."""
    bytes: int = 0
    """Bytes of the values written for the messages, indexes and state included."""
    payload_bytes: int = 0
    """Bytes of the payloads of the messages committed."""
    failed_batches: int = 0
    """Batches that were refused by the shard or could not be written, and those whose flush failed, which `batches` has
    too. Counted for each shard that a batch did not get into."""
    failures: int = 0
    """Writes and flushes that failed, and notes of what is on disk that failed."""
    commit_seconds: float = 0.0
    """Seconds spent in the engine's writes."""
    flushes: int = 0
    """Flushes of the engine's log; with ``durability="sync"`` one may serve many batches."""
    flush_seconds: float = 0.0
    deleted: int = 0
    """Messages deleted."""
    compacted: int = 0
    """Messages rewritten by compactions."""
    reads: int = 0
    """Batches read by cursors."""
    read_messages: int = 0
    """Messages in those batches."""
    read_seconds: float = 0.0
    """Seconds spent reading them."""
    state_writes: int = 0
    """Commits of state without messages, such as those of sessions that deliver."""
