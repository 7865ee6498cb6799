"""Compaction: on request, and in the background while no messages are stored.

Merging costs about as much as storing, and shares the interpreter with it. So compaction in the background waits until
many messages were stored and then none for a moment, and stops between two steps when messages are stored again. Only
if the backlog grows very large does it run beside the writers. While messages are read or delivered, it rests after
each step, many times as long as the step took.

Checkpoints: copies of a database, which are databases themselves.

Deleting messages by topic and time, in all shards.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

from .archive_locations import archive_directory
from .background_jobs import BackgroundJobs
from .counting.counting import count
from .directory.closed_files import ClosedFiles
from .directory.files import failure_told, permissions_of, sync_directory
from .directory.manifest import write_manifest
from .directory.recovery_points import SyncedWrites
from .directory.staging import draft, sweep_drafts
from .generations import live_records
from .reading.message_times import runs_of
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


@failure_told()
def checkpoint(storage: Storage, target: Path, write_others: Callable[[Path], object]) -> None:
    """Write a copy of a database into the new directory ``target``; see `Database.checkpoint`.

    ``write_others`` adds to the copy, before it gets its name, what else lies in the database's directory.
    """
    storage.check_may_write()
    if "checkpoint" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} can't make checkpoints")
    if target.resolve().is_relative_to(storage.path.resolve()):
        raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
    if os.path.lexists(target):
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_drafts(target.parent)
    with draft(target.parent) as unfinished:
        copy = unfinished / target.name  # a directory in the draft, because both drafts and databases are locked
        write_copy(storage, copy)
        write_others(copy)
        copy.rename(target)  # only a complete copy gets the name
        sync_directory(target.parent)
    _warn_of_other_archives(storage, target)


def write_copy(storage: Storage, copy: Path) -> None:
    """Write a copy, consistent over all shards, into the new directory ``copy``. Writers only wait for the snapshot."""
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
    # If the copy is put back where the database was, its notes replace later ones.
    with closing(SyncedWrites(copy, storage.id, len(storage.shards))) as synced:
        for number, tail in enumerate(tails):
            synced.note(number, tail.writes, tail.last_position)
    ClosedFiles(copy, storage.id, len(storage.shards), storage.unneeded).write()
    write_manifest(copy, storage.manifest)


def _taken(steps: Iterator[None], shard: Shard) -> Tail:
    """Take the snapshot of a shard, whose lock is held, and return its tail."""
    next(steps)
    return shard.writer.tail


def _warn_of_other_archives(storage: Storage, copy: Path) -> None:
    """Warn of exports whose relative locations lead a copy to another directory than the database."""
    locations = {record.archive for record in storage.shards[0].generations.listed() if record.archive is not None}
    for location in sorted(locations):
        here, there = archive_directory(storage.path, location), archive_directory(copy, location)
        if here != there:
            warn_caller(
                f"what was archived to {here} is noted by a relative path: {copy} looks for it in {there}",
                UserWarning,
            )


def delete(storage: Storage, request: ReplayRequest) -> int:
    """Delete the messages that a replay would return; see `Database.delete`."""
    storage.check_may_write()
    bounds = [(shard, shard.writer.watermark) for shard in storage.shards]
    # All shards are checked before the first one deletes anything.
    check_local(found for shard, bound in bounds for found in _archived(storage, shard, request, bound))
    return guarded(
        lambda: sum(
            shard.rewriter.delete(request.topic_filter, first, last)
            for shard, bound in bounds
            for first, last in runs_of(storage, shard, request, bound)
        ),
        partial(_forget_what_was_read, storage),
    )


def _archived(storage: Storage, shard: Shard, request: ReplayRequest, bound: int) -> Iterator[tuple[int, int]]:
    """Yield the number and last position of archived generations with messages to delete."""
    archived = {number for number, _ in shard.generations.archived_in(0, bound)}
    if archived:
        for first, last in runs_of(storage, shard, request, bound, archived):
            yield from shard.generations.archived_in(first, last)


def delete_local(
    storage: Storage, shard: Shard, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[str]
) -> int:
    """Delete messages of a shard in a range of positions that don't match ``spare`` and aren't archived.

    Without a filter, messages of all topics are deleted.
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
    messages = sum(shard.rewriter.compact(whole=True, stop=stop) for shard in storage.shards)
    for shard in storage.shards:
        count(storage, shard, stop)
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
    """The size of a database."""

    live_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, storage: Storage) -> _Sizes:
        live = storage.locked(lambda: live_records(storage.shards))
        records = [record for records in live.values() for record in records]
        disk_bytes = sum(shard.writer.open_engine().info().disk_bytes for shard in storage.shards)
        return cls(sum(record.live_bytes for record in records), disk_bytes)


class CompactionScheduler:
    """Compacts the shards of one database in the background, when there is something to do."""

    def __init__(self, shards: Sequence[Shard], jobs: BackgroundJobs) -> None:
        self.task = BackgroundTask("compaction", lambda _: self._work())
        self._shards = shards
        self._jobs = jobs
        self._job = jobs.add(self._look, messages=WORTH_IT)
        self._traffic = 0
        """The reads and deliveries when the current step began. Only the thread uses it and the next attribute."""
        self._began = 0.0
        if self._backlog() >= WORTH_IT:
            self.task.wake()

    def _look(self) -> None:
        self._job.messages = self._jobs.messages + WORTH_IT
        self.task.wake()

    def stop(self) -> None:
        """Stop the scheduler, and return when it has ended, at most one step later. May be called twice."""
        self.task.stop()
        self.task.join()

    def _work(self) -> None:
        """Compact in every quiet moment until no work is worthwhile."""
        done = False
        while not done and not self.task.stopping.is_set():
            seen = self._jobs.messages
            self.task.stopping.wait(QUIET)
            if seen == self._jobs.messages or self._backlog() >= URGENT:
                done = self._compact(seen)

    def _compact(self, seen: int) -> bool:
        """Compact the shards that are worth it; return whether the end was reached."""
        self._begin()
        pauses = [(shard, partial(self._must_pause, shard, seen)) for shard in self._shards]
        do_all(
            (partial(shard.rewriter.compact, whole=False, stop=stop) for shard, stop in pauses),
            "could not be compacted",
        )
        return seen == self._jobs.messages

    def _must_pause(self, shard: Shard, seen: int) -> bool:
        """Return whether to stop; before the next step, rest if messages were read or delivered during the last."""
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
