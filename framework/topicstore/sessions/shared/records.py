"""What shared subscriptions keep in the state of shards, and how it is written.

Keys begin with a byte of one, left out here, and values are sealed, arrays that begin with the version 1,
as all of sessions (`topicstore.sessions.records`). ``group`` is the whole ``$share/<name>/<filter>`` in UTF-8. In the
shard that its hash names (as that of a client id does)::

    "gr" group                            the group: `GroupRecord`
    "gm" group 00 client                  a member: `MemberRecord`
    "go" group 00 shard:4 position:8      messages that came back to the group, named by the first: `Returned`

In the shard of a member's client id::

    "sg" client 00 number:4               its places: `LeaseRecord`; written with what it is sent
    "gh" group 00 shard:4 position:8      messages that it handed back and the group has not taken yet: `Returned`

A message is in flight, handed back, or returned in one place at most, so its position names what it begins.
Which topics are of which slice is part of the format (`topicstore.sessions.shared.slices`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from topicstore.contract.positions import Positions
from topicstore.sessions.records import VERSION, pack_positions, unpack_positions

__all__ = [
    "GROUP",
    "GroupKeys",
    "GroupRecord",
    "LeaseRecord",
    "MemberRecord",
    "PackedPlaces",
    "Returned",
    "group_of",
    "messages_of",
    "returned",
]

GROUP = b"\1gr"
_MEMBER = b"\1gm"
_RETURNED = b"\1go"
_HANDED = b"\1gh"

PackedPlaces = tuple[tuple[tuple[int, int], ...], ...]
"""By shard, pairs of slices (bit i stands for slice i) and the position up to which they were delivered."""


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group. Fields are only ever appended, here and below."""

    version: int
    places: PackedPlaces
    """Of all slices; the place of one that is leased is the higher of this and its member's."""


class MemberRecord(msgspec.Struct, frozen=True, array_like=True):
    """A session that has the subscription, connected or not."""

    version: int
    number: int
    """Of the subscription in its session."""


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a member was leased."""

    version: int
    places: PackedPlaces
    """Of its slices."""
    returned: tuple[tuple[int, int, int], ...]
    """Of returned messages: their shard, their first position, and up to which it was sent them."""


class Returned(msgspec.Struct, frozen=True, array_like=True):
    """Messages of one shard, to be delivered once more."""

    version: int
    first: int
    """The first position."""
    steps: bytes
    """Of each position, how far it lies behind the first: little-endian numbers of `width` bytes."""
    width: int


class GroupKeys:
    """The keys of one group's state."""

    __slots__ = ("_group",)

    def __init__(self, text: str) -> None:
        self._group = text.encode()

    @property
    def group(self) -> bytes:
        """The group itself."""
        return GROUP + self._group

    @property
    def members(self) -> bytes:
        """What the keys of members begin with."""
        return b"%b%b\0" % (_MEMBER, self._group)

    @property
    def returned(self) -> bytes:
        """What the keys of returned messages begin with."""
        return b"%b%b\0" % (_RETURNED, self._group)

    @property
    def handed(self) -> bytes:
        """What the keys of messages that were handed back begin with."""
        return b"%b%b\0" % (_HANDED, self._group)

    def member(self, client_id: str) -> bytes:
        """Return the key of a member."""
        return self.members + client_id.encode()

    def returned_at(self, shard: int, first: int) -> bytes:
        """Return the key of returned messages."""
        return self.returned + _place(shard, first)

    def handed_at(self, shard: int, first: int) -> bytes:
        """Return the key of messages that were handed back."""
        return self.handed + _place(shard, first)


def _place(shard: int, position: int) -> bytes:
    return shard.to_bytes(4, "big") + position.to_bytes(8, "big")


def messages_of(key: bytes, record: Returned) -> tuple[int, Positions]:
    """Return shard and positions of returned messages."""
    return int.from_bytes(key[-12:-8], "big"), unpack_positions(record.first, record.steps, record.width)


def returned(positions: Positions) -> Returned:
    """Return what is stored of messages that came back."""
    return Returned(VERSION, *pack_positions(np.asarray(positions, np.uint64)))


def group_of(key: bytes) -> str:
    """Return the group that a key of `GROUP` is of."""
    return key[len(GROUP) :].decode()
