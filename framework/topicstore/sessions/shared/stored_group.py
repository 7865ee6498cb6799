"""`StoredGroup`: a shared subscription of a cluster, as it is stored; assigns its messages to members on any site.

The members of a group may be on any site, and a member's site reads the messages itself. So sites exchange only the
partitions of each member, and the places up to which the member has delivered them. Both are small values of state, and
pass through the log of the shards as all state does; a site that doesn't keep a shard reads them at a site that does.
Each value has one writer, the owner of its shard, whose writes the log fences. There are no leases that expire by a
clock, and a site that is killed loses no data, because all of it is in the log.

* The owner of the subscription's shard **grants** partitions to connected members (`GrantRecord`). A member is
  connected if its session's record says so, which its site writes; if that site dies, the next owner of the session's
  shard does.
* The member's site follows the latest grant, and acknowledges it by its number (`StandingRecord`), in the write that
  commits the member's places. Before that, no other member gets a partition that the grant withdraws. If the member
  disconnects, no acknowledgement is needed: a grant applies to one connection, identified by the guard of the session.
* A member hands back to the group its places when it ends, and messages that other members are to get, in records of
  its own shard (`HandBackRecord`). The group's owner stores them in its shard, and in the same write acknowledges them;
  then the member's site removes the records. Both sites repeat their part until they see the other site's.

A site may see another site's writes late, but never in another order, and a new owner of the subscription's shard first
reads all logs to their ends. So a site that is paused, killed or cut off holds up only the partitions and messages that
were granted to its members, and only until another site has taken its shards over.

`StoredGroup.decided` is a pure function of the stored records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.sessions.model import parse_shared
from topicstore.sessions.records import (
    LEASES,
    SESSION,
    SUBSCRIPTION,
    VERSION,
    SessionRecord,
    SubscriptionRecord,
    decode,
    pack_positions,
    put,
)
from topicstore.shard.state import FrameworkWrite, ShardState

from .group import moves
from .reader import PARTITIONS, Assignment, Partitions, Places, pack_places, packed_partitions, raise_places
from .records import (
    Attachment,
    GrantRecord,
    GroupKeys,
    GroupRecord,
    HandBackRecord,
    LeaseRecord,
    MemberRecord,
    Returned,
    ReturnedRecord,
    StandingRecord,
    messages_of,
    positions_of,
)

__all__ = ["StoredGroup", "StoredMember"]

_TOGETHER = 4_096
"""Size, in messages, up to which messages that the same members refused are merged into one record."""


@attrs.frozen
class StoredMember:
    """A session that has the subscription."""

    owner: str
    """Its client as in keys (`topicstore.sessions.records.owner_of`)."""
    standing: StandingRecord
    guard: int | None
    """The guard of its session; None while it is not connected."""

    @property
    def attachment(self) -> Attachment | None:
        """The identity of the member's connection; None while the member is not connected."""
        return None if self.guard is None else (self.owner, self.guard, self.standing.number, self.standing.replaced)


@attrs.define
class _Share:
    """The partitions and returned messages that one connected member gets by an assignment."""

    member: StoredMember
    before: GrantRecord | None
    """The stored grant, if it is for this connection."""
    mine: Partitions
    withdrawn: Partitions
    """The partitions that the member may still read though they were withdrawn from it."""
    returned: set[int] = attrs.field(factory=set)
    withdrawn_returned: set[int] = attrs.field(factory=set)

    def __hash__(self) -> int:
        return id(self)

    def changed(self) -> bool:
        """Return whether the grant differs from the stored one."""
        if self.before is None:
            return bool(self.mine.any() or self.returned)
        same = np.array_equal(self.mine, packed_partitions(self.before.places))
        return not (same and self.returned == set(self.before.returned))


class StoredGroup:
    """A group, read from the state of all shards. Raises the errors of reading."""

    def __init__(self, states: Sequence[ShardState], home: ShardState, text: str) -> None:
        self.filter = parse_shared(text)
        self.keys = keys = GroupKeys(text)
        self._home = home
        self._stored = home.get(keys.group)
        self.record = None if self._stored is None else decode(keys.group, self._stored, GroupRecord)
        """None if there is no such group yet, or no more."""
        self.places: Places = np.zeros((len(states), PARTITIONS), np.uint64)
        """By shard and partition, the position up to which all was delivered."""
        self.members: dict[str, StoredMember] = {}
        """The members, by client as in keys."""
        self.former = [owner for owner in self._old_members() if self._is_member(states, owner, text)]
        """The members that joined before sites shared the database, and have not connected since."""
        self.grants: dict[str, GrantRecord] = {}
        self.waiting: dict[int, ReturnedRecord] = {}
        """The returned messages, by number."""
        self._handed_back: dict[tuple[int, bytes], HandBackRecord] = {}
        """By shard and id, the hand-backs of members to the group."""
        self._taken = {(int.from_bytes(key[-12:-8], "big"), key[-8:]) for key, _ in home.scan(keys.taken)}
        """The hand-backs that were acknowledged."""
        self._delivered: dict[int, int] = {}
        """By number of returned messages, the position up to which they were delivered."""
        for key, value in home.scan(keys.grants):
            self.grants[key[len(keys.grants) :].decode()] = decode(key, value, GrantRecord)
        for key, value in home.scan(keys.waiting):
            self.waiting[int.from_bytes(key[-8:], "big")] = decode(key, value, ReturnedRecord)
        if self.record is not None:
            raise_places(self.places, self.record.places)
        for state in states:
            self._read(state)

    def _old_members(self) -> Iterable[str]:
        prefix = self.keys.members
        return [key[len(prefix) :].decode() for key, _ in self._home.scan(prefix)]

    def _is_member(self, states: Sequence[ShardState], owner: str, text: str) -> bool:
        """Return whether the session of a member of an older release has the subscription; read its places."""
        key = self.keys.members + owner.encode()
        stored = self._home.get(key)
        if stored is None:
            return False
        number = decode(key, stored, MemberRecord).number.to_bytes(4, "big")
        subscription, lease = (b"%b%b\0%b" % (kind, owner.encode(), number) for kind in (SUBSCRIPTION, LEASES))
        for state in states:
            found, places = state.get_many([subscription, lease])
            if places is not None:
                raise_places(self.places, decode(lease, places, LeaseRecord).places)
            if found is not None and decode(subscription, found, SubscriptionRecord).topic_filter == text:
                return True
        return False

    def _read(self, state: ShardState) -> None:
        """Read the members whose sessions are in a shard, and the places and messages that they have handed back.

        Hand-backs are read last, so that a session which ends during the call is read by its places or its hand-back.
        """
        prefix = self.keys.standings
        standings = [
            (key[len(prefix) :].decode(), decode(key, value, StandingRecord)) for key, value in state.scan(prefix)
        ]
        sessions = [SESSION + owner.encode() for owner, _ in standings]
        records = state.get_many(sessions) if sessions else []
        for (owner, standing), key, stored in zip(standings, sessions, records, strict=True):
            record = None if stored is None else decode(key, stored, SessionRecord)
            open_now = record is not None and record.connected and not record.ending
            self.members[owner] = StoredMember(owner, standing, record.guard if record and open_now else None)
            self._deliver(standing.returned)
        leases = [b"%b%b\0%b" % (LEASES, owner.encode(), one.number.to_bytes(4, "big")) for owner, one in standings]
        for key, stored in zip(leases, state.get_many(leases) if leases else [], strict=True):
            if stored is not None:
                raise_places(self.places, decode(key, stored, LeaseRecord).places)
        for key, value in state.scan(self.keys.handed_back):
            handed = self._handed_back[state.shard, key[-8:]] = decode(key, value, HandBackRecord)
            if self.record is not None:
                if handed.places:
                    raise_places(self.places, handed.places)
                self._deliver(handed.returned)

    def _deliver(self, returned: Iterable[tuple[int, int]]) -> None:
        for number, place in returned:
            self._delivered[number] = max(place, self._delivered.get(number, 0))

    @property
    def over(self) -> bool:
        """Whether no session has the subscription."""
        return not (self.members or self.former)

    # --- inspecting, as `Group` ---

    @property
    def dropped(self) -> tuple[int, ...]:
        """The generations that were dropped before the group had read them, as far as its members' sites know."""
        return tuple(sorted({number for member in self.members.values() for number in member.standing.dropped}))

    @property
    def assignments(self) -> list[Assignment]:
        """The messages that members returned to the group, and that were delivered to no other member yet."""
        found = []
        for number, record in self.waiting.items():
            place = self._delivered.get(number, 0)
            found.append(Assignment(record.shard, positions_of(record), place, place, number=number))
        return found

    def delivered_places(self) -> Places:
        """Return, by shard and partition, the position up to which all was delivered."""
        return self.places

    def unread_places(self) -> Places:
        """Return `delivered_places`: the stored group doesn't show which partitions have nothing unread."""
        return self.places

    # --- deciding ---

    def decided(self) -> list[StateWrite]:
        """Return the writes that reassign partitions and messages to members; none if no assignment changes.

        The owner of the subscription's shard must commit the writes together, to that shard.
        """
        if self.over:
            return self._removed()
        return _Decision(self, self._home).writes()

    def _removed(self) -> list[StateWrite]:
        keys = self.keys
        prefixes = (keys.members, keys.returned, keys.grants, keys.waiting)
        doomed = [key for prefix in prefixes for key, _ in self._home.scan(prefix)]
        group = [] if self._stored is None else [FrameworkWrite(keys.group, None, expect=self._stored)]
        return [*group, *(FrameworkWrite(key, None) for key in doomed), *self.acknowledged()]

    def changed(self, number: int) -> StateWrite:
        """Return the write of the group's record, which fails if another decision was committed since it was read.

        So a site that lost the shard and owns it again doesn't commit a decision based on outdated records.
        """
        places = pack_places(self.places, np.ones(self.places.shape, np.bool_))
        write = put(self.keys.group, GroupRecord(VERSION, places, number))
        return FrameworkWrite(write.key, write.value, expect=self._stored)

    def acknowledged(self) -> list[StateWrite]:
        """Return the writes that acknowledge hand-backs, and remove the acknowledgements of removed hand-backs."""
        keys, handed = self.keys, self._handed_back.keys()
        return [
            *(put(keys.taken_at(*one), (VERSION,)) for one in handed - self._taken),
            *(FrameworkWrite(keys.taken_at(*one), None) for one in self._taken - handed),
        ]

    def new_hand_backs(self) -> list[HandBackRecord]:
        """Return the hand-backs that the group has not taken over yet."""
        return [record for one, record in sorted(self._handed_back.items()) if one not in self._taken]


class _Decision:
    """One decision about a group that has members."""

    def __init__(self, group: StoredGroup, home: ShardState) -> None:
        self._group, self._home, self._keys = group, home, group.keys
        self._number = 0 if group.record is None else group.record.number
        self._writes: list[StateWrite] = []
        self._waiting: dict[int, ReturnedRecord] = {}
        attached = [member for member in group.members.values() if member.guard is not None]
        self._shares = {member.owner: self._share(member, group.grants.get(member.owner)) for member in attached}

    def _share(self, member: StoredMember, grant: GrantRecord | None) -> _Share:
        """Return the share of a connected member, which includes withdrawn partitions until the member has answered."""
        none = np.zeros(self._group.places.shape, np.bool_)
        standing = member.standing
        if grant is None or (grant.guard, grant.subscription) != (member.guard, standing.number):
            return _Share(member, None, none, none.copy())
        answered = standing.grant >= grant.number
        withdrawn = none if answered else packed_partitions(grant.withdrawn)
        left = set() if answered else set(grant.withdrawn_returned)
        return _Share(member, grant, packed_partitions(grant.places), withdrawn, set(grant.returned), left)

    def writes(self) -> list[StateWrite]:
        """Return the writes of the decision, or none if nothing changes."""
        begun = self._group.record is not None
        if not begun:
            self._begin()
        self._take_back()
        self._divide()
        self._assign()
        self._grant()
        acknowledged = self._group.acknowledged()
        if begun and not (self._writes or acknowledged):
            return []
        return [self._group.changed(self._number), *self._writes, *acknowledged]

    def _begin(self) -> None:
        """Begin a new group where the first of its members began; which one was first is unknown."""
        starts = np.array([member.standing.start for member in self._group.members.values()], np.uint64)
        if len(starts):
            self._group.places[:] = np.maximum(self._group.places, starts.min(axis=0)[:, None])

    # --- returned messages ---

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _add(self, shard: int, positions: Positions, refused: tuple[Attachment, ...]) -> None:
        number, record = self._next(), ReturnedRecord(VERSION, shard, *pack_positions(positions), refused)
        self._waiting[number] = record
        self._writes.append(put(self._keys.waiting_at(number), record))

    def _drop(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._writes.append(FrameworkWrite(self._keys.waiting_at(number), None))

    def _take_back(self) -> None:
        """Take over the hand-backs of members, and drop the returned messages that were delivered."""
        held = {number for share in self._shares.values() for number in share.returned | share.withdrawn_returned}
        self._waiting = dict(self._group.waiting)
        for one in self._group.assignments:
            left = one.behind(one.place)
            if not len(left) or (one.number not in held and len(left) < len(one.positions)):
                refused = self._waiting[one.number].refused
                self._drop(one.number)
                if len(left):
                    self._add(one.shard, left, refused)
        if self._group.record is not None:  # a new group ignores the hand-backs of an earlier one
            for handed in self._group.new_hand_backs():
                if len(handed.steps):
                    self._keep(handed.shard, positions_of(handed), handed.refused, held)
        self._take_old()

    def _take_old(self) -> None:
        """Number the messages that were returned before sites shared the database; forget its members that ended."""
        for key, value in self._home.scan(self._keys.returned):
            shard, positions = messages_of(key, decode(key, value, Returned))
            self._add(shard, positions, ())
            self._writes.append(FrameworkWrite(key, None))
        former = self._group.former
        for key, _ in self._home.scan(self._keys.members):
            owner = key[len(self._keys.members) :].decode()
            if owner in self._group.members or owner not in former:
                self._writes.append(FrameworkWrite(key, None))

    def _keep(self, shard: int, positions: Positions, refused: tuple[Attachment, ...], held: set[int]) -> None:
        """Add returned messages, merged with others that the same members have refused."""
        for number, record in list(self._waiting.items()) if refused else ():
            same = record.shard == shard and record.refused == refused and number not in held
            if same and len(record.steps) // record.width < _TOGETHER:
                positions = np.union1d(positions_of(record), positions)
                self._drop(number)
                break
        self._add(shard, positions, refused)

    # --- dividing ---

    def _quick(self) -> list[_Share]:
        return [share for share in self._shares.values() if not share.member.standing.slow]

    def _divide(self) -> None:
        """Divide the partitions equally among the members that aren't slow."""
        quick = self._quick()
        members = quick or list(self._shares.values())
        if not members:
            return
        total = dict.fromkeys(members, 0)
        for shard in range(len(self._group.places)):
            owners: list[_Share | None] = [None] * PARTITIONS
            held = np.zeros(PARTITIONS, np.bool_)
            for share in self._shares.values():
                for number in np.flatnonzero(share.mine[shard]).tolist():
                    owners[number] = share
                held |= share.withdrawn[shard]
            for number, share in moves(owners, members, total):
                before = owners[number]
                if before is not None and quick:
                    before.mine[shard, number] = False
                    before.withdrawn[shard, number] = True
                elif before is None and (share.withdrawn[shard, number] or not held[number]):
                    share.withdrawn[shard, number] = False
                    share.mine[shard, number] = True

    def _assign(self) -> None:
        """Assign the returned messages that no member has; take those of slow members, if there are others."""
        quick = self._quick()
        for share in self._shares.values() if quick else ():
            if share.member.standing.slow:
                records = ((number, self._waiting.get(number)) for number in share.returned)
                taken = {number for number, record in records if record is not None and self._may(quick, record)}
                share.withdrawn_returned |= taken
                share.returned -= taken
        held = {number for share in self._shares.values() for number in share.returned | share.withdrawn_returned}
        for number, record in sorted(self._waiting.items()):
            if number in held:
                continue
            may = self._may(quick, record) or self._may(self._shares.values(), record)
            if may:
                min(may, key=lambda share: len(share.returned)).returned.add(number)

    def _may(self, shares: Iterable[_Share], record: ReturnedRecord) -> list[_Share]:
        return [share for share in shares if share.member.attachment not in record.refused]

    def _grant(self) -> None:
        """Write the changed grants: of members that have none for this connection, or another one."""
        places = self._group.places
        for share in self._shares.values():
            share.returned &= self._waiting.keys()
            share.withdrawn_returned &= self._waiting.keys()
            if share.changed():
                grant = GrantRecord(
                    VERSION,
                    self._next(),
                    share.member.guard or 0,
                    share.member.standing.number,
                    pack_places(places, share.mine),
                    pack_places(places, share.withdrawn),
                    tuple(sorted(share.returned)),
                    tuple(sorted(share.withdrawn_returned)),
                )
                self._writes.append(put(self._keys.grant(share.member.owner), grant))
        for owner in self._group.grants:
            share_now = self._shares.get(owner)
            if share_now is None or (share_now.before is None and not share_now.changed()):
                self._writes.append(FrameworkWrite(self._keys.grant(owner), None))
