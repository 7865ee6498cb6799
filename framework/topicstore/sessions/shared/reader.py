"""`GroupReader`: reads the messages of one shared subscription for the members that are connected to this process.

For members that have caught up, the reader itself reads new messages, so that a message wakes only the member that
receives it. `Group` and `Branch` decide which partitions members have. Used under the sessions' mutex.

The partition of a topic is the xxh64 hash of its UTF-8 bytes, modulo 64; this function is part of the stored format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.columns import to_list
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.read_cache import ReadBatch, ReadSlice
from topicstore.sessions.delivery_batch import MessageColumns
from topicstore.sessions.dispatcher import FilterListener, FilterListeners
from topicstore.sessions.model import SharedFilter

from .records import GroupKeys, PackedPlaces

__all__ = [
    "ABOVE_ALL",
    "PARTITIONS",
    "ROWS",
    "Assignment",
    "GroupReader",
    "Member",
    "Membership",
    "Partitions",
    "Places",
    "pack_places",
    "packed_partitions",
    "partition_of",
    "partitions_of_locked",
    "raise_places",
]

ABOVE_ALL = np.uint64((1 << 64) - 1)
"""A number above every position."""
PARTITIONS = 64
"""Number of partitions in each shard."""

Places = npt.NDArray[np.uint64]
"""By shard and partition, the position up to which all messages were read."""
Partitions = npt.NDArray[np.bool_]
"""A selection of the partitions of a shard or, with one more dimension, of all shards."""


def partition_of(topic: str) -> int:
    """Return the number of a topic's partition: a hash of the topic modulo `PARTITIONS`."""
    return xxhash.xxh64_intdigest(topic.encode()) % PARTITIONS


def partitions_of_locked(whole: ReadBatch) -> npt.NDArray[np.uint8]:
    """Return the partition of each row, computed once for all readers of the read batch."""
    columns = MessageColumns.of(whole)
    if columns.partitions is None:
        topics = to_list(whole.batch.topics)
        partitions = {topic: partition_of(topic) for topic in set(topics)}
        columns.partitions = np.fromiter(map(partitions.__getitem__, topics), np.uint8, len(topics))
    return columns.partitions


# --- places ---


def pack_places(places: Places, which: Partitions) -> PackedPlaces:
    """Return the places of some partitions in stored form."""
    return tuple(_pack(row, some) for row, some in zip(places, which, strict=True))


def _pack(places: npt.NDArray[np.uint64], some: Partitions) -> tuple[tuple[int, int], ...]:
    return tuple((_bits((places == place) & some), int(place)) for place in np.unique(places[some]))


def raise_places(places: Places, packed: PackedPlaces) -> None:
    """Set each place to the stored one if that is higher."""
    for row, pairs in zip(places, packed, strict=True):
        for bits, place in pairs:
            some = _partitions(bits)
            row[some] = np.maximum(row[some], np.uint64(place))


def packed_partitions(packed: PackedPlaces) -> Partitions:
    """Return, by shard, the partitions that packed places contain."""
    which = np.zeros((len(packed), PARTITIONS), np.bool_)
    for row, pairs in zip(which, packed, strict=True):
        for bits, _ in pairs:
            row |= _partitions(bits)
    return which


def _bits(some: Partitions) -> int:
    return int.from_bytes(np.packbits(some, bitorder="little").tobytes(), "little")


def _partitions(bits: int) -> Partitions:
    return np.unpackbits(np.frombuffer(bits.to_bytes(PARTITIONS // 8, "little"), np.uint8), bitorder="little").astype(
        bool
    )


ROWS = 4_096
"""Number of rows in which the messages of a member are searched at once."""


class Member(Protocol):
    """The interface by which a group uses a connected member."""

    @property
    def client_id(self) -> str:
        """The client id of the member's session."""

    number: int
    """The number of the subscription in its session."""
    mine: Partitions
    """By shard, the partitions assigned to it. Changed by the group."""
    assignments: list[Assignment]
    """The returned messages that it delivers. Changed by the group."""
    slow: bool
    """Whether its window has been full for long; then other members get its partitions. Changed by the group."""
    delivering: bool
    """Whether it has an uncommitted delivery, so that no partition can be revoked."""

    def wake(self, shard: int) -> None:
        """Handle the event that a shard may have messages to read."""

    def assign(self, assignment: Assignment) -> None:
        """Deliver messages that were returned to the group."""

    def forget(self, shard: int) -> None:
        """Handle the event that the member has no partition of a shard any more."""


@attrs.define(eq=False)
class Assignment:
    """Messages that a member has returned to the group, and that another one delivers, one member at a time."""

    shard: int
    positions: Positions
    place: int = 0
    """The position up to which they were read."""
    committed: int = 0
    """The position up to which they were delivered."""
    owner: Member | None = None
    refused_by: frozenset[Member] = frozenset()
    """The connected members whose clients may not be sent these messages."""
    number: int = 0
    """The number of its `ReturnedRecord`, in a database that sites share."""

    @property
    def first(self) -> int:
        """The first position, which identifies the assignment."""
        return int(self.positions[0])

    @property
    def last(self) -> int:
        """The last position."""
        return int(self.positions[-1])

    def behind(self, place: int) -> Positions:
        """Return the positions after a place."""
        return self.positions[self.positions > np.uint64(place)]


@attrs.define
class Membership:
    """A session that has the subscription."""

    number: int
    """The number of the subscription in its session."""
    since: int | None
    """The time of its disconnect, or of loading the group if it was disconnected then; None: it is connected."""
    revoked: bool = False
    """Whether its messages in flight were taken back after the disconnect."""
    reported: int = 0
    """The number of entries of `Group.dropped` at its last disconnect."""


class GroupReader(ABC):
    """The members of a shared subscription that are connected to this process, and the places of their partitions."""

    def __init__(self, shared: SharedFilter, listeners: FilterListeners, filters: DurableFilters, shards: int) -> None:
        self.filter = shared
        self.keys = GroupKeys(shared.text)
        self.feed = listeners.hub.feed(shared.topic_filter)
        self.members: dict[str, Membership] = {}
        """The members by client id, connected or not."""
        self.connected: dict[Member, None] = {}
        self.places: Places = np.zeros((shards, PARTITIONS), np.uint64)
        """By shard and partition, the position up to which all messages were read."""
        self.committed: Places = self.places.copy()
        """By shard and partition, the position up to which all was delivered, after which a new owner begins."""
        self.assignments: list[Assignment] = []
        self.dropped: tuple[int, ...] = ()
        self.ahead = False
        """Whether places moved past messages of other partitions without being saved."""
        self._listeners = listeners
        self._filters = filters
        self._listener: FilterListener | None = None
        self._owners: list[list[Member | None]] = [[None] * PARTITIONS for _ in range(shards)]
        self._resting: list[dict[Member, None]] = [{} for _ in range(shards)]
        """By shard, the resting members, which have read all their messages."""
        self._heads: Partitions = np.zeros(self.places.shape, np.bool_)
        """The partitions of the resting members."""
        self._seen = [0] * shards
        """By shard, the position up to which the group has read for the resting members."""

    # --- members ---

    def attach(self, member: Member) -> None:
        """Add a connected member."""
        if self._listener is None:
            self._listener = self._listeners.follow(self.filter.topic_filter)
            self._filters.add_shared(self.filter.topic_filter, self.filter.text)
        self.connected[member] = None

    @abstractmethod
    def detach(self, member: Member) -> None:
        """Revoke the partitions and assignments of a disconnected member; other members continue at its places."""

    def _release(self, member: Member) -> None:
        """Take everything from a member that is not among the connected ones any more."""
        self.rewind(member)
        member.delivering = False
        for shard, number in np.argwhere(member.mine).tolist():
            self._take(shard, number)
        for assignment in member.assignments:
            assignment.owner = None
        member.assignments.clear()
        if not self.connected and self._listener is not None:
            self._listeners.leave_locked(self._listener, self)
            self._listener = None
            self._filters.remove_shared(self.filter.topic_filter, self.filter.text)

    @abstractmethod
    def note_refused(self, member: Member, refused: Sequence[tuple[int, Positions]]) -> None:
        """Record messages that a member has returned because its ``allow`` refused them."""

    @abstractmethod
    def part(self, assignment: Assignment, refused: Positions, member: Member) -> None:
        """Split off messages of an assignment that the member's ``allow`` refused, for other members."""

    @abstractmethod
    def reconsider(self, member: Member) -> None:
        """Again offer a member the messages that its former ``allow`` refused, because ``allow`` was replaced."""

    def _take(self, shard: int, number: int) -> None:
        """Revoke a partition from its owner."""
        owner = self._owners[shard][number]
        if owner is None:
            return
        self._owners[shard][number] = None
        owner.mine[shard, number] = False
        self._heads[shard, number] = False
        self.committed[shard, number] = self.places[shard, number]  # nothing between them was handed out
        if not owner.mine[shard].any():
            self._resting[shard].pop(owner, None)
            owner.forget(shard)

    def _give(self, shard: int, number: int, member: Member) -> None:
        self._rouse(shard, member)  # a resting member has caught up with the partitions that it had before
        self._owners[shard][number] = member
        member.mine[shard, number] = True
        member.wake(shard)

    # --- places ---

    def advance(self, shard: int, which: Partitions, place: int) -> None:
        """Move the places of some partitions of a shard forward to a position."""
        row = self.places[shard]
        row[which] = np.maximum(row[which], np.uint64(place))

    def apply(self, member: Member) -> None:
        """Make a member's places final: its messages are handed out, and its places are stored."""
        self.committed[member.mine] = self.places[member.mine]
        for assignment in member.assignments:
            assignment.committed = assignment.place

    def rewind(self, member: Member) -> None:
        """Move the places of a member back, because the messages that it read were not handed out."""
        self.places[member.mine] = self.committed[member.mine]
        for assignment in member.assignments:
            assignment.place = assignment.committed
        for shard, resting in enumerate(self._resting):
            if member in resting:
                self._rouse(shard, member)

    def note_dropped(self, generations: tuple[int, ...]) -> None:
        """Record dropped generations that may not have been read completely."""
        self.dropped += tuple(number for number in generations if number not in self.dropped)

    # --- reading for resting members ---

    def rest(self, member: Member, shard: int) -> None:
        """Let a member that has caught up with a shard wait; `wake` finds new messages for it."""
        resting = self._resting[shard]
        if not resting:
            self._seen[shard] = max(self._seen[shard], int(self.places[shard][member.mine[shard]].min()))
        resting[member] = None
        self._heads[shard] |= member.mine[shard]
        if self._listener is not None:
            self._listener.wait_locked(self, shard)

    def wake(self, shard: int) -> None:
        """Wake the waiting members that have new messages of a shard; move other partitions' places past them."""
        resting = self._resting[shard]
        while resting:
            try:
                read_slice = self.feed.read(shard, self._seen[shard], ROWS)
            except TopicstoreError:  # each member's own read will raise the error
                for member in list(resting):
                    self._rouse(shard, member)
                    member.wake(shard)
                return
            self.note_dropped(read_slice.dropped)
            for member in self._concerned(shard, read_slice):
                self._rouse(shard, member)
                member.wake(shard)
            self._seen[shard] = read_slice.position
            self._pass_by(shard, read_slice.position)
            if read_slice.caught_up:
                break
        if resting and self._listener is not None:
            self._listener.wait_locked(self, shard)

    def take_nonpersistent(self, messages: list[Message], marks: list[int], now: int) -> None:  # noqa: B027
        """Do nothing: all of the group's messages are stored, and `wake` finds them."""

    def miss_nonpersistent(self, messages: list[Message]) -> None:  # noqa: B027
        """Do nothing, because all of the group's messages are stored."""

    def _concerned(self, shard: int, read_slice: ReadSlice) -> list[Member]:
        """Return the resting members for which a partition has messages."""
        if not len(read_slice):
            return []
        partitions = partitions_of_locked(read_slice.whole)[read_slice.rows]
        new = read_slice.whole.positions[read_slice.rows] > self.places[shard][partitions]
        hit = np.flatnonzero(np.bincount(partitions[new], minlength=PARTITIONS))
        owners = {self._owners[shard][number]: None for number in hit.tolist()}
        return [member for member in owners if member is not None and member in self._resting[shard]]

    def _pass_by(self, shard: int, place: int) -> None:
        """Move the places of resting members to a position before which they have no messages."""
        places, committed = self.places[shard], self.committed[shard]
        heads = self._heads[shard] & (places == committed)
        places[heads] = committed[heads] = np.maximum(places[heads], np.uint64(place))
        self.ahead = True

    def _rouse(self, shard: int, member: Member) -> None:
        if member in self._resting[shard]:
            del self._resting[shard][member]
            self._heads[shard] &= ~member.mine[shard]

    # --- inspecting ---

    def delivered_places(self) -> Places:
        """Return, by shard and partition, the position up to which all was delivered."""
        return np.minimum(self.committed, self.places)

    def unread_places(self) -> Places:
        """Return, by shard and partition, the position up to which all was read; `ABOVE_ALL` if nothing is unread."""
        return np.where(self._heads, ABOVE_ALL, self.places)
