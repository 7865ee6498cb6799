"""`Branch`: the members of a shared subscription on one of the sites that share a database; `BranchCursor`: a member.

A branch reads the partitions and returned messages that the group's owner has granted to its members
(`topicstore.sessions.shared.stored_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.sessions.cursors import SessionCursor
from topicstore.sessions.delivery_batch import SelectedMessages, only
from topicstore.sessions.dispatcher import FilterListeners
from topicstore.sessions.model import SharedFilter, SubscribeOptions
from topicstore.sessions.records import VERSION, Keys, decode, owner_of, pack_positions, put
from topicstore.shard.state import FrameworkWrite, ShardState

from .cursor import SharedCursor
from .reader import Assignment, GroupReader, Member, Partitions, Places, pack_places, packed_partitions, raise_places
from .records import (
    GrantRecord,
    HandBackRecord,
    LeaseRecord,
    PackedPlaces,
    ReturnedRecord,
    StandingRecord,
    positions_of,
)

__all__ = ["Branch", "BranchCursor"]

_DROPPED = 64
"""The most dropped generations that are stored, those found last."""


class Branch(GroupReader):
    """The members of a group that are connected to this site, with the places of their partitions."""

    def __init__(
        self, shared: SharedFilter, listeners: FilterListeners, filters: DurableFilters, states: Sequence[ShardState]
    ) -> None:
        super().__init__(shared, listeners, filters, len(states))
        self._home = states[listeners.shard_of(shared.text)]

    @property
    def cursors(self) -> list[BranchCursor]:
        """The connected members."""
        return [member for member in self.connected if isinstance(member, BranchCursor)]

    def note_dropped(self, generations: tuple[int, ...]) -> None:
        """Record dropped generations that may not have been read completely; the members' records show them."""
        before = self.dropped
        super().note_dropped(generations)
        if self.dropped != before:
            for member in self.cursors:
                member.answer()

    def detach(self, member: Member) -> None:
        """Release the partitions and assignments of a member, which the group's owner assigns to other members."""
        if member in self.connected:
            del self.connected[member]
            self._release(member)

    def note_refused(self, member: Member, refused: Sequence[tuple[int, Positions]]) -> None:
        """Do nothing: the refused messages were handed back by the write that committed the places."""

    def part(self, assignment: Assignment, refused: Positions, member: Member) -> None:
        """Do nothing, because `BranchCursor.permitted` hands back the refused messages."""

    def reconsider(self, member: Member) -> None:
        """Request that the group's owner again offers a member the messages that the member's ``allow`` refused."""
        if isinstance(member, BranchCursor):
            member.replaced += 1
            member.answer()

    def followed(self, catch_up: Callable[[Sequence[tuple[int, int]]], None]) -> None:
        """Let the members follow their latest grants. The members must have no uncommitted deliveries.

        catch_up: waits until pairs of shard and position can be read here. Raises the errors of reading.
        """
        for member in self.cursors:
            key = self.keys.grant(member.owner)
            stored = self._home.get(key)
            grant = None if stored is None else decode(key, stored, GrantRecord)
            if grant is not None and member.is_new(grant):
                returned = self._returned(member, grant)
                if returned is not None:
                    ahead = [(one.shard, one.last) for one in returned]
                    ahead += [(shard, place) for shard, pairs in enumerate(grant.places) for _, place in pairs]
                    catch_up(ahead)
                    if member in self.connected:  # the member may have disconnected meanwhile
                        self._follow(member, grant, returned)

    def _returned(self, member: BranchCursor, grant: GrantRecord) -> list[Assignment] | None:
        """Return the returned messages that a grant adds; None if a later grant was stored meanwhile."""
        known = {assignment.number for assignment in member.assignments}
        found = []
        for number in grant.returned:
            if number not in known:
                key = self.keys.waiting_at(number)
                stored = self._home.get(key)
                if stored is None:
                    return None
                record = decode(key, stored, ReturnedRecord)
                found.append(Assignment(record.shard, positions_of(record), owner=member, number=number))
        return found

    def _follow(self, member: BranchCursor, grant: GrantRecord, returned: Sequence[Assignment]) -> None:
        wanted = packed_partitions(grant.places)
        places: Places = np.zeros_like(self.places)
        raise_places(places, grant.places)
        gone = np.argwhere(member.mine & ~wanted).tolist()
        for shard, number in gone:
            member.released[shard, number] = self.places[shard, number]
            self._take(shard, number)
        new = wanted & ~member.mine
        for former in {self._owners[shard][number] for shard, number in np.argwhere(new).tolist()} - {None}:
            self._leave(former, new)
        places[new] = np.maximum(places[new], member.released[new])
        member.released[~packed_partitions(grant.withdrawn)] = 0  # the group's record has the places of the others
        self.places[new] = self.committed[new] = np.maximum(self.places[new], places[new])
        for shard, number in np.argwhere(new).tolist():
            self._give(shard, number, member)
        for one in [one for one in member.assignments if one.number not in grant.returned]:
            member.assignments.remove(one)
            member.withdrawn[one.number] = one.committed
        for number in member.withdrawn.keys() - set(grant.withdrawn_returned):
            del member.withdrawn[number]  # the group's owner knows the place reached in it
        for assignment in returned:
            member.assign(assignment)
        member.follow(grant.number)

    def _leave(self, former: Member | None, which: Partitions) -> None:
        """Take partitions from a member whose connection has ended, but whose cursor is not closed yet."""
        if former is not None:
            self.rewind(former)
            for shard, number in np.argwhere(former.mine & which).tolist():
                self._take(shard, number)


class BranchCursor(SharedCursor):
    """A member on a site of a cluster.

    The member's places and its acknowledgements of grants are committed together, in its session's shard.
    """

    __slots__ = (
        "_answer",
        "_grant",
        "_guard",
        "_handed_back",
        "_reported",
        "_start",
        "owner",
        "released",
        "replaced",
        "withdrawn",
    )

    def __init__(
        self,
        group: Branch,
        keys: Keys,
        number: int,
        options: SubscribeOptions,
        ready: Callable[[SessionCursor], None],
        guard: int,
        standing: StandingRecord | None,
        start: Sequence[int],
        places: PackedPlaces,
    ) -> None:
        """``standing`` and ``places`` are as stored; None if the membership is to be stored."""
        super().__init__(group, keys, number, options, ready)
        self.owner = owner_of(keys.client_id).decode()
        """Its client as in keys."""
        self.released: Places = np.zeros_like(group.places)
        """By shard and partition, the place up to which it has delivered a partition that it has no more."""
        if places:
            raise_places(self.released, places)
        self.withdrawn: dict[int, int] = {} if standing is None else dict(standing.returned)
        """By number of returned messages that were withdrawn from it, also in an earlier connection, the place up to
        which it has delivered them."""
        self.slow = standing is not None and standing.slow
        self._reported = () if standing is None else standing.dropped
        """The dropped generations that were known in its earlier connections."""
        group.dropped += tuple(number for number in self._reported if number not in group.dropped)
        self._guard = guard
        self._start = tuple(start) if standing is None else standing.start
        self._grant = 0
        """The number of the grant that it follows."""
        self.replaced = 0
        """The number of times that the member's ``allow`` was replaced."""
        self._handed_back: list[StateWrite] = []
        """Writes that hand back messages refused by ``allow`` since the last commit. `writes` may be called often."""
        self._answer = self._moved = standing is None
        """Whether `StandingRecord` must be stored anew."""

    @property
    def answers(self) -> bool:
        """Whether the member's acknowledgement of a grant isn't committed yet. The group's owner waits for it."""
        return self._answer

    def answer(self) -> None:
        """Commit the `StandingRecord` with the next write of the session."""
        self._answer = self._moved = True

    def is_new(self, grant: GrantRecord) -> bool:
        """Return whether a grant is for this connection and newer than the one that the member follows.

        Returns False while a delivery of the member is uncommitted.
        """
        here = (grant.guard, grant.subscription) == (self._guard, self.number)
        return here and grant.number > self._grant and not self.delivering

    def follow(self, number: int) -> None:
        """Acknowledge a grant: its committed record will say that this member follows the grant."""
        self._grant = number
        self.answer()

    def _read_assignment(self, assignment: Assignment, limit: int, now: int) -> SelectedMessages:
        self._answer = True  # the record with the acknowledgement also has the places in assignments
        return super()._read_assignment(assignment, limit, now)

    def permitted(self, selected: SelectedMessages, answers: Sequence[bool]) -> SelectedMessages:
        """Return ``selected``, the result of the last `read`, without the messages that ``answers`` refuses.

        The write that commits the places hands refused messages back to the group.
        """
        if all(answers) or selected.positions is None:
            return selected
        refused = selected.positions[~np.array(answers, np.bool_)]
        packed, me = pack_positions(refused), (self.owner, self._guard, self.number, self.replaced)
        record = HandBackRecord(VERSION, (), (), selected.shard, packed.first, packed.steps, packed.width, (me,))
        self._handed_back.append(put(self.group.keys.hand_back(), record))
        return only(selected, answers)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The generations that were dropped before the group had read them, and not yet reported to this member."""
        return tuple(number for number in self.group.dropped if number not in self._reported)

    # --- storing ---

    def everything(self) -> list[StateWrite]:
        """Return the writes that store the subscription and the membership."""
        committed = ((assignment.number, assignment.committed) for assignment in self.assignments)
        return [*super().everything(), self._standing((*committed, *self.withdrawn.items()))]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the changed places, acknowledge the grant, and hand messages back."""
        if not self._moved:
            return []
        lease = put(self._keys.leases(self.number), LeaseRecord(VERSION, self._packed(), ()))
        return [lease, *self._handed_back, *([self._standing(self._delivered())] if self._answer else ())]

    def _packed(self) -> PackedPlaces:
        """Return the places of its partitions, and of those that it has released."""
        places = np.where(self.mine, self.group.places, self.released)
        return pack_places(places, self.mine | (self.released > 0))

    def _delivered(self) -> tuple[tuple[int, int], ...]:
        read = ((assignment.number, assignment.place) for assignment in self.assignments)
        return (*read, *self.withdrawn.items())

    def _standing(self, delivered: tuple[tuple[int, int], ...]) -> StateWrite:
        record = StandingRecord(
            VERSION,
            self.number,
            self._start,
            self._grant,
            self.slow,
            delivered,
            self.replaced,
            self.group.dropped[-_DROPPED:],
        )
        return put(self.group.keys.standing(self.owner), record)

    def ending(self) -> list[StateWrite]:
        """Return the writes that end the membership, and hand the member's places back to the group."""
        keys, left = self.group.keys, HandBackRecord(VERSION, self._packed(), self._delivered())
        return [FrameworkWrite(keys.standing(self.owner), None), put(keys.hand_back(), left), *self._handed_back]

    def committed(self) -> None:
        """Make the current places final, because the write that stores them is committed."""
        if self._moved:
            self._answer = False
            self._handed_back.clear()
        super().committed()

    def rewind(self) -> None:
        """Return to the places of the last `committed`, so that the messages read since are read again."""
        super().rewind()
        self._handed_back.clear()
        self._moved = self._answer
