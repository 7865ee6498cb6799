"""Compaction: on request, and in the background while no messages are stored.

Merging costs about as much as storing, and shares the interpreter with it. So compaction in the background waits until
many messages were stored and then none for a moment, and stops between two steps when messages are stored again. Only
if the backlog grows very large does it run beside the writers. While messages are read or delivered, it rests after
each step, many times as long as the step took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from topicstore.background import BackgroundTask
from topicstore.contract.layout import Slab
from topicstore.failures import do_all
from topicstore.shard.damaged_slab import DamagedSlab
from topicstore.shard.shard import Shard

from .counting import count
from .generations import live_records
from .storage import Storage

__all__ = ["CompactReport", "CompactionScheduler", "compact"]

WORTH_IT = 65_536
"""The number of messages stored after which the scheduler checks whether there is work."""
URGENT = 32 * WORTH_IT
"""The number of messages that wait in a shard from which compaction doesn't wait for a quiet moment."""
QUIET = 0.5
"""The number of seconds without a store that count as a quiet moment."""

_REST = 19
"""The rest after a step, as a multiple of the time that the step took: while messages are read or delivered, compaction
uses a twentieth of the time."""


@attrs.frozen(kw_only=True)
class CompactReport:
    """The result of a compaction."""

    messages: int
    """The number of messages rewritten; one that was merged twice counts twice."""
    live_bytes_before: int
    live_bytes_after: int
    disk_bytes_before: int
    disk_bytes_after: int
    seconds: float
    never_merging: tuple[str, ...] = ()
    """The layouts in use, if none of them ever merges: they keep messages as they were stored. Else nothing."""


def compact(storage: Storage, stop: Callable[[], bool]) -> CompactReport:
    """Merge and count everything stored before the call; see `Database.compact`."""
    storage.check_may_write()
    started, before = time.perf_counter(), _Sizes.of(storage)
    messages = sum(shard.compact(whole=True, stop=stop) for shard in storage.shards)
    for shard in storage.shards:
        count(storage, shard, stop)
    for shard in storage.shards:
        if not stop():
            shard.reclaim()
    after = _Sizes.of(storage)
    return CompactReport(
        messages=messages,
        live_bytes_before=before.live_bytes,
        live_bytes_after=after.live_bytes,
        disk_bytes_before=before.disk_bytes,
        disk_bytes_after=after.disk_bytes,
        seconds=time.perf_counter() - started,
        never_merging=_never_merging(storage),
    )


def _never_merging(storage: Storage) -> tuple[str, ...]:
    slabs = [(record.layout, slab) for shard in storage.shards for record, slab in shard.slabs()]
    if any(type(slab).compact is not Slab.compact or isinstance(slab, DamagedSlab) for _, slab in slabs):
        return ()
    return tuple(sorted({layout for layout, _ in slabs}))


@attrs.frozen
class _Sizes:
    """The size of a database."""

    live_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, storage: Storage) -> _Sizes:
        live = storage.locked(lambda: live_records(storage.shards))
        records = [record for records in live.values() for record in records]
        disk_bytes = sum(shard.engine().info().disk_bytes for shard in storage.shards)
        return cls(sum(record.live_bytes for record in records), disk_bytes)


class CompactionScheduler:
    """Compacts the shards of one database in the background, when there is something to do."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.task = BackgroundTask("compaction", lambda _: self._work())
        self._shards = shards
        self._stored = 0
        """The approximate number of messages stored. It needs no lock, because a lost count only delays a check."""
        self._looked = 0
        """The value of ``_stored`` when the thread was last woken. It needs no lock either."""
        self._traffic = 0
        """The reads and deliveries when the current step began. Only the thread uses it and the next attribute."""
        self._began = 0.0
        if self._backlog() >= WORTH_IT:
            self.task.wake()

    def stored(self, messages: int) -> None:
        """Note that ``messages`` messages were stored. This is cheap."""
        self._stored += messages
        if self._stored - self._looked >= WORTH_IT:
            self._looked = self._stored
            self.task.wake()

    def stop(self) -> None:
        """Stop the scheduler, and return when it has ended, at most one step later. May be called twice."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        """Compact in every quiet moment until no work is worthwhile."""
        done = False
        while not done and not self.task.stopping.is_set():
            seen = self._stored
            self.task.stopping.wait(QUIET)
            if seen == self._stored or self._backlog() >= URGENT:
                done = self._compact(seen)

    def _compact(self, seen: int) -> bool:
        """Compact the shards that are worth it; return whether the end was reached."""
        self._begin()
        pauses = [(shard, partial(self._must_pause, shard, seen)) for shard in self._shards]
        do_all((partial(shard.compact, whole=False, stop=stop) for shard, stop in pauses), "could not be compacted")
        return seen == self._stored

    def _must_pause(self, shard: Shard, seen: int) -> bool:
        """Return whether to stop; before the next step, rest if messages were read or delivered during the last."""
        if seen == self._stored and self._traffic != self._reads_and_deliveries():
            self.task.stopping.wait(_REST * (time.monotonic() - self._began))
        self._begin()
        return self.task.stopping.is_set() or (seen != self._stored and shard.backlog() < URGENT)

    def _begin(self) -> None:
        self._traffic, self._began = self._reads_and_deliveries(), time.monotonic()

    def _reads_and_deliveries(self) -> int:
        return sum(shard.counters.reads + shard.counters.state_writes for shard in self._shards)

    def _backlog(self) -> int:
        return max(shard.backlog() for shard in self._shards)
