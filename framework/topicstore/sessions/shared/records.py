"""The records that shared subscriptions keep in the state of shards, and their stored form.

Keys begin with the byte 1, which is left out here, and values are checksummed arrays that begin with the version 1, as
in all records of sessions (`topicstore.sessions.records`). ``group`` is the whole ``$share/<name>/<filter>`` in UTF-8.
In the shard that its hash selects (as that of a client id does)::

    "gr" group                            the group: `GroupRecord`
    "gm" group 00 client                  a member, named as in the keys of its session: `MemberRecord`
    "go" group 00 shard:4 position:8      messages returned to the group, under the first position: `Returned`

In the shard of a member's client id::

    "sg" client 00 number:4               its places: `LeaseRecord`; written with its deliveries
    "gh" group 00 shard:4 position:8      messages revoked from it that its group has not taken: `Returned`

A message is in at most one record of messages in flight, revoked or returned. So the first position identifies such
a record. The assignment of topics to partitions is part of the format (`topicstore.sessions.shared.group`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from topicstore.contract.positions import Positions
from topicstore.sessions.records import LEASES, VERSION, decoder, owner_of, pack_positions, unpack_positions
from topicstore.shard.rewriter import Decoders

__all__ = [
    "DECODERS",
    "GROUP",
    "MEMBER",
    "REVOKED",
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
MEMBER = b"\1gm"
_RETURNED = b"\1go"
REVOKED = b"\1gh"

PackedPlaces = tuple[tuple[tuple[int, int], ...], ...]
"""By shard, pairs of a bit set of partitions (bit i for partition i) and the position of delivery."""


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group. Fields are only ever appended, here and below."""

    version: int
    places: PackedPlaces
    """The places of all partitions. The place of an assigned partition is the higher of this one and that in the
    `LeaseRecord`."""


class MemberRecord(msgspec.Struct, frozen=True, array_like=True):
    """A session that has the subscription, connected or not."""

    version: int
    number: int
    """The number of the subscription in its session."""


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """The partitions and returned messages that are assigned to a member."""

    version: int
    places: PackedPlaces
    """The places of its partitions."""
    returned: tuple[tuple[int, int, int], ...]
    """For returned messages, their shard, their first position, and the position up to which they were sent."""


class Returned(msgspec.Struct, frozen=True, array_like=True):
    """Messages of one shard to be delivered to another member."""

    version: int
    first: int
    """The first position."""
    steps: bytes
    """The distance of each position from the first, as little-endian numbers of `width` bytes."""
    width: int


class GroupKeys:
    """The keys of one group's state."""

    __slots__ = ("_group",)

    def __init__(self, text: str) -> None:
        self._group = text.encode()

    @property
    def group(self) -> bytes:
        """The key of the group itself."""
        return GROUP + self._group

    @property
    def members(self) -> bytes:
        """The prefix of the keys of members."""
        return b"%b%b\0" % (MEMBER, self._group)

    @property
    def returned(self) -> bytes:
        """The prefix of the keys of returned messages."""
        return b"%b%b\0" % (_RETURNED, self._group)

    @property
    def revoked(self) -> bytes:
        """The prefix of the keys of messages that were revoked."""
        return b"%b%b\0" % (REVOKED, self._group)

    def member(self, client_id: str) -> bytes:
        """Return the key of the record of a member."""
        return self.members + owner_of(client_id)

    def returned_at(self, shard: int, first: int) -> bytes:
        """Return the key of returned messages."""
        return self.returned + _place(shard, first)

    def revoked_at(self, shard: int, first: int) -> bytes:
        """Return the key of messages that were revoked."""
        return self.revoked + _place(shard, first)


def _place(shard: int, position: int) -> bytes:
    return shard.to_bytes(4, "big") + position.to_bytes(8, "big")


def messages_of(key: bytes, record: Returned) -> tuple[int, Positions]:
    """Return the shard and positions of returned messages."""
    return int.from_bytes(key[-12:-8], "big"), unpack_positions(record.first, record.steps, record.width)


def returned(positions: Positions) -> Returned:
    """Return the record of messages that are revoked or returned."""
    return Returned(VERSION, *pack_positions(np.asarray(positions, np.uint64)))


def group_of(key: bytes) -> str:
    """Return the group in a key that begins with `GROUP`."""
    return key[len(GROUP) :].decode()


DECODERS: Decoders = {
    GROUP: decoder(GroupRecord),
    MEMBER: decoder(MemberRecord),
    _RETURNED: decoder(Returned),
    REVOKED: decoder(Returned),
    LEASES: decoder(LeaseRecord),
}
"""Decoders of the state of shared subscriptions."""
