"""`Group`: the members of one shared subscription, and the assignment of its messages to them.

A process has one object for each group. The group assigns partitions to the connected members, and revokes them when a
member disconnects or is slow. Used under the sessions' mutex. A database that sites share has `SiteGroups` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.sessions.dispatcher import FilterListeners
from topicstore.sessions.model import SharedFilter
from topicstore.sessions.records import VERSION, decode, put
from topicstore.shard.state import FrameworkWrite, ShardState

from .reader import Assignment, GroupReader, Member, Membership, pack_places
from .records import GroupRecord, MemberRecord, Returned, messages_of, returned

__all__ = ["Group", "moves"]

M = TypeVar("M")


def moves(owners: Sequence[M | None], members: Iterable[M], total: dict[M, int]) -> list[tuple[int, M]]:
    """Return the partitions of a shard to reassign, with their new owners. Shares then differ by at most one partition.

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


_MICROSECONDS = 1_000_000
_TOGETHER = 4_096
"""Size, in messages, up to which messages that the same members refused are merged into one record."""


class _Move(NamedTuple):
    """A partition to reassign."""

    shard: int
    number: int
    owner: Member
    """The new owner."""


class Group(GroupReader):
    """One group, with the states of all shards. ``changed`` is called with the group when `update` is necessary."""

    def __init__(
        self,
        shared: SharedFilter,
        listeners: FilterListeners,
        filters: DurableFilters,
        states: Sequence[ShardState],
        changed: Callable[[Group], None],
    ) -> None:
        super().__init__(shared, listeners, filters, len(states))
        self.revoked = False
        """Whether there are revoked messages for `take_back`."""
        self._refusals: dict[tuple[int, int], Member] = {}
        """By shard and first position of revoked messages, the member whose ``allow`` refused them."""
        self._parted = False
        """Whether refused messages were removed from an assignment and wait for another member."""
        self.unsaved = False
        """Whether `save` must be called before partitions or assignments get new owners."""
        self._states = states
        self._home = states[listeners.shard_of(shared.text)]
        self._changed = changed
        self._gone: set[str] = set()
        """The client ids of former members whose membership records are still stored."""

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
        super().attach(member)
        self._changed(self)

    def detach(self, member: Member) -> None:
        """Revoke the partitions and assignments of a disconnected member; other members continue at its places."""
        if member not in self.connected:
            return
        del self.connected[member]
        membership = self.members.get(member.client_id)
        if membership is not None:
            membership.since, membership.revoked = self._listeners.steady(), False
            membership.reported = len(self.dropped)
        self._release(member)
        self._forget_refusals(member)
        self.unsaved = True
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
        if not quick or any(member.delivering for member in self.connected):  # assign only free partitions
            planned = [move for move in planned if self._owners[move.shard][move.number] is None]
        else:
            self._take_from_slow()
        for move in planned:
            self._take(move.shard, move.number)
        if self.unsaved:
            self.save()  # places are stored before the partitions' new owners read
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
        """Record messages that a member has returned because its ``allow`` refused them."""
        for shard, positions in refused:
            self._refusals[shard, int(positions[0])] = member
            self.revoked = True

    def part(self, assignment: Assignment, refused: Positions, member: Member) -> None:
        """Split off messages of an assignment that the member's ``allow`` refused, for other members.

        Durable on return.
        """
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
        self.unsaved |= self._owners[shard][number] is not None
        super()._take(shard, number)

    # --- places ---

    def apply(self, member: Member) -> None:
        """Make a member's places final: its messages are handed out, and its places are stored."""
        super().apply(member)
        over = any(assignment.committed == assignment.last for assignment in member.assignments)
        self.unsaved |= over
        if over or self.revoked or self._parted:
            self._changed(self)

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
        ]  # except assignments being delivered: the delivery stores the place under their first position
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
        for state in self._states:
            revoked = [(key, *messages_of(key, decode(key, v, Returned))) for key, v in state.scan(self.keys.revoked)]
            for _, shard, positions in revoked:
                self._keep(shard, positions, self._refusals.get((shard, int(positions[0]))))
            if revoked:
                state.write([FrameworkWrite(key, None) for key, _, _ in revoked])
        self._refusals.clear()
        self.revoked = False

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
        """Load the returned messages. ``taken`` has, by shard and first position, the place that a member stored."""
        self.assignments = []
        for key, value in self._home.scan(self.keys.returned):
            shard, positions = messages_of(key, decode(key, value, Returned))
            place = taken.get((shard, int(positions[0])), 0)
            self.assignments.append(Assignment(shard, positions, place, place))
            self.unsaved |= place > 0

    def remove(self) -> None:
        """Remove all records of the group, because no session has the subscription any more."""
        for state in self._states:
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
