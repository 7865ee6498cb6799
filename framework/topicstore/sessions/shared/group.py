"""`Group`: the members of one shared subscription, and the assignment of its messages to them.

A process has one object for each group. The group assigns partitions to the connected members, and revokes them when a
member disconnects or is slow. For members that have read all messages, it reads new messages itself, so that a message
wakes only the member that it is for. Used under the sessions' mutex.

The partition of a topic is the xxh64 hash of its UTF-8 bytes, modulo 64; this function is part of the stored format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.columns import to_list
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.read_cache import ReadBatch, ReadSlice
from topicstore.sessions.delivery_batch import MessageColumns
from topicstore.sessions.dispatcher import FilterListener, FilterListeners
from topicstore.sessions.records import VERSION, decode, put
from topicstore.sessions.shared_filters import SharedFilter
from topicstore.shard.state import FrameworkWrite, ShardState

from .records import GroupKeys, GroupRecord, MemberRecord, PackedPlaces, Returned, messages_of, returned

__all__ = [
    "ABOVE_ALL",
    "PARTITIONS",
    "ROWS",
    "Assignment",
    "Group",
    "Member",
    "Membership",
    "Partitions",
    "Places",
    "moves",
    "pack_places",
    "partition_of",
    "partitions_of_locked",
    "raise_places",
]

M = TypeVar("M")


def moves(owners: Sequence[M | None], members: Iterable[M], total: dict[M, int]) -> list[tuple[int, M]]:
    """Return the partitions of a shard to reassign, with their new owners, to balance the members within one partition.

    As few partitions as possible are moved. Remainder partitions go first to the members with the fewest partitions in
    all shards so far (``total``, which is updated).
    """
    held: dict[M, list[int]] = {member: [] for member in members}
    free: list[int] = []
    for number, owner in enumerate(owners):
        (free if owner is None or owner not in held else held[owner]).append(number)
    order = sorted(held, key=lambda member: (-len(held[member]), total[member]))
    each, left_over = divmod(len(owners), len(order))
    targets = {member: each + (place < left_over) for place, member in enumerate(order)}
    for member, target in targets.items():
        free += held[member][target:]
        total[member] += target
    found = []
    for member, target in targets.items():
        found += [(free.pop(), member) for _ in range(target - len(held[member]))]
    return found


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


def _bits(some: Partitions) -> int:
    return int.from_bytes(np.packbits(some, bitorder="little").tobytes(), "little")


def _partitions(bits: int) -> Partitions:
    return np.unpackbits(np.frombuffer(bits.to_bytes(PARTITIONS // 8, "little"), np.uint8), bitorder="little").astype(
        bool
    )


ROWS = 4_096
"""Number of rows in which the messages of a member are searched at once."""

_MICROSECONDS = 1_000_000
_TOGETHER = 4_096
"""Size, in messages, up to which messages that the same members refused are merged into one record."""


class Member(Protocol):
    """The interface by which a group uses a connected member."""

    @property
    def client_id(self) -> str:
        """The client id of its session."""

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
        """Handle the event that no partition of a shard is left."""


@attrs.define(eq=False)
class Assignment:
    """Messages that were returned to a group by one member, and are delivered by another, one member at a time."""

    shard: int
    positions: Positions
    place: int = 0
    """The position up to which they were read."""
    committed: int = 0
    """The position up to which they were delivered."""
    owner: Member | None = None
    refused_by: frozenset[Member] = frozenset()
    """The connected members whose clients may not be sent these messages."""

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


class _Move(NamedTuple):
    """A partition to reassign."""

    shard: int
    number: int
    owner: Member
    """The new owner."""


class Group:
    """One group, with the states of all shards. ``changed`` is called with the group when `update` is necessary."""

    def __init__(
        self,
        shared: SharedFilter,
        listeners: FilterListeners,
        filters: DurableFilters,
        states: Sequence[ShardState],
        owned: Callable[[int], bool],
        changed: Callable[[Group], None],
    ) -> None:
        self.filter = shared
        self.epoch: int | None = 0
        """The period of this site as the owner of the subscription's shard in which the group was made."""
        self.keys = GroupKeys(shared.text)
        self.feed = listeners.hub.feed(shared.topic_filter)
        self.members: dict[str, Membership] = {}
        """The members by client id, connected or not."""
        self.connected: dict[Member, None] = {}
        self.places: Places = np.zeros((len(states), PARTITIONS), np.uint64)
        """By shard and partition, the position up to which all messages were read."""
        self.committed: Places = self.places.copy()
        """By shard and partition, the position up to which all was delivered, after which a new owner begins."""
        self.assignments: list[Assignment] = []
        self.dropped: tuple[int, ...] = ()
        self.revoked = False
        """Whether there are revoked messages for `take_back`."""
        self._refusals: dict[tuple[int, int], Member] = {}
        """By shard and first position of revoked messages, the member whose ``allow`` refused them."""
        self._parted = False
        """Whether refused messages were removed from an assignment and wait for another member."""
        self.unsaved = False
        """Whether `save` must be called before partitions or assignments get new owners."""
        self.ahead = False
        """Whether places moved past messages of other partitions without being saved."""
        self._listeners = listeners
        self._filters = filters
        self._states = states
        self._owned = owned
        """Returns whether this process owns a shard."""
        self._home = states[listeners.shard_of(shared.text)]
        self._changed = changed
        self._listener: FilterListener | None = None
        self._owners: list[list[Member | None]] = [[None] * PARTITIONS for _ in states]
        self._gone: set[str] = set()
        """The client ids of former members whose membership records are still stored."""
        self._resting: list[dict[Member, None]] = [{} for _ in states]
        """By shard, the resting members, which have read all their messages."""
        self._heads: Partitions = np.zeros(self.places.shape, np.bool_)
        """The partitions of the resting members."""
        self._seen = [0] * len(states)
        """By shard, the position up to which the group has read for the resting members."""

    # --- members ---

    def enlist(self, client_id: str, number: int) -> None:
        """Make a session a member. The membership is durable on return."""
        known = self.members.get(client_id)
        if known is None or known.number != number:
            member = put(self.keys.member(client_id), MemberRecord(VERSION, number))
            self._home.write([member] if self.members else [member, self._record()])
            self.members[client_id] = Membership(number, None)
            self._gone.discard(client_id)

    def dismiss(self, client_id: str) -> None:
        """Remove a member; the next `save` stores this."""
        self.members.pop(client_id, None)
        self._gone.add(client_id)
        self.unsaved = True

    def attach(self, member: Member) -> None:
        """Add a connected member, and assign partitions to it."""
        before = self.members.get(member.client_id)
        self.members[member.client_id] = Membership(member.number, None, reported=before.reported if before else 0)
        if self._listener is None:
            self._listener = self._listeners.follow(self.filter.topic_filter)
            self._filters.add_shared(self.filter.topic_filter, self.filter.text)
        self.connected[member] = None
        self._changed(self)

    def detach(self, member: Member) -> None:
        """Revoke the partitions and assignments of a disconnected member; others continue after its deliveries."""
        if member not in self.connected:
            return
        del self.connected[member]
        membership = self.members.get(member.client_id)
        if membership is not None:
            membership.since, membership.revoked = self._listeners.steady(), False
            membership.reported = len(self.dropped)
        self.rewind(member)
        member.delivering = False
        for shard, number in np.argwhere(member.mine).tolist():
            self._take(shard, number)
        for assignment in member.assignments:
            assignment.owner = None
        member.assignments.clear()
        self._forget_refusals(member)
        self.unsaved = True
        if not self.connected and self._listener is not None:
            self._listeners.leave_locked(self._listener, self)
            self._listener = None
            self._filters.remove_shared(self.filter.topic_filter, self.filter.text)
        self._changed(self)

    # --- assignment ---

    def update(self) -> None:
        """Take back revoked messages, save unsaved changes, and assign the partitions in equal shares.

        May be called again after an error.
        """
        if self.revoked:
            self.take_back()
        quick = [member for member in self.connected if not member.slow]
        members = quick or list(self.connected)
        planned = self._planned(members) if members else []
        if not quick or any(member.delivering for member in self.connected):  # then only free partitions are assigned
            planned = [move for move in planned if self._owners[move.shard][move.number] is None]
        else:
            self._take_from_slow()
        for move in planned:
            self._take(move.shard, move.number)
        if self.unsaved:
            self.save()  # before the new owners read
        for move in planned:
            self._give(move.shard, move.number, move.owner)
        for assignment in self.assignments if members else ():
            if assignment.owner is None:
                self._assign(assignment, members)
        self._parted = False

    def _assign(self, assignment: Assignment, members: Sequence[Member]) -> None:
        """Assign an assignment to one of these members or, if all of them refused it, to another connected member."""
        may = [member for member in members if member not in assignment.refused_by]
        may = may or [member for member in self.connected if member not in assignment.refused_by]
        if may:
            assignment.owner = min(may, key=lambda member: len(member.assignments))
            assignment.owner.assign(assignment)

    def note_refused(self, member: Member, refused: Sequence[tuple[int, Positions]]) -> None:
        """Record messages that a member has revoked because its ``allow`` refused them."""
        for shard, positions in refused:
            self._refusals[shard, int(positions[0])] = member
            self.revoked = True

    def part(self, assignment: Assignment, refused: Positions, member: Member) -> None:
        """Split off messages of an assignment that the member's ``allow`` refused, for others. Durable on return."""
        left = assignment.positions[~np.isin(assignment.positions, refused)]
        key = self.keys.returned_at(assignment.shard, assignment.first)
        writes: dict[bytes, StateWrite] = {key: FrameworkWrite(key, None)}
        if len(left):
            writes[self.keys.returned_at(assignment.shard, int(left[0]))] = self._returned(assignment.shard, left)
        self._add(assignment.shard, refused, assignment.refused_by | {member}, writes)
        self._parted = True
        if len(left):
            assignment.positions = left
        else:
            self.assignments.remove(assignment)
            member.assignments.remove(assignment)

    def reconsider(self, member: Member) -> None:
        """Offer a member the messages again that its ``allow`` refused, because ``allow`` was replaced."""
        self._forget_refusals(member)
        self._changed(self)

    def _forget_refusals(self, member: Member) -> None:
        for assignment in self.assignments:
            assignment.refused_by -= {member}
        self._refusals = {key: one for key, one in self._refusals.items() if one is not member}

    def _planned(self, members: Iterable[Member]) -> list[_Move]:
        """Return the partitions that should be moved."""
        total = dict.fromkeys(members, 0)
        return [
            _Move(shard, number, member)
            for shard, owners in enumerate(self._owners)
            for number, member in moves(owners, total, total)
        ]

    def _take_from_slow(self) -> None:
        for assignment in self.assignments:
            if assignment.owner is not None and assignment.owner.slow:
                assignment.owner.assignments.remove(assignment)
                assignment.owner, assignment.place = None, assignment.committed
                self.unsaved = True

    def _take(self, shard: int, number: int) -> None:
        """Revoke a partition from its owner."""
        owner = self._owners[shard][number]
        if owner is None:
            return
        self._owners[shard][number] = None
        owner.mine[shard, number] = False
        self._heads[shard, number] = False
        self.committed[shard, number] = self.places[shard, number]  # equal, or no message was handed out in between
        self.unsaved = True
        if not owner.mine[shard].any():
            self._resting[shard].pop(owner, None)
            owner.forget(shard)

    def _give(self, shard: int, number: int, member: Member) -> None:
        self._rouse(shard, member)  # before the new partition, which the member has not read
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
        over = any(assignment.committed == assignment.last for assignment in member.assignments)
        self.unsaved |= over
        if over or self.revoked or self._parted:
            self._changed(self)

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
        """Make a member rest that has read all visible messages of a shard; `wake` finds new messages for it."""
        resting = self._resting[shard]
        if not resting:
            self._seen[shard] = max(self._seen[shard], int(self.places[shard][member.mine[shard]].min()))
        resting[member] = None
        self._heads[shard] |= member.mine[shard]
        if self._listener is not None:
            self._listener.wait_locked(self, shard)

    def wake(self, shard: int) -> None:
        """Wake the resting members that own new messages of a shard; move the places of the others past them."""
        resting = self._resting[shard]
        while resting:
            try:
                read_slice = self.feed.read(shard, self._seen[shard], ROWS)
            except TopicstoreError:  # each member will get and report the error when it reads
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

    def take_nonpersistent(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Do nothing: all of the group's messages are stored, and `wake` finds them."""

    def miss_nonpersistent(self, messages: list[Message]) -> None:
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

    # --- storing ---

    def _record(self) -> StateWrite:
        places = pack_places(self.committed, np.ones_like(self._heads))
        return put(self.keys.group, GroupRecord(VERSION, places))

    def save(self) -> None:
        """Commit all places, the removal of members, and the returned messages that are left."""
        writes = [self._record(), *(FrameworkWrite(self.keys.member(client_id), None) for client_id in self._gone)]
        cut = [
            (assignment, assignment.behind(assignment.committed))
            for assignment in self.assignments
            if assignment.committed >= assignment.first
            and not (assignment.owner is not None and assignment.owner.delivering)
        ]  # not of a delivering member: its delivery stores the place under the assignment's first position
        writes += [
            FrameworkWrite(self.keys.returned_at(assignment.shard, assignment.first), None) for assignment, _ in cut
        ]
        writes += [self._returned(assignment.shard, left) for assignment, left in cut if len(left)]
        self._home.write(writes)
        self._gone.clear()
        self.unsaved = self.ahead = False
        for assignment, left in cut:
            if len(left):
                assignment.positions = left
                continue
            self.assignments.remove(assignment)
            if assignment.owner is not None:
                assignment.owner.assignments.remove(assignment)

    def _returned(self, shard: int, positions: Positions) -> StateWrite:
        return put(self.keys.returned_at(shard, int(positions[0])), returned(positions))

    def take_back(self) -> None:
        """Move revoked messages to the group's records. Durable on return; may be called again after an error.

        `save` was called before the messages were revoked, so their keys differ from those of other returned ones.
        """
        for state in filter(self._is_owned, self._states):  # other sites' are left until their shards come here
            revoked = [(key, *messages_of(key, decode(key, v, Returned))) for key, v in state.scan(self.keys.revoked)]
            for _, shard, positions in revoked:
                self._keep(shard, positions, self._refusals.get((shard, int(positions[0]))))
            if revoked:
                state.write([FrameworkWrite(key, None) for key, _, _ in revoked])
        self._refusals.clear()
        self.revoked = False

    def _is_owned(self, state: ShardState) -> bool:
        return self._owned(state.shard)

    def _keep(self, shard: int, revoked: Positions, refused_by: Member | None) -> None:
        """Store revoked messages as returned, except those that an earlier call, which then failed, stored."""
        for assignment in self.assignments:
            if assignment.shard == shard:
                revoked = revoked[~np.isin(revoked, assignment.positions)]
        if len(revoked):
            self._add(shard, revoked, frozenset(filter(None, [refused_by])), {})

    def _add(
        self, shard: int, positions: Positions, refused_by: frozenset[Member], writes: dict[bytes, StateWrite]
    ) -> None:
        """Commit returned messages together with ``writes`` (by key); merge messages that the same members refused."""
        like = (
            assignment
            for assignment in self.assignments
            if assignment.refused_by == refused_by
            and assignment.shard == shard
            and assignment.owner is None
            and not assignment.place
        )
        known = (
            next((assignment for assignment in like if len(assignment.positions) < _TOGETHER), None)
            if refused_by
            else None
        )
        if known is not None:
            key = self.keys.returned_at(shard, known.first)
            writes[key] = FrameworkWrite(key, None)
            positions = np.union1d(known.positions, positions)
        writes[self.keys.returned_at(shard, int(positions[0]))] = self._returned(shard, positions)
        self._home.write(list(writes.values()))
        if known is not None:
            known.positions = positions
        else:
            self.assignments.append(Assignment(shard, positions, refused_by=refused_by))

    def load_returned(self, taken: dict[tuple[int, int], int]) -> None:
        """Load the returned messages; ``taken``: by shard and first position, the place that a member stored."""
        self.assignments = []
        for key, value in self._home.scan(self.keys.returned):
            shard, positions = messages_of(key, decode(key, value, Returned))
            place = taken.get((shard, int(positions[0])), 0)
            self.assignments.append(Assignment(shard, positions, place, place))
            self.unsaved |= place > 0

    def remove(self) -> None:
        """Remove all records of the group, because no session has the subscription any more."""
        for state in filter(self._is_owned, self._states):
            state.write([FrameworkWrite(key, None) for key, _ in state.scan(self.keys.revoked)])
        prefixes = (self.keys.members, self.keys.returned)
        doomed = [FrameworkWrite(key, None) for prefix in prefixes for key, _ in self._home.scan(prefix)]
        self._home.write([FrameworkWrite(self.keys.group, None), *doomed])

    # --- time, and inspecting ---

    def look_after_slow(self, now: int, slow_after: float, stuck_since: Callable[[str], int | None]) -> None:
        """Mark as slow the members whose windows have been full for ``slow_after`` seconds.

        stuck_since: returns, for a client id, the time since which its window has been full, or None if it isn't.
        """
        changed = False
        for member in self.connected:
            stuck = stuck_since(member.client_id)
            slow = stuck is not None and now - stuck >= slow_after * _MICROSECONDS
            changed |= slow != member.slow
            member.slow = slow
        if changed:
            self._changed(self)

    def away(self, now: int, handover_after: float) -> list[str]:
        """Return the clients disconnected for ``handover_after`` seconds whose messages were not taken back yet."""
        return [
            client_id
            for client_id, member in self.members.items()
            if member.since is not None and not member.revoked and now - member.since >= handover_after * _MICROSECONDS
        ]

    def delivered_places(self) -> Places:
        """Return, by shard and partition, the position up to which all was delivered."""
        return np.minimum(self.committed, self.places)

    def unread_places(self) -> Places:
        """Return, by shard and partition, the position up to which all was read; `ABOVE_ALL` if nothing is unread."""
        return np.where(self._heads, ABOVE_ALL, self.places)
