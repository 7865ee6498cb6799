"""Compaction: when it is asked for, and in the background when nobody stores.

Merging costs about as much as storing, and shares the interpreter with it. So the background waits until
a database that took in much has been quiet for a moment, and stops between two steps when
something is stored again. Only if the backlog grows very large it works beside the writers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from topicstore.background import BackgroundTask
from topicstore.shard.shard import Shard

from .generations import live_records
from .storage import Storage

__all__ = ["CompactReport", "CompactionScheduler", "compact"]

WORTH_IT = 65_536
"""Messages stored after which it looks whether there is work."""
URGENT = 32 * WORTH_IT
"""Messages waiting in a shard from which on it doesn't wait for quiet."""
QUIET = 0.5
"""Seconds without a store that count as quiet."""


@attrs.frozen(kw_only=True)
class CompactReport:
    """What a compaction did."""

    messages: int
    """Rewritten; one that was merged twice counts twice."""
    live_bytes_before: int
    live_bytes_after: int
    disk_bytes_before: int
    disk_bytes_after: int
    seconds: float


def compact(storage: Storage) -> CompactReport:
    """Bring everything stored before the call into the form that is read fastest; see `Database.compact`."""
    storage.check_may_write()
    started, before = time.perf_counter(), _Sizes.of(storage)
    messages = sum(shard.compact(whole=True) for shard in storage.shards)
    for shard in storage.shards:
        shard.reclaim()
    after = _Sizes.of(storage)
    return CompactReport(
        messages=messages,
        live_bytes_before=before.live_bytes,
        live_bytes_after=after.live_bytes,
        disk_bytes_before=before.disk_bytes,
        disk_bytes_after=after.disk_bytes,
        seconds=time.perf_counter() - started,
    )


@attrs.frozen
class _Sizes:
    """How large a database is."""

    live_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, storage: Storage) -> _Sizes:
        with storage.locked():
            records = [record for records in live_records(storage.shards).values() for record in records]
        disk_bytes = sum(shard.engine().stats().disk_bytes for shard in storage.shards)
        return cls(sum(record.live_bytes for record in records), disk_bytes)


class CompactionScheduler:
    """Compacts the shards of one database in the background, when there is something to do."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.task = BackgroundTask("compaction", lambda _: self._work(), goes_on=False)
        self._shards = shards
        self._stored = 0
        """Messages, about: guarded by nothing, because one that two threads miss only delays a look."""
        self._looked = 0
        """So many were stored when it was last woken. Guarded as little."""
        if self._backlog() >= WORTH_IT:
            self.task.wake()

    def stored(self, messages: int) -> None:
        """So many messages were stored. Cheap."""
        self._stored += messages
        if self._stored - self._looked >= WORTH_IT:
            self._looked = self._stored
            self.task.wake()

    def stop(self) -> None:
        """Return when it has ended, at most a step later. May be called twice."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        """Compact until nothing is worth it, each time that it is quiet."""
        done = False
        while not done and not self.task.stopping.is_set():
            seen = self._stored
            self.task.stopping.wait(QUIET)
            if seen == self._stored or self._backlog() >= URGENT:
                done = self._compact(seen)

    def _compact(self, seen: int) -> bool:
        """Compact what is worth it; return whether it came to the end."""
        for shard in self._shards:
            shard.compact(whole=False, stop=lambda shard=shard: self._must_pause(shard, seen))  # type: ignore[misc]
        return seen == self._stored

    def _must_pause(self, shard: Shard, seen: int) -> bool:
        return self.task.stopping.is_set() or (seen != self._stored and shard.backlog() < URGENT)

    def _backlog(self) -> int:
        return max(shard.backlog() for shard in self._shards)
