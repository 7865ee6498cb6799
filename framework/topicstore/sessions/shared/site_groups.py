"""`SiteGroups`: all shared subscriptions of a database that sites share; see `topicstore.sessions.shared.stored_group`.

At each tick a site assigns the groups whose shards it owns, lets its own members follow their latest grants, and
removes its members' hand-backs that the groups have taken over. It reads the records of groups in shards that it
doesn't keep from other sites (`topicstore.storage.followed_state`).
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from topicstore.contract.errors import ShardElsewhereError, ShardMovedError, StateConflictError
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.runtime.closing import do_all, raise_all
from topicstore.sessions.cursors import SessionCursor
from topicstore.sessions.dispatcher import FilterListeners
from topicstore.sessions.model import GroupInfo, GroupMember, SubscribeOptions, is_shared, parse_shared
from topicstore.sessions.records import (
    LEASES,
    NAME,
    SESSION,
    VERSION,
    Keys,
    SessionRecord,
    SubscriptionRecord,
    decode,
    owner_of,
    pack_positions,
    put,
)
from topicstore.sessions.session_store import SessionState, StoredSession, encode_session
from topicstore.shard.elsewhere import Selection
from topicstore.shard.state import Applied, FrameworkWrite, ShardState
from topicstore.storage.followed_state import FollowedState
from topicstore.storage.storage import Storage

from .branch import Branch, BranchCursor
from .cursor import SharedCursor
from .reader import packed_partitions
from .records import (
    GRANT,
    GROUP,
    HANDED_BACK,
    MEMBER,
    RETURNED,
    REVOKED,
    STANDING,
    TAKEN,
    WAITING,
    GroupKeys,
    HandBackRecord,
    LeaseRecord,
    Returned,
    StandingRecord,
    group_of,
    messages_of,
)
from .stored_group import StoredGroup

__all__ = ["SiteGroups"]

_SAVE_INTERVAL = 15_000_000
"""Microseconds after which places that moved without deliveries are committed."""
_MICROSECONDS = 1_000_000
_DECISIONS = 100
"""The most groups that a tick assigns, each of which takes a few milliseconds; others wait for the next tick."""
_BUSY = 3_000_000
"""Microseconds after a change during which sites may be waiting for each other's acknowledgements."""
_SELECTION = Selection(
    heads=(GROUP, MEMBER, RETURNED, REVOKED, GRANT, WAITING, TAKEN, HANDED_BACK),
    owners=STANDING,
    owned=(SESSION, NAME),
    parts=(LEASES,),
)
"""The values of each shard's state that decisions about groups and their members go by."""
_Seen = tuple[Applied | None, ...]


class SiteGroups:
    """The shared subscriptions of a database that sites share. Used under the sessions' mutex.

    catch_up: waits until pairs of shard and position can be read here.
    refresh:  waits until this site has read all logs to their ends. Raises `StorageUnavailableError`.

    Methods raise `ShardElsewhereError` if a needed record is kept only on other sites, none of which has answered yet.
    """

    def __init__(
        self,
        storage: Storage,
        states: SessionState,
        listeners: FilterListeners,
        filters: DurableFilters,
        catch_up: Callable[[Iterable[tuple[int, int]]], None],
        refresh: Callable[[], None],
    ) -> None:
        self.slow_after = 5.0
        """Seconds for which a member's window may be full before its partitions go to other members."""
        self.handover_after: float | None = 60.0
        """Seconds after a disconnect before other members get a member's messages in flight at QoS 1; None: never."""
        self.taken_back = 0
        """The number of times that messages in flight were taken back from a session; counted before the commit."""
        self._states = states
        self._followed_states = [FollowedState(shard, _SELECTION) for shard in storage.shards if storage.site]
        self._records = [one.state for one in self._followed_states] or states.states
        """By shard, the records of groups, their members, and these members' sessions, wherever the shard is kept."""
        storage.follow_states(self._followed_states)
        self._listeners = listeners
        self._filters = filters
        self._catch_up = catch_up
        self._refresh = refresh
        self._branches: dict[str, Branch] = {}
        """The groups with members that are connected to this site."""
        self._epochs: tuple[int | None, ...] = ()
        """By shard, the fencing token under which this site owned it at the last assignment; None for others."""
        self._assigned: _Seen = ()
        """The last changes that the last assignment has seen."""
        self._decided: dict[str, tuple[bytes | None, ...]] = {}
        """By subscription, the inputs of its last assignment, if that changed nothing."""
        self._turn = ""
        """The last subscription that was assigned, after which the next tick begins if there are too many for one."""
        self._granted: _Seen | None = None
        """The last grants that the members have seen; None: a member has joined since."""
        self._followed: tuple[_Seen, tuple[int | None, ...]] | None = None
        """The last changes for which `_look_after_absent` has looked at members and the hand-backs, and the epochs."""
        self._away: dict[tuple[str, str], tuple[int, int]] = {}
        """By subscription and client, as in keys, of the disconnected members whose sessions lie here: the guard of
        the session, and the time since which the member is known to be disconnected."""
        self._revoked: set[tuple[str, str, int]] = set()
        """The disconnected members, with their guards, whose messages in flight were taken back."""
        self._save_due: int | None = None
        self._exchanged: _Seen = ()
        """The last changes of the records by which sites work together."""
        self.busy_until = 0
        """The time until which sites may be waiting for each other."""

    # --- finding ---

    def find(self, text: str) -> StoredGroup | None:
        """Return the group of ``$share/<name>/<filter>`` as this site has it; None if it has no members."""
        found = StoredGroup(self._records, self._home(text), text)
        return None if found.over else found

    def _home(self, text: str) -> ShardState:
        return self._records[self._states.shard_of(text)]

    def _knows(self, text: str) -> bool:
        """Return whether the records of the shard of a group can be read."""
        return not self._followed_states or self._followed_states[self._states.shard_of(text)].known

    def _owned(self) -> list[ShardState]:
        return [state for state in self._records if self._states.owned(state.shard)]

    def _seen(self, heads: Iterable[bytes]) -> _Seen:
        return tuple(
            None if state.last_applied is None else state.last_applied(head)
            for head in heads
            for state in self._records
        )

    def _inputs(self) -> dict[str, tuple[bytes | None, ...]]:
        """Return, by subscription, the keys and values on which its assignment depends, in any shard."""
        found: defaultdict[str, list[bytes | None]] = defaultdict(list)
        for state in self._records:
            for key, value, session in self._members(state):
                found[group_of(key)] += (key, value, session)
            for head in (GROUP, MEMBER, HANDED_BACK, TAKEN):
                for key, _ in state.scan(head):
                    found[group_of(key)].append(key)
        return {text: tuple(some) for text, some in found.items()}

    @staticmethod
    def _members(state: ShardState) -> list[tuple[bytes, bytes, bytes | None]]:
        """Return the keys and values of the members whose sessions are in a shard, with the records of these."""
        members = [*state.scan(STANDING)]
        sessions = state.get_many([SESSION + _owner(key).encode() for key, _ in members]) if members else []
        return [(key, value, session) for (key, value), session in zip(members, sessions, strict=True)]

    # --- members ---

    def join(
        self,
        keys: Keys,
        number: int,
        text: str,
        options: SubscribeOptions,
        start: list[int],
        ready: Callable[[SessionCursor], None],
        guard: int,
    ) -> SharedCursor:
        """Make the session of these keys a member, after `GroupReader.attach` and once its subscription is stored.

        guard: the guard of the session, by which the group's owner distinguishes its connections.
        ready: called with the member when it may have messages to read after it had none.
        start: by shard, the position after which a new group begins.
        """
        branch = self._branches.get(text)
        if branch is None:
            branch = Branch(parse_shared(text), self._listeners, self._filters, self._records)
        state = self._states.states[self._states.shard_of(keys.client_id)]
        key, lease = branch.keys.standing(owner_of(keys.client_id).decode()), keys.leases(number)
        stored, places = state.get_many([key, lease])
        standing = None if stored is None else decode(key, stored, StandingRecord)
        if standing is not None and standing.number != number:
            standing = None
        packed = () if places is None else decode(lease, places, LeaseRecord).places
        self._branches[text] = branch
        self._granted = None
        return BranchCursor(branch, keys, number, options, ready, guard, standing, start, packed)

    def left(self, cursor: SharedCursor) -> list[StateWrite]:
        """Return the writes that belong to the end of a member's subscription."""
        return cursor.ending() if isinstance(cursor, BranchCursor) else []

    def leave(self, cursor: SharedCursor) -> None:
        """Remove a member, after the end of its subscription was stored."""
        cursor.group.detach(cursor)

    def ending(self, found: StoredSession, records: Iterable[SubscriptionRecord]) -> StoredSession | None:
        """Hand back to the groups the messages of a session that is about to be removed; return the changed session.

        Returns None if the session has changed since it was read. Raises the errors of reading and writing; may be
        called again after an error.
        """
        client_id = found.client_id
        writes = [
            write
            for number, record in self._states.subscriptions(client_id)
            if is_shared(record.topic_filter)
            for write in self._end(client_id, number, record.topic_filter)
        ]
        for one in self._states.revocable(client_id):
            writes += [_hand_back(one.text, one.shard, one.positions), one.removal]
        if not writes:
            return found
        ending = encode_session(client_id, msgspec.structs.replace(found.record, ending=True))
        mark = put(Keys(client_id).live, (VERSION,))  # makes recovery after a crash remove the session
        self.taken_back += 1
        try:
            guard = msgspec.structs.replace(ending.guard, expect=found.stored)
            self._states.write_for(client_id, [guard, mark, *writes])
        except StateConflictError:
            return None
        return ending

    def _end(self, client_id: str, number: int, text: str) -> list[StateWrite]:
        """Return the writes that end a membership in the group of ``text``; none if it has ended."""
        keys, state = GroupKeys(text), self._states.states[self._states.shard_of(client_id)]
        key, lease = keys.standing(owner_of(client_id).decode()), Keys(client_id).leases(number)
        stored, places = state.get_many([key, lease])
        if stored is None and self._home(text).get(keys.member(client_id)) is None:
            return []
        returned = () if stored is None else decode(key, stored, StandingRecord).returned
        packed = () if places is None else decode(lease, places, LeaseRecord).places
        left = put(keys.hand_back(), HandBackRecord(VERSION, packed, returned))
        return [FrameworkWrite(key, None), FrameworkWrite(lease, None), left]

    def ended(self, client_id: str, records: Iterable[SubscriptionRecord]) -> None:
        """Do nothing: `ending` has ended the memberships of the session."""

    # --- time ---

    def tick(self, now: int, stuck_since: Callable[[str], int | None]) -> None:
        """Assign the groups whose shards this site owns, and let its members follow their grants; see `uncommitted`.

        stuck_since: returns, for a client id, the time since which a connected session's window has been full, or None.
        """
        exchanged = self._seen((STANDING, HANDED_BACK, GRANT, TAKEN))
        if exchanged != self._exchanged:
            self._exchanged, self.busy_until = exchanged, now + _BUSY
        steps = (
            self._assign,
            self._follow,
            partial(self._look_after_absent, now),
            partial(self._hand_over, now),
            partial(self._look_after_slow, now, stuck_since),
        )
        do_all(steps, "failed")

    def _assign(self) -> None:
        """Assign the groups of the shards that this site owns, if something has changed on which that depends.

        A group that can't be read doesn't hold up the others. A site that doesn't know all members assigns nothing.
        """
        epochs = tuple(self._states.epoch(shard) for shard in range(len(self._states.states)))
        if not all(one.known for one in self._followed_states):
            self._epochs = ()
            return
        if epochs != self._epochs:
            self._refresh()  # earlier owners may have decided by records that aren't applied here yet
            self._assigned, self._decided, self._epochs = (), {}, epochs
        seen = self._seen((STANDING, HANDED_BACK, SESSION, GROUP, MEMBER, TAKEN))
        if seen == self._assigned:
            return
        inputs = {text: some for text, some in self._inputs().items() if epochs[self._home(text).shard] is not None}
        decided = {text: some for text, some in inputs.items() if self._decided.get(text) == some}
        stale = sorted(inputs.keys() - decided)
        first = bisect(stale, self._turn)
        turns = (stale[first:] + stale[:first])[:_DECISIONS]
        self._turn = turns[-1] if turns else ""
        if any(self._home(text).get(GroupKeys(text).group) is None for text in turns):
            self._refresh()  # a new group begins with the member that joined first, on any site
        writes: defaultdict[int, list[StateWrite]] = defaultdict(list)

        def decide(text: str) -> None:
            found = self._decide(text)
            writes[self._home(text).shard] += found
            if not found:
                decided[text] = inputs[text]

        try:
            decisions = [partial(decide, text) for text in turns]
            do_all((*decisions, partial(self._write, writes)), "could not be assigned")
        finally:
            self._decided = decided
        if len(stale) <= _DECISIONS:
            self._assigned = seen

    def _decide(self, text: str) -> list[StateWrite]:
        home = self._home(text)
        if not self._states.whole and any(True for _ in home.scan(GroupKeys(text).members)):
            return []  # members from before the cluster, whose sessions aren't in `_SELECTION`
        group = StoredGroup(self._records, home, text)
        if group.over and group.record is not None:
            self._refresh()  # a member may have joined at another site before the last one left
            group = StoredGroup(self._records, home, text)
        return group.decided()

    def _write(self, writes: Mapping[int, Sequence[StateWrite]]) -> None:
        """Commit writes by shard. Writes to shards that have moved are left to the new owner."""
        failures = self._states.commit({shard: some for shard, some in writes.items() if some}).values()
        if any(isinstance(one, StateConflictError) for one in failures):
            self._epochs = ()  # another site has owned a shard meanwhile, and has made a later decision
        moved = (ShardElsewhereError, ShardMovedError, StateConflictError)
        raise_all([one for one in failures if not isinstance(one, moved)], "failed")

    def _follow(self) -> None:
        """Let the members of this site follow their grants."""
        granted = self._seen((GRANT,))
        if granted == self._granted:
            return
        for text in [text for text, branch in self._branches.items() if not branch.connected]:
            del self._branches[text]
        do_all(
            [partial(one.followed, self._catch_up) for text, one in self._branches.items() if self._knows(text)],
            "could not follow what was granted",
        )
        self._granted = granted

    def _look_after_absent(self, now: int) -> None:
        """Find the disconnected members of this site, and remove hand-backs that the groups have taken over."""
        seen = self._seen((STANDING, HANDED_BACK, SESSION, TAKEN, REVOKED)), self._epochs
        if seen == self._followed:
            return
        away: dict[tuple[str, str], tuple[int, int]] = {}
        for state in self._owned():
            self._clear(state)
            for key, _, stored in self._members(state):
                owner, text = _owner(key), group_of(key)
                record = None if stored is None else decode(SESSION + owner.encode(), stored, SessionRecord)
                if record is not None and not record.connected:
                    guard, since = self._away.get((text, owner), (record.guard, now))
                    away[text, owner] = record.guard, since if guard == record.guard else now
        self._away = away
        self._revoked &= {(*one, guard) for one, (guard, _) in away.items()}
        self._followed = seen

    def _clear(self, state: ShardState) -> None:
        """Remove the hand-backs of an owned shard that the groups have taken over."""
        writes: list[StateWrite] = []
        for key, _ in state.scan(HANDED_BACK):
            text = group_of(key)
            if self._knows(text) and self._home(text).get(GroupKeys(text).taken_at(state.shard, key[-8:])) is not None:
                writes.append(FrameworkWrite(key, None))
        for key, value in state.scan(REVOKED):  # written before the database was shared, or by an earlier release
            text = group_of(key)
            shard, positions = messages_of(key, decode(key, value, Returned))
            writes += [FrameworkWrite(key, None), _hand_back(text, shard, positions)]
        if writes:
            self._states.write(state.shard, writes)

    def _hand_over(self, now: int) -> None:
        """Leave the messages in flight at QoS 1 of members that stay disconnected to other members, if any."""
        if self.handover_after is None:
            return
        for (text, owner), (guard, since) in self._away.items():
            due = now - since >= self.handover_after * _MICROSECONDS and (text, owner, guard) not in self._revoked
            if due and self._knows(text) and any(True for _ in self._home(text).scan(GroupKeys(text).grants)):
                client_id = self._states.client_of(owner)
                found = self._states.find(client_id)
                if found is not None and not found.record.connected and found.record.guard == guard:
                    taken = [one for one in self._states.revocable(client_id) if one.text == text]
                    if taken:
                        backs = [_hand_back(text, one.shard, one.positions) for one in taken]
                        self.taken_back += 1
                        self._states.write_for(client_id, [found.guard, *backs, *(one.removal for one in taken)])
                self._revoked.add((text, owner, guard))

    def _look_after_slow(self, now: int, stuck_since: Callable[[str], int | None]) -> None:
        """Note which members are slow, and have places that moved without deliveries committed from time to time."""
        save = self._save_due is not None and self._save_due <= now
        if self._save_due is None or save:
            self._save_due = now + _SAVE_INTERVAL
        for branch in self._branches.values():
            for member in branch.cursors:
                stuck = stuck_since(member.client_id)
                slow = stuck is not None and now - stuck >= self.slow_after * _MICROSECONDS
                if slow != member.slow or (save and branch.ahead and member.mine.any()):
                    member.slow = slow
                    member.answer()
            branch.ahead = branch.ahead and not save

    def uncommitted(self) -> Collection[str]:
        """Return the client ids of members whose acknowledgement of a grant their session has yet to commit."""
        return {member.client_id for branch in self._branches.values() for member in branch.cursors if member.answers}

    # --- inspecting ---

    def infos(self) -> list[GroupInfo]:
        """Return the descriptions of all groups, sorted by filter, as this site has them."""
        found = [self.find(text) for text in sorted(self._inputs())]
        return [self._info(group) for group in found if group is not None]

    def _info(self, group: StoredGroup) -> GroupInfo:
        members = []
        for owner, member in group.members.items():
            grant = group.grants.get(owner)
            slices: Sequence[int] = ()
            if member.guard is not None:
                granted = grant is not None and (grant.guard, grant.subscription) == (
                    member.guard,
                    member.standing.number,
                )
                mine = packed_partitions(grant.places) if grant is not None and granted else None
                slices = [0] * len(self._states.states) if mine is None else mine.sum(axis=1).tolist()
            members.append(
                GroupMember(
                    client_id=self._states.client_of(owner, self._records),
                    connected=member.guard is not None,
                    slow=member.guard is not None and member.standing.slow,
                    slices=tuple(slices),
                )
            )
        members += [
            GroupMember(client_id=self._states.client_of(owner, self._records), connected=False, slow=False, slices=())
            for owner in group.former
            if owner not in group.members
        ]
        return GroupInfo(
            name=group.filter.name,
            topic_filter=group.filter.topic_filter.text,
            members=tuple(sorted(members, key=lambda member: member.client_id)),
            returned=sum(len(one.behind(one.place)) for one in group.assignments),
            dropped=group.dropped,
        )


def _owner(key: bytes) -> str:
    """Return the client, as in keys, of a member's `StandingRecord`."""
    return key[len(STANDING) :].partition(b"\0")[2].decode()


def _hand_back(text: str, shard: int, positions: Positions) -> StateWrite:
    packed = pack_positions(positions)
    record = HandBackRecord(VERSION, shard=shard, first=packed.first, steps=packed.steps, width=packed.width)
    return put(GroupKeys(text).hand_back(), record)
