"""`Group`: the members of one shared subscription, and the assignment of its messages to them.

A process has one object for each group. The group leases slices to the connected members, and revokes them when a
member disconnects or is slow. For members that have read all messages, it reads new messages itself, so that a message
wakes only the member that it is for. Used under the sessions' mutex.

The slice of a topic is the xxh64 hash of its UTF-8 bytes, modulo 64; this function is part of the stored format.
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
from topicstore.sessions.delivery_batch import Traits
from topicstore.sessions.dispatcher import Channel, Channels
from topicstore.sessions.records import VERSION, decode, put
from topicstore.sessions.shared_filters import SharedFilter
from topicstore.shard.state import FrameworkWrite, ShardState

from .records import GroupKeys, GroupRecord, MemberRecord, PackedPlaces, Returned, messages_of, returned

__all__ = [
    "ABOVE_ALL",
    "ROWS",
    "SLICES",
    "Group",
    "Loan",
    "Member",
    "Membership",
    "Places",
    "Slices",
    "moves",
    "pack_places",
    "raise_places",
    "slice_of",
    "slices_of_locked",
]

M = TypeVar("M")


def moves(owners: Sequence[M | None], members: Iterable[M], total: dict[M, int]) -> list[tuple[int, M]]:
    """Return the slices of a shard to reassign, with their new owners, to balance the members within one slice.

    As few slices as possible are moved. Remainder slices go first to the members with the fewest slices in all shards
    so far (``total``, which is updated).
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
SLICES = 64
"""Number of slices in each shard."""

Places = npt.NDArray[np.uint64]
"""By shard and slice, the position up to which all messages were read."""
Slices = npt.NDArray[np.bool_]
"""A selection of the slices of a shard or, with one more dimension, of all shards."""


def slice_of(topic: str) -> int:
    """Return the slice of a topic."""
    return xxhash.xxh64_intdigest(topic.encode()) % SLICES


def slices_of_locked(whole: ReadBatch) -> npt.NDArray[np.uint8]:
    """Return the slice of each row, computed once for all readers of the read batch."""
    traits = Traits.of(whole)
    if traits.slices is None:
        topics = to_list(whole.batch.topics)
        slices = {topic: slice_of(topic) for topic in set(topics)}
        traits.slices = np.fromiter(map(slices.__getitem__, topics), np.uint8, len(topics))
    return traits.slices


# --- places ---


def pack_places(places: Places, which: Slices) -> PackedPlaces:
    """Return the places of some slices in stored form."""
    return tuple(_pack(row, some) for row, some in zip(places, which, strict=True))


def _pack(places: npt.NDArray[np.uint64], some: Slices) -> tuple[tuple[int, int], ...]:
    return tuple((_bits((places == place) & some), int(place)) for place in np.unique(places[some]))


def raise_places(places: Places, packed: PackedPlaces) -> None:
    """Set each place to the stored one if that is higher."""
    for row, pairs in zip(places, packed, strict=True):
        for bits, place in pairs:
            some = _slices(bits)
            row[some] = np.maximum(row[some], np.uint64(place))


def _bits(some: Slices) -> int:
    return int.from_bytes(np.packbits(some, bitorder="little").tobytes(), "little")


def _slices(bits: int) -> Slices:
    return np.unpackbits(np.frombuffer(bits.to_bytes(SLICES // 8, "little"), np.uint8), bitorder="little").astype(bool)


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
    mine: Slices
    """By shard, the slices leased to it. Changed by the group."""
    loans: list[Loan]
    """The returned messages that it delivers. Changed by the group."""
    slow: bool
    """Whether its window has been full for long; then other members get its slices. Changed by the group."""
    drafting: bool
    """Whether it has an uncommitted draft, so that no slice can be revoked."""

    def wake(self, shard: int) -> None:
        """Handle the event that a shard may have messages to read."""

    def lend(self, loan: Loan) -> None:
        """Deliver messages that were returned to the group."""

    def forget(self, shard: int) -> None:
        """Handle the event that no slice of a shard is left."""


@attrs.define(eq=False)
class Loan:
    """Messages that were returned to a group by one member, and are delivered by another, one member at a time."""

    shard: int
    positions: Positions
    place: int = 0
    """The position up to which they were read."""
    settled: int = 0
    """The position up to which they were delivered."""
    owner: Member | None = None
    refused_by: frozenset[Member] = frozenset()
    """The connected members whose clients may not be sent these messages."""

    @property
    def first(self) -> int:
        """The first position, which identifies the loan."""
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
    handed_back: bool = False
    """Whether its messages in flight were taken back after the disconnect."""
    told: int = 0
    """The number of entries of `Group.dropped` at its last disconnect."""


class _Move(NamedTuple):
    """A slice to reassign."""

    shard: int
    number: int
    owner: Member
    """The new owner."""


class Group:
    """One group, with the states of all shards. ``changed`` is called with the group when `update` is necessary."""

    def __init__(
        self,
        shared: SharedFilter,
        channels: Channels,
        filters: DurableFilters,
        states: Sequence[ShardState],
        changed: Callable[[Group], None],
    ) -> None:
        self.filter = shared
        self.keys = GroupKeys(shared.text)
        self.feed = channels.hub.feed(shared.topic_filter)
        self.members: dict[str, Membership] = {}
        """The members by client id, connected or not."""
        self.connected: dict[Member, None] = {}
        self.places: Places = np.zeros((len(states), SLICES), np.uint64)
        """By shard and slice, the position up to which all messages were read."""
        self.settled: Places = self.places.copy()
        """By shard and slice, the position up to which all messages were delivered, after which a new owner begins."""
        self.loans: list[Loan] = []
        self.dropped: tuple[int, ...] = ()
        self.handed = False
        """Whether there are handed-back messages for `take_back`."""
        self._refusals: dict[tuple[int, int], Member] = {}
        """By shard and first position of handed-back messages, the member whose ``allow`` refused them."""
        self._parted = False
        """Whether refused messages were removed from a loan and wait for another member."""
        self.unsaved = False
        """Whether `save` must be called before slices or loans get new owners."""
        self.ahead = False
        """Whether places moved past messages of other slices without being saved."""
        self._channels = channels
        self._filters = filters
        self._states = states
        self._home = states[channels.shard_of(shared.text)]
        self._changed = changed
        self._channel: Channel | None = None
        self._owners: list[list[Member | None]] = [[None] * SLICES for _ in states]
        self._gone: set[str] = set()
        """The client ids of former members whose membership records are still stored."""
        self._resting: list[dict[Member, None]] = [{} for _ in states]
        """By shard, the resting members, which have read all their messages."""
        self._heads: Slices = np.zeros(self.places.shape, np.bool_)
        """The slices of the resting members."""
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
        """Add a connected member, and lease slices to it."""
        before = self.members.get(member.client_id)
        self.members[member.client_id] = Membership(member.number, None, told=before.told if before else 0)
        if self._channel is None:
            self._channel = self._channels.follow(self.filter.topic_filter)
            self._filters.add_shared(self.filter.topic_filter, self.filter.text)
        self.connected[member] = None
        self._changed(self)

    def detach(self, member: Member) -> None:
        """Revoke the slices and loans of a disconnected member; other members continue after its deliveries."""
        if member not in self.connected:
            return
        del self.connected[member]
        membership = self.members.get(member.client_id)
        if membership is not None:
            membership.since, membership.handed_back = self._channels.steady(), False
            membership.told = len(self.dropped)
        self.rewind(member)
        member.drafting = False
        for shard, number in np.argwhere(member.mine).tolist():
            self._take(shard, number)
        for loan in member.loans:
            loan.owner = None
        member.loans.clear()
        self._forget_refusals(member)
        self.unsaved = True
        if not self.connected and self._channel is not None:
            self._channels.leave_locked(self._channel, self)
            self._channel = None
            self._filters.remove_shared(self.filter.topic_filter, self.filter.text)
        self._changed(self)

    # --- assignment ---

    def update(self) -> None:
        """Take back handed-back messages, save unsaved changes, and lease the slices in equal shares.

        May be called again after an error.
        """
        if self.handed:
            self.take_back()
        quick = [member for member in self.connected if not member.slow]
        members = quick or list(self.connected)
        planned = self._planned(members) if members else []
        if not quick or any(member.drafting for member in self.connected):  # then only free slices are leased
            planned = [move for move in planned if self._owners[move.shard][move.number] is None]
        else:
            self._take_from_slow()
        for move in planned:
            self._take(move.shard, move.number)
        if self.unsaved:
            self.save()  # before the new owners read
        for move in planned:
            self._give(move.shard, move.number, move.owner)
        for loan in self.loans if members else ():
            if loan.owner is None:
                self._lend(loan, members)
        self._parted = False

    def _lend(self, loan: Loan, members: Sequence[Member]) -> None:
        """Assign a loan to one of these members or, if all of them refused it, to another connected member."""
        may = [member for member in members if member not in loan.refused_by]
        may = may or [member for member in self.connected if member not in loan.refused_by]
        if may:
            loan.owner = min(may, key=lambda member: len(member.loans))
            loan.owner.lend(loan)

    def note_refused(self, member: Member, refused: Sequence[tuple[int, Positions]]) -> None:
        """Record messages that a member has handed back because its ``allow`` refused them."""
        for shard, positions in refused:
            self._refusals[shard, int(positions[0])] = member
            self.handed = True

    def part(self, loan: Loan, refused: Positions, member: Member) -> None:
        """Split off the messages of a loan that the member's ``allow`` refused, for others. Durable on return."""
        left = loan.positions[~np.isin(loan.positions, refused)]
        key = self.keys.returned_at(loan.shard, loan.first)
        writes: dict[bytes, StateWrite] = {key: FrameworkWrite(key, None)}
        if len(left):
            writes[self.keys.returned_at(loan.shard, int(left[0]))] = self._returned(loan.shard, left)
        self._add(loan.shard, refused, loan.refused_by | {member}, writes)
        self._parted = True
        if len(left):
            loan.positions = left
        else:
            self.loans.remove(loan)
            member.loans.remove(loan)

    def reconsider(self, member: Member) -> None:
        """Offer a member the messages again that its ``allow`` refused, because ``allow`` was replaced."""
        self._forget_refusals(member)
        self._changed(self)

    def _forget_refusals(self, member: Member) -> None:
        for loan in self.loans:
            loan.refused_by -= {member}
        self._refusals = {key: one for key, one in self._refusals.items() if one is not member}

    def _planned(self, members: Iterable[Member]) -> list[_Move]:
        """Return the slices that should be moved."""
        total = dict.fromkeys(members, 0)
        return [
            _Move(shard, number, member)
            for shard, owners in enumerate(self._owners)
            for number, member in moves(owners, total, total)
        ]

    def _take_from_slow(self) -> None:
        for loan in self.loans:
            if loan.owner is not None and loan.owner.slow:
                loan.owner.loans.remove(loan)
                loan.owner, loan.place = None, loan.settled
                self.unsaved = True

    def _take(self, shard: int, number: int) -> None:
        """Revoke a slice from its owner."""
        owner = self._owners[shard][number]
        if owner is None:
            return
        self._owners[shard][number] = None
        owner.mine[shard, number] = False
        self._heads[shard, number] = False
        self.settled[shard, number] = self.places[shard, number]  # equal, or no message was handed out in between
        self.unsaved = True
        if not owner.mine[shard].any():
            self._resting[shard].pop(owner, None)
            owner.forget(shard)

    def _give(self, shard: int, number: int, member: Member) -> None:
        self._rouse(shard, member)  # before the new slice, which the member has not read
        self._owners[shard][number] = member
        member.mine[shard, number] = True
        member.wake(shard)

    # --- places ---

    def advance(self, shard: int, which: Slices, place: int) -> None:
        """Move the places of some slices of a shard forward to a position."""
        row = self.places[shard]
        row[which] = np.maximum(row[which], np.uint64(place))

    def settle(self, member: Member) -> None:
        """Make a member's places final: its messages are handed out, and its places are stored."""
        self.settled[member.mine] = self.places[member.mine]
        for loan in member.loans:
            loan.settled = loan.place
        over = any(loan.settled == loan.last for loan in member.loans)
        self.unsaved |= over
        if over or self.handed or self._parted:
            self._changed(self)

    def rewind(self, member: Member) -> None:
        """Move the places of a member back, because the messages that it read were not handed out."""
        self.places[member.mine] = self.settled[member.mine]
        for loan in member.loans:
            loan.place = loan.settled
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
        if self._channel is not None:
            self._channel.wait_locked(self, shard)

    def wake(self, shard: int) -> None:
        """Wake the resting members that own new messages of a shard, and move the places of the others past these."""
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
        if resting and self._channel is not None:
            self._channel.wait_locked(self, shard)

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Do nothing: all of the group's messages are stored, and `wake` finds them."""

    def miss_live(self, messages: list[Message]) -> None:
        """Do nothing, because all of the group's messages are stored."""

    def _concerned(self, shard: int, read_slice: ReadSlice) -> list[Member]:
        """Return the resting members for which a slice has messages."""
        if not len(read_slice):
            return []
        slices = slices_of_locked(read_slice.whole)[read_slice.rows]
        new = read_slice.whole.positions[read_slice.rows] > self.places[shard][slices]
        hit = np.flatnonzero(np.bincount(slices[new], minlength=SLICES))
        owners = {self._owners[shard][number]: None for number in hit.tolist()}
        return [member for member in owners if member is not None and member in self._resting[shard]]

    def _pass_by(self, shard: int, place: int) -> None:
        """Move the places of resting members to a position before which they have no messages."""
        places, settled = self.places[shard], self.settled[shard]
        heads = self._heads[shard] & (places == settled)
        places[heads] = settled[heads] = np.maximum(places[heads], np.uint64(place))
        self.ahead = True

    def _rouse(self, shard: int, member: Member) -> None:
        if member in self._resting[shard]:
            del self._resting[shard][member]
            self._heads[shard] &= ~member.mine[shard]

    # --- storing ---

    def _record(self) -> StateWrite:
        places = pack_places(self.settled, np.ones_like(self._heads))
        return put(self.keys.group, GroupRecord(VERSION, places))

    def save(self) -> None:
        """Commit all places, the removal of members, and the returned messages that are left."""
        writes = [self._record(), *(FrameworkWrite(self.keys.member(client_id), None) for client_id in self._gone)]
        cut = [
            (loan, loan.behind(loan.settled))
            for loan in self.loans
            if loan.settled >= loan.first and not (loan.owner is not None and loan.owner.drafting)
        ]  # not of a drafting member: its draft stores the loan's place under the loan's first position
        writes += [FrameworkWrite(self.keys.returned_at(loan.shard, loan.first), None) for loan, _ in cut]
        writes += [self._returned(loan.shard, left) for loan, left in cut if len(left)]
        self._home.write(writes)
        self._gone.clear()
        self.unsaved = self.ahead = False
        for loan, left in cut:
            if len(left):
                loan.positions = left
                continue
            self.loans.remove(loan)
            if loan.owner is not None:
                loan.owner.loans.remove(loan)

    def _returned(self, shard: int, positions: Positions) -> StateWrite:
        return put(self.keys.returned_at(shard, int(positions[0])), returned(positions))

    def take_back(self) -> None:
        """Move handed-back messages to the group's records. Durable on return; may be called again after an error.

        `save` was called before the messages were handed back, so their keys differ from those of other returned ones.
        """
        for state in self._states:
            handed = [(key, *messages_of(key, decode(key, v, Returned))) for key, v in state.scan(self.keys.handed)]
            for _, shard, positions in handed:
                self._keep(shard, positions, self._refusals.get((shard, int(positions[0]))))
            if handed:
                state.write([FrameworkWrite(key, None) for key, _, _ in handed])
        self._refusals.clear()
        self.handed = False

    def _keep(self, shard: int, handed: Positions, refused_by: Member | None) -> None:
        """Store handed-back messages as returned, except those that an earlier call, which then failed, stored."""
        for loan in self.loans:
            if loan.shard == shard:
                handed = handed[~np.isin(handed, loan.positions)]
        if len(handed):
            self._add(shard, handed, frozenset(filter(None, [refused_by])), {})

    def _add(
        self, shard: int, positions: Positions, refused_by: frozenset[Member], writes: dict[bytes, StateWrite]
    ) -> None:
        """Commit returned messages together with ``writes`` (by key); merge messages that the same members refused."""
        like = (
            loan
            for loan in self.loans
            if loan.refused_by == refused_by and loan.shard == shard and loan.owner is None and not loan.place
        )
        known = next((loan for loan in like if len(loan.positions) < _TOGETHER), None) if refused_by else None
        if known is not None:
            key = self.keys.returned_at(shard, known.first)
            writes[key] = FrameworkWrite(key, None)
            positions = np.union1d(known.positions, positions)
        writes[self.keys.returned_at(shard, int(positions[0]))] = self._returned(shard, positions)
        self._home.write(list(writes.values()))
        if known is not None:
            known.positions = positions
        else:
            self.loans.append(Loan(shard, positions, refused_by=refused_by))

    def load_returned(self, taken: dict[tuple[int, int], int]) -> None:
        """Load the returned messages; ``taken``: by shard and first position, the place that a member stored."""
        self.loans = []
        for key, value in self._home.scan(self.keys.returned):
            shard, positions = messages_of(key, decode(key, value, Returned))
            place = taken.get((shard, int(positions[0])), 0)
            self.loans.append(Loan(shard, positions, place, place))
            self.unsaved |= place > 0

    def remove(self) -> None:
        """Remove all records of the group, because no session has the subscription any more."""
        for state in self._states:
            state.write([FrameworkWrite(key, None) for key, _ in state.scan(self.keys.handed)])
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
            if member.since is not None
            and not member.handed_back
            and now - member.since >= handover_after * _MICROSECONDS
        ]

    def unread_places(self) -> Places:
        """Return, by shard and slice, the position up to which all was read; `ABOVE_ALL` if no message is unread."""
        return np.where(self._heads, ABOVE_ALL, self.places)
