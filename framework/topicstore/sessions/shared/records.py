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
a record. The assignment of topics to partitions is part of the format (`topicstore.sessions.shared.reader`).

In a cluster (`topicstore.sessions.shared.stored_group`), "gm", "go" and "gh" are only read, and replaced by these.
In the shard of the subscription, which the site that assigns partitions writes::

    "gp" group 00 client                  the share of a member: `GrantRecord`
    "gq" group 00 number:8                messages returned to the group: `ReturnedRecord`
    "gt" group 00 shard:4 id:8            a record under "gb", in that shard, was taken over: [1]

In the shard of a member's client id, which the member's site writes::

    "gj" group 00 client                  a member: `StandingRecord`
    "gb" group 00 id:8                    places or messages of a member for others, by a random id: `HandBackRecord`
"""

from __future__ import annotations

import secrets

import msgspec
import numpy as np

from topicstore.contract.positions import Positions
from topicstore.sessions.records import LEASES, VERSION, decoder, owner_of, pack_positions, unpack_positions
from topicstore.shard.rewriter import Decoders

__all__ = [
    "DECODERS",
    "GRANT",
    "GROUP",
    "HANDED_BACK",
    "MEMBER",
    "RETURNED",
    "REVOKED",
    "STANDING",
    "TAKEN",
    "WAITING",
    "Attachment",
    "GrantRecord",
    "GroupKeys",
    "GroupRecord",
    "HandBackRecord",
    "LeaseRecord",
    "MemberRecord",
    "PackedPlaces",
    "Returned",
    "ReturnedRecord",
    "StandingRecord",
    "group_of",
    "messages_of",
    "positions_of",
    "returned",
]

GROUP = b"\1gr"
MEMBER = b"\1gm"
RETURNED = b"\1go"
REVOKED = b"\1gh"
GRANT = b"\1gp"
WAITING = b"\1gq"
TAKEN = b"\1gt"
STANDING = b"\1gj"
HANDED_BACK = b"\1gb"

PackedPlaces = tuple[tuple[tuple[int, int], ...], ...]
"""By shard, pairs of a bit set of partitions (bit i for partition i) and the position of delivery."""


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """The stored state of a group. Fields are only ever appended, here and in the records below."""

    version: int
    places: PackedPlaces
    """The places of all partitions. The place of an assigned partition is the higher of this one and that in the
    `LeaseRecord`."""
    number: int = 0
    """The highest number of a `GrantRecord` or a `ReturnedRecord` so far."""


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


Attachment = tuple[str, int, int, int]
"""A connected member: its client as in keys, the guard of its session, the number of its subscription, and how often
its ``allow`` was replaced."""


class GrantRecord(msgspec.Struct, frozen=True, array_like=True):
    """The partitions and returned messages that a member has, while it is connected."""

    version: int
    number: int
    """The number of the grant, which rises in the group."""
    guard: int
    """The guard of the session (`SessionRecord.guard`) to whose connection the grant applies."""
    subscription: int
    """The number of the subscription in its session."""
    places: PackedPlaces
    """The partitions, and the positions after which they are to be read."""
    withdrawn: PackedPlaces
    """The partitions that the member had, and must stop reading. No other member gets them before this member has
    acknowledged the grant."""
    returned: tuple[int, ...] = ()
    """The numbers of returned messages that the member is to deliver."""
    withdrawn_returned: tuple[int, ...] = ()
    """The numbers of returned messages that the member must stop delivering."""


class StandingRecord(msgspec.Struct, frozen=True, array_like=True):
    """A member's acknowledgement of its latest grant, and its progress.

    A session is a member while it has the subscription, connected or not.
    """

    version: int
    number: int
    """The number of the subscription in its session."""
    start: tuple[int, ...]
    """By shard, the position after which the group begins if this is the first member."""
    grant: int = 0
    """The number of the last grant that the member has followed; 0: none."""
    slow: bool = False
    """Whether its window has been full for long, so that other members get its share."""
    returned: tuple[tuple[int, int], ...] = ()
    """For returned messages, by number, the position up to which they were delivered."""
    replaced: int = 0
    """The number of times that ``allow`` was replaced in this connection."""
    dropped: tuple[int, ...] = ()
    """The last generations that were dropped before the group had read them, as far as the member's site knows."""


class HandBackRecord(msgspec.Struct, frozen=True, array_like=True):
    """A member's last places, if it has left the group, or messages of its share that other members are to deliver."""

    version: int
    places: PackedPlaces = ()
    returned: tuple[tuple[int, int], ...] = ()
    """As in its last `StandingRecord`."""
    shard: int = 0
    """The shard of the messages."""
    first: int = 0
    """The first position."""
    steps: bytes = b""
    """The distance of each position from the first, as little-endian numbers of `width` bytes; empty: no messages."""
    width: int = 1
    refused: tuple[Attachment, ...] = ()
    """The member whose ``allow`` has refused the messages."""


class ReturnedRecord(msgspec.Struct, frozen=True, array_like=True):
    """Messages of one shard that were returned to the group, and that one member at a time delivers."""

    version: int
    shard: int
    first: int
    steps: bytes
    width: int
    refused: tuple[Attachment, ...] = ()
    """The connected members whose ``allow`` has refused the messages."""


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
        """The prefix of the keys of messages that members returned unacknowledged."""
        return b"%b%b\0" % (RETURNED, self._group)

    @property
    def revoked(self) -> bytes:
        """The prefix of the keys of messages that were revoked."""
        return b"%b%b\0" % (REVOKED, self._group)

    def member(self, client_id: str) -> bytes:
        """Return the key of the record of a member."""
        return self.members + owner_of(client_id)

    def returned_at(self, shard: int, first: int) -> bytes:
        """Return the key of messages that members returned unacknowledged, the first of them at a position."""
        return self.returned + _place(shard, first)

    def revoked_at(self, shard: int, first: int) -> bytes:
        """Return the key of messages that were revoked."""
        return self.revoked + _place(shard, first)

    @property
    def grants(self) -> bytes:
        """The prefix of the keys of grants."""
        return b"%b%b\0" % (GRANT, self._group)

    @property
    def waiting(self) -> bytes:
        """The prefix of the keys of `ReturnedRecord`, messages that were returned to the group, by number."""
        return b"%b%b\0" % (WAITING, self._group)

    @property
    def taken(self) -> bytes:
        """The prefix of the keys by which hand-backs are acknowledged."""
        return b"%b%b\0" % (TAKEN, self._group)

    @property
    def standings(self) -> bytes:
        """The prefix of the keys of members in the shards of their clients."""
        return b"%b%b\0" % (STANDING, self._group)

    @property
    def handed_back(self) -> bytes:
        """The prefix of the keys of hand-backs."""
        return b"%b%b\0" % (HANDED_BACK, self._group)

    def grant(self, owner: str) -> bytes:
        """Return the key of a member's grant. ``owner`` is the client id in its form in keys."""
        return self.grants + owner.encode()

    def waiting_at(self, number: int) -> bytes:
        """Return the key of the `ReturnedRecord` with this number."""
        return self.waiting + number.to_bytes(8, "big")

    def taken_at(self, shard: int, token: bytes) -> bytes:
        """Return the key by which a hand-back in a shard is acknowledged."""
        return self.taken + shard.to_bytes(4, "big") + token

    def standing(self, owner: str) -> bytes:
        """Return the key of a member's standing. ``owner`` is the client id in its form in keys."""
        return self.standings + owner.encode()

    def hand_back(self) -> bytes:
        """Return a new key for a hand-back."""
        return self.handed_back + secrets.token_bytes(8)


def _place(shard: int, position: int) -> bytes:
    return shard.to_bytes(4, "big") + position.to_bytes(8, "big")


def messages_of(key: bytes, record: Returned) -> tuple[int, Positions]:
    """Return the shard and positions of returned messages."""
    return int.from_bytes(key[-12:-8], "big"), unpack_positions(record.first, record.steps, record.width)


def returned(positions: Positions) -> Returned:
    """Return the record of revoked or returned messages at these positions."""
    return Returned(VERSION, *pack_positions(np.asarray(positions, np.uint64)))


def positions_of(record: HandBackRecord | ReturnedRecord) -> Positions:
    """Return the positions of messages that were returned to a group."""
    return unpack_positions(record.first, record.steps, record.width)


def group_of(key: bytes) -> str:
    """Return the group in a key: the text after a prefix as long as `GROUP`, up to the first NUL."""
    return key[len(GROUP) :].partition(b"\0")[0].decode()


DECODERS: Decoders = {
    GROUP: decoder(GroupRecord),
    MEMBER: decoder(MemberRecord),
    RETURNED: decoder(Returned),
    REVOKED: decoder(Returned),
    LEASES: decoder(LeaseRecord),
    GRANT: decoder(GrantRecord),
    WAITING: decoder(ReturnedRecord),
    TAKEN: decoder(tuple[int]),
    STANDING: decoder(StandingRecord),
    HANDED_BACK: decoder(HandBackRecord),
}
"""Decoders of the state of shared subscriptions."""
