"""The inputs of the replication decisions: the header of a log entry, and a reader's progress."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["BEGINNING", "Head", "Kind", "Progress"]


class Kind(enum.IntEnum):
    """The kind of a log entry."""

    CHANGES = 0
    """The entry holds changes of the shard."""
    FENCE = 1
    """The first entry of an epoch. The previous owner finds it when it tries to write its next entry."""
    RELEASED = 2
    """The last entry of an epoch, by which its owner releases the shard, so that no site has to wait for a timeout."""


class Head(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The header of a log entry: the entry without its changes."""

    index: int
    """The entry's index in the log, from 0, without gaps."""
    kind: Kind
    epoch: int
    """The number of the cluster document that named the entry's site as owner."""
    id: bytes
    """Random bytes by which a site recognizes its own entry. A repeated PUT has the same id."""
    site: str
    before: bytes
    """The checksum of the previous entry; empty for the first."""
    checksum: bytes
    """The checksum of the entry itself, over all of its bytes except the checksum."""
    first_position: int = 0
    """The lowest position that the entry assigns; 0 if it assigns none."""
    last_position: int = 0
    """The highest position that the entry assigns; 0 if it assigns none."""
    fence: int | None = None
    """The index of the last fence before the entry, -1 if there is none; None if an earlier version wrote the entry."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The applied prefix of a log, stored in the same engine write as the changes, and in each base (snapshot)."""

    next: int
    """The index of the entry to be read next."""
    epoch: int
    """The highest epoch of the entries read."""
    before: bytes
    """The checksum of the last entry read."""
    last_position: int
    """The highest position that the entries read have assigned."""
    fence: int | None = None
    """The index of the last fence among the entries read, -1 if there is none; None if that is unknown."""


BEGINNING = Progress(0, 0, b"", 0, -1)
"""The progress of a replica that has read nothing."""
