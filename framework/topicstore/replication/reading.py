"""What whoever reads a log does with what it finds: a follower, and a site that is about to own the shard."""

from __future__ import annotations

import enum

import msgspec

from topicstore.contract.errors import CorruptionError

from .heads import Head, Kind, Progress

__all__ = ["LocalWrite", "Source", "apply", "check_reaches", "missing", "where_to_read"]


class Source(enum.Enum):
    """Where reading goes on."""

    LOG = enum.auto()
    """What was read counts."""
    BASE = enum.auto()
    """What was read is discarded, and the newest base taken."""


class LocalWrite(msgspec.Struct, frozen=True):
    """What must be one write of the local engine: the changes and the progress, or a crash would part them."""

    changes: bool
    """Whether the entry's changes are part of it."""
    first_position: int
    """The position of the first change, which is the entry's: who reads never asks a clock."""
    progress: Progress


def where_to_read(progress: Progress, cut: int) -> Source:
    """Say, after reading from ``progress`` on, whether that counts, given the highest cut found *afterwards*.

    Below a cut entries may be gone, and what lies there may have come into an emptied place: a fence of somebody who
    took that for the log's end. Since a cut is created before anything below it is deleted, looking afterwards is
    enough.
    """
    return Source.BASE if cut > progress.next else Source.LOG


def apply(progress: Progress, head: Head) -> list[LocalWrite]:
    """Return what the local engine has to write for the next entry, each item at once, in order.

    An entry of a lower epoch than one before it is void: it came late from somebody who took over without success.

    Raises `CorruptionError` if the entry does not follow the one that was read before it.
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
    read = Progress(head.index + 1, max(progress.epoch, head.epoch), head.checksum, position)
    return [LocalWrite(counts and head.kind is Kind.CHANGES, head.first_position, read)]


def check_reaches(progress: Progress, last: Head | None, cut: int) -> None:
    """Raise `CorruptionError` if the log ends before what was applied from it, as after a restored bucket.

    ``last`` is the entry before ``progress.next``, None if there is none. Where a cut lies above, its absence means
    nothing, and a base is taken.
    """
    if progress.next == 0 or cut >= progress.next:
        return
    if last is None:
        raise CorruptionError("it was applied here and is gone from the log", f"log entry {progress.next - 1}")
    if last.checksum != progress.before:
        raise CorruptionError("it is not the one that was applied here", f"log entry {progress.next - 1}")


def missing(index: int, cut: int) -> Source:
    """Say where to go on if an entry is not found that was asked for *after* one above it was seen.

    A listing that was being made meanwhile may lack it; an entry is written only when the one before it is there.
    Raises `CorruptionError` if no cut tells that it was deleted on purpose.
    """
    if cut > index:
        return Source.BASE
    raise CorruptionError("it is missing, and an entry behind it is there", f"log entry {index}")
