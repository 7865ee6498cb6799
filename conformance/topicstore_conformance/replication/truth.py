"""The invariants of every state, computed from a record of each log entry as it was first written.

The sites have no access to that record.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import attrs
from topicstore.replication.heads import BEGINNING, Head, Kind, Progress

__all__ = ["EMPTY", "Change", "Entry", "Replica", "Truth"]


class Change(NamedTuple):
    """A message with a condition: ``expects`` is the id of the change that must directly precede it."""

    id: bytes
    position: int
    expects: bytes | None


@attrs.frozen(eq=False)
class Entry:
    """An entry of the log. Equal entries are the same object, so that states are compared quickly."""

    head: Head
    changes: tuple[Change, ...]

    @staticmethod
    @functools.cache
    def of(head: Head, changes: tuple[Change, ...]) -> Entry:
        """Return the interned entry with these values."""
        return Entry(head, changes)


@attrs.frozen(eq=False)
class Replica:
    """The contents of a shard at a site or in a base. Equal replicas are the same object."""

    progress: Progress
    """The end of the log's part that the replica has applied."""
    stored: tuple[tuple[bytes, int], ...]
    """The ids of the stored changes, with their positions."""

    @staticmethod
    @functools.cache
    def of(progress: Progress, stored: tuple[tuple[bytes, int], ...]) -> Replica:
        """Return the interned replica with these values."""
        return Replica(progress, stored)


EMPTY = Replica.of(BEGINNING, ())


@attrs.frozen
class Truth:
    """The replicas that result from each prefix of the log as it was first written."""

    prefixes: tuple[Replica, ...]
    """The replica after each number of entries, from 0."""
    fault: str
    """A description of the fault in the log itself, or an empty text."""

    @classmethod
    def of(cls, entries: tuple[Entry | None, ...]) -> Truth:
        """Apply the entries up to the first gap, and check positions, conditions and ids."""
        replica, prefixes, fault = EMPTY, [EMPTY], ""
        for entry in entries:
            if entry is None:
                break
            replica, wrong = _after(replica, entry)
            fault = fault or wrong
            prefixes.append(replica)
        ids = [one for one, _ in replica.stored]
        if len(set(ids)) != len(ids):
            fault = fault or f"a change is in the log twice: {_names(ids)}"
        return cls(tuple(prefixes), fault)

    def holds(self, replica: Replica) -> bool:
        """Return whether a replica equals a prefix of the log."""
        return replica.progress.next < len(self.prefixes) and self.prefixes[replica.progress.next] is replica


def _after(replica: Replica, entry: Entry) -> tuple[Replica, str]:
    progress, stored = replica.progress, replica.stored
    head, position, fault = entry.head, progress.last_position, ""
    if head.epoch >= progress.epoch and head.kind is Kind.CHANGES:
        for change in entry.changes:
            last = stored[-1][0] if stored else None
            if change.position <= position:
                fault = f"{change.id.decode()} has position {change.position}, after {position}"
            elif change.expects != last:
                fault = (
                    f"{change.id.decode()} is stored on a condition that does not hold: {change.expects!r}, {last!r}"
                )
            position, stored = change.position, (*stored, (change.id, change.position))
    fence = head.index if head.kind is Kind.FENCE else progress.fence
    read = Progress(head.index + 1, max(head.epoch, progress.epoch), head.checksum, position, fence)
    return Replica.of(read, stored), fault


def _names(ids: list[bytes]) -> str:
    return " ".join(one.decode() for one in ids)
