"""What decisions look at: the head of a log's entry, and how far somebody has read."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["BEGINNING", "Head", "Kind", "Progress"]


class Kind(enum.IntEnum):
    """What an entry is for."""

    CHANGES = 0
    """It holds changes of the shard."""
    FENCE = 1
    """The first of an epoch: whoever owned the shard before meets it with the next entry."""
    RELEASED = 2
    """The last of an epoch whose owner goes on purpose, so that nobody has to wait for its silence."""


class Head(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An entry without its changes."""

    index: int
    """Its place in the log, from 0, without gaps."""
    kind: Kind
    epoch: int
    """The number of the cluster document that made its site the owner."""
    id: bytes
    """Random: by it a site knows its own entry. An entry that is sent again has the same."""
    site: str
    before: bytes
    """The checksum of the entry before; empty for the first."""
    checksum: bytes
    """Its own, of all its bytes but these."""
    first_position: int = 0
    """The lowest position that it gives; 0 if it gives none."""
    last_position: int = 0
    """The highest position that it gives; 0 if it gives none."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a log was read, stored in the same engine write as the changes; also what a base begins with."""

    next: int
    """The index of the entry to be read next."""
    epoch: int
    """The highest epoch of those read."""
    before: bytes
    """The checksum of the last one read."""
    last_position: int
    """The highest position given by those read."""


BEGINNING = Progress(0, 0, b"", 0)
"""The progress of who has read nothing."""
