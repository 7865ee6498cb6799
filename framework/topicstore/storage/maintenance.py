"""Compaction, on request and in the background; checkpoints; deletes in all shards.

Compaction costs about as much as storing, and shares the interpreter with it. Background compaction therefore waits
until many messages were stored and then none for a moment, and pauses between two steps when messages are stored again.
It runs concurrently with writers only if the backlog grows very large. While messages are read or delivered, it sleeps
after each step for many times the duration of the step.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import attrs

from topicstore.contract.errors import NotADatabaseError, UnsupportedError
from topicstore.contract.layout import Slab
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.closing import do_all, guarded
from topicstore.runtime.warning import warn_caller
from topicstore.shard.damaged_slab import DamagedSlab
from topicstore.shard.generations import check_local
from topicstore.shard.records import Tail
from topicstore.shard.shard import Shard

from .background_jobs import BackgroundJobs
from .counting.counting import count
from .directory.closed_files import ClosedFiles
from .directory.files import convert_os_errors, permissions_of, sync_directory
from .directory.manifest import write_manifest
from .directory.recovery_points import RecoveryPoints
from .directory.staging import staging_directory, sweep_staging
from .generations import archive_directory, live_records
from .reading.message_times import position_ranges
from .storage import Storage

__all__ = [
    "CompactReport",
    "CompactionScheduler",
    "checkpoint",
    "compact",
    "delete",
    "delete_local",
    "write_copy",
]


@convert_os_errors()
def checkpoint(storage: Storage, target: Path, write_others: Callable[[Path], object]) -> None:
    """Write a copy of a database into the new directory ``target``; see `Database.checkpoint`.

    ``write_others`` adds other files of the database's directory, such as queues, before the copy gets its final name.
    """
    storage.check_may_write()
    if "checkpoint" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} can't make checkpoints")
    if target.resolve().is_relative_to(storage.path.resolve()):
        raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
    if os.path.lexists(target):
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_staging(target.parent)
    with staging_directory(target.parent) as unfinished:
        copy = unfinished / target.name  # a subdirectory, because a database locks its directory, too
        write_copy(storage, copy)
        write_others(copy)
        copy.rename(target)  # atomic: only a complete copy gets the name
        sync_directory(target.parent)
    _warn_of_other_archives(storage, target)


def write_copy(storage: Storage, copy: Path) -> None:
    """Write a copy, consistent over all shards, into the new directory ``copy``. Writers wait only for the snapshot."""
    storage.check_open()
    copy.mkdir(permissions_of(storage.path))
    with ExitStack() as stack:
        copies = []
        for shard in storage.shards:
            steps = shard.writer.open_engine().checkpoint_steps(copy / f"shard-{shard.number:04}")
            stack.callback(steps.close)
            copies.append(steps)
            next(steps)
        tails = storage.locked(
            lambda: [_taken(steps, shard) for steps, shard in zip(copies, storage.shards, strict=True)]
        )
        for steps in copies:
            deque(steps, maxlen=0)
    # A copy has its own record of fsynced writes; otherwise restoring it over the database would look like data loss.
    with closing(RecoveryPoints(copy, storage.id, len(storage.shards))) as synced:
        for number, tail in enumerate(tails):
            synced.record(number, tail.writes, tail.last_position)
    ClosedFiles(copy, storage.id, len(storage.shards), storage.unneeded).write()
    write_manifest(copy, storage.manifest)


def _taken(steps: Iterator[None], shard: Shard) -> Tail:
    """Take the snapshot of a shard, whose lock the caller holds, and return the shard's tail."""
    next(steps)
    return shard.writer.tail


def _warn_of_other_archives(storage: Storage, copy: Path) -> None:
    """Warn about exports whose relative locations resolve to another directory from a copy than from the database."""
    locations = {record.archive for record in storage.shards[0].generations.listed() if record.archive is not None}
    for location in sorted(locations):
        here, there = archive_directory(storage.path, location), archive_directory(copy, location)
        if here != there:
            warn_caller(
                f"what was archived to {here} is noted by a relative path: {copy} looks for it in {there}",
                UserWarning,
            )


def delete(storage: Storage, request: ReplayRequest, shards: Collection[int] | None) -> int:
    """Delete the messages of some shards that a replay would return; see `Database.delete`."""
    storage.check_may_write()
    for number in shards or ():
        storage.check_shard(number)
    chosen = storage.shards if shards is None else [storage.shards[number] for number in sorted(set(shards))]
    for shard in chosen:
        shard.writer.check_owned()
    bounds = [(shard, shard.writer.watermark) for shard in chosen]
    # All shards are checked before the first one deletes anything.
    check_local(found for shard, bound in bounds for found in _archived(storage, shard, request, bound))
    return guarded(
        lambda: sum(
            shard.rewriter.delete(request.topic_filter, first, last)
            for shard, bound in bounds
            for first, last in position_ranges(storage, shard, request, bound)
        ),
        partial(_forget_what_was_read, storage),
    )


def _archived(storage: Storage, shard: Shard, request: ReplayRequest, bound: int) -> Iterator[tuple[int, int]]:
    """Yield the number and last position of archived generations with messages to delete."""
    archived = {number for number, _ in shard.generations.archived_in(0, bound)}
    if archived:
        for first, last in position_ranges(storage, shard, request, bound, archived):
            yield from shard.generations.archived_in(first, last)


def delete_local(
    storage: Storage, shard: Shard, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[str]
) -> int:
    """Delete a shard's messages from ``first`` to ``last``, except archived ones and those that match ``spare``.

    Without a topic filter, messages of all topics are deleted. Returns the number of deleted messages.
    """
    storage.check_may_write()
    spared = [*map(TopicFilter, spare)]
    return guarded(
        lambda: shard.rewriter.delete_local(topic_filter, first, last, spared), partial(_forget_what_was_read, storage)
    )


def _forget_what_was_read(storage: Storage) -> None:
    if storage.listener is not None:
        storage.listener.forget()


WORTH_IT = 65_536
"""The number of newly stored messages after which the scheduler checks for work."""
URGENT = 4 * WORTH_IT
"""The backlog of a shard, in messages, from which compaction runs concurrently with writers."""
QUIET = 0.5
"""The number of seconds without a store after which background compaction may run."""

_REST = 19
"""The pause after a step, as a multiple of the step's duration, while messages are read or delivered. Compaction then
uses a twentieth of the time."""


@attrs.frozen(kw_only=True)
class CompactReport:
    """The result of a compaction."""

    messages: int
    """The number of messages rewritten. A message that was rewritten twice counts twice."""
    live_bytes_before: int
    live_bytes_after: int
    disk_bytes_before: int
    disk_bytes_after: int
    seconds: float
    never_merging: tuple[str, ...] = ()
    """The layouts in use, if none of them supports compaction; otherwise empty."""


def compact(storage: Storage, stop: Callable[[], bool]) -> CompactReport:
    """Compact and count everything stored before the call; see `Database.compact`."""
    storage.check_may_write()
    started, before = time.perf_counter(), _Sizes.of(storage)
    messages = sum(shard.rewriter.compact(whole=True, stop=stop) for shard in storage.shards)
    for shard in storage.shards:
        count(storage, shard, stop, whole=True)
    for shard in storage.shards:
        if not stop():
            shard.rewriter.reclaim()
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
    slabs = [(record.layout, slab) for shard in storage.shards for record, slab in shard.generations.with_slabs()]
    if any(type(slab).compact is not Slab.compact or isinstance(slab, DamagedSlab) for _, slab in slabs):
        return ()
    return tuple(sorted({layout for layout, _ in slabs}))


@attrs.frozen
class _Sizes:
    """The sizes of a database in bytes."""

    live_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, storage: Storage) -> _Sizes:
        live = storage.locked(lambda: live_records(storage.shards))
        records = [record for records in live.values() for record in records]
        disk_bytes = sum(shard.writer.open_engine().info().disk_bytes for shard in storage.shards)
        return cls(sum(record.live_bytes for record in records), disk_bytes)


class CompactionScheduler:
    """A scheduler that compacts the shards of one database in the background."""

    def __init__(self, shards: Sequence[Shard], jobs: BackgroundJobs) -> None:
        self.task = BackgroundTask("compaction", lambda _: self._work())
        self._shards = shards
        self._jobs = jobs
        self._job = jobs.add(self._look, messages=WORTH_IT)
        self._traffic = 0
        """The number of reads and deliveries at the start of the current step. Used only by the task's thread."""
        self._began = 0.0
        """The start of the current step (`time.monotonic`). Used only by the task's thread."""
        if self._backlog() >= WORTH_IT:
            self.task.wake()

    def _look(self) -> None:
        self._job.messages = self._jobs.messages + WORTH_IT
        self.task.wake()

    def stop(self) -> None:
        """Stop the scheduler, and wait until it has ended, at most one step later. This is idempotent."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        """Compact whenever no messages are stored for a moment, until no compaction is worth the work."""
        done = False
        while not done and not self.task.stopping.is_set():
            seen = self._jobs.messages
            self.task.stopping.wait(QUIET)
            if seen == self._jobs.messages or self._backlog() >= URGENT:
                done = self._compact(seen)

    def _compact(self, seen: int) -> bool:
        """Compact the shards where that is worth the work; return False if a store has interrupted it."""
        self._begin()
        pauses = [(shard, partial(self._must_pause, shard, seen)) for shard in self._shards]
        do_all(
            (partial(shard.rewriter.compact, whole=False, stop=stop) for shard, stop in pauses),
            "could not be compacted",
        )
        return seen == self._jobs.messages

    def _must_pause(self, shard: Shard, seen: int) -> bool:
        """Return whether to stop compacting. Before, sleep if messages were read or delivered during the last step."""
        if seen == self._jobs.messages and self._traffic != self._reads_and_deliveries():
            self.task.stopping.wait(_REST * (time.monotonic() - self._began))
        self._begin()
        return self.task.stopping.is_set() or (seen != self._jobs.messages and shard.rewriter.backlog() < URGENT)

    def _begin(self) -> None:
        self._traffic, self._began = self._reads_and_deliveries(), time.monotonic()

    def _reads_and_deliveries(self) -> int:
        return sum(shard.writer.counters.reads + shard.writer.counters.state_writes for shard in self._shards)

    def _backlog(self) -> int:
        return max(shard.rewriter.backlog() for shard in self._shards)
