"""The decisions of a reader of a log: a follower, or a site that takes over a shard."""

from __future__ import annotations

import enum

import msgspec

from topicstore.contract.errors import CorruptionError

from .heads import Head, Kind, Progress

__all__ = ["LocalWrite", "Source", "apply", "check_reaches", "missing", "where_to_read"]


class Source(enum.Enum):
    """The source from which a reader continues."""

    LOG = enum.auto()
    """The entries read are valid, and reading continues in the log."""
    BASE = enum.auto()
    """The entries read are discarded, and the newest base replaces the shard."""


class LocalWrite(msgspec.Struct, frozen=True):
    """One atomic write of the local engine: the changes with the progress, so that a crash can't separate them."""

    changes: bool
    """Whether the entry's changes are part of the write; False for fences, releases and void entries."""
    first_position: int
    """The position of the first change, taken from the entry: replicas never assign positions from their clocks."""
    progress: Progress


def where_to_read(progress: Progress, cut: int) -> Source:
    """Return whether entries read from ``progress`` on are valid, given the highest cut found *after* reading.

    Below a cut, entries may have been deleted. An entry found there may have been created at an emptied index: a fence
    of a site that mistook the index for the log's end. Looking after reading is enough, because a cut is created before
    anything below it is deleted.
    """
    return Source.BASE if cut > progress.next else Source.LOG


def apply(progress: Progress, head: Head) -> list[LocalWrite]:
    """Return the local engine's writes for the next entry, in order; each must be atomic.

    An entry of a lower epoch than an earlier entry is void: it is the late fence of a site whose takeover failed.

    Raises `CorruptionError` if the entry does not follow the entry that was read before it.
    """
    place = f"log entry {head.index}"
    if head.index != progress.next:
        raise CorruptionError(f"entry {progress.next} was to be read", place)
    if head.before != progress.before:
        raise CorruptionError("it was written behind another entry than the one that lies before it", place)
    counts = head.epoch >= progress.epoch
    position = progress.last_position
    if counts and head.last_position:
        if not position < head.first_position <= head.last_position:
            raise CorruptionError(
                f"its positions begin at {head.first_position}, not behind {position}, the last one before it", place
            )
        position = head.last_position
    fence = head.index if head.kind is Kind.FENCE else progress.fence
    read = Progress(head.index + 1, max(progress.epoch, head.epoch), head.checksum, position, fence)
    return [LocalWrite(counts and head.kind is Kind.CHANGES, head.first_position, read)]


def check_reaches(progress: Progress, last: Head | None, cut: int) -> None:
    """Raise `CorruptionError` if the log lost an applied entry, for example because an old backup was restored.

    ``last`` is the header of the entry before ``progress.next``, or None if the log doesn't have that entry. ``cut`` is
    the index below which the log may have been truncated. If it is at or above ``progress.next``, truncation may have
    deleted the entry, and nothing is raised.
    """
    if progress.next == 0 or cut >= progress.next:
        return
    if last is None:
        raise CorruptionError("it was applied here and is gone from the log", f"log entry {progress.next - 1}")
    if last.checksum != progress.before:
        raise CorruptionError("it is not the one that was applied here", f"log entry {progress.next - 1}")


def missing(index: int, cut: int) -> Source:
    """Return where to continue if an entry was not found, though an entry above it was listed *before* the request.

    A listing that runs at the same time as writes may lack the entry, but a later request must find it, because entries
    are written in order. Raises `CorruptionError` unless a cut shows that truncation has deleted the entry.
    """
    if cut > index:
        return Source.BASE
    raise CorruptionError("it is missing, and an entry behind it is there", f"log entry {index}")
