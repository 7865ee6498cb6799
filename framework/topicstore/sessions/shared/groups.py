"""`Groups`: all shared subscriptions of one database; `SharedSubscriptions`: the public interface to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from topicstore.contract.arguments import Length, check_length, seconds
from topicstore.contract.errors import StateConflictError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.sessions.cursors import SessionCursor
from topicstore.sessions.dispatcher import FilterListeners
from topicstore.sessions.locks import Around
from topicstore.sessions.model import GroupInfo, GroupMember, SubscribeOptions, is_shared, parse_shared, reached
from topicstore.sessions.records import VERSION, Keys, SubscriptionRecord, decode, put
from topicstore.sessions.session_store import Revocable, SessionState, StoredSession, encode_session
from topicstore.shard.state import FrameworkWrite, ShardState

from .cursor import SharedCursor
from .group import Group
from .reader import Member, Membership, raise_places
from .records import GROUP, GroupKeys, GroupRecord, LeaseRecord, MemberRecord, group_of, returned

if TYPE_CHECKING:
    from .site_groups import SiteGroups

__all__ = ["Groups", "SharedSubscriptions"]

_SAVE_INTERVAL = 15_000_000
"""Microseconds after which places that moved without deliveries are saved."""


class Groups:
    """The groups (shared subscriptions) of one open database, loaded on demand. Used under the sessions' mutex."""

    busy_until = 0
    """Always 0: no other site is waited for."""

    def __init__(self, states: SessionState, listeners: FilterListeners, filters: DurableFilters) -> None:
        self.slow_after = 5.0
        """Seconds for which a member's window may be full before its partitions go to other members."""
        self.handover_after: float | None = 60.0
        """Seconds after a disconnect before other members get a member's messages in flight at QoS 1; None: never."""
        self.taken_back = 0
        """The number of times that messages in flight were taken back from a session; counted before the commit."""
        self._states = states
        self._listeners = listeners
        self._filters = filters
        self._loaded: dict[str, Group] = {}
        self._stale: dict[Group, None] = {}
        """The groups whose update failed."""
        self._save_due: int | None = None

    # --- finding ---

    def find(self, text: str) -> Group | None:
        """Return the group of ``$share/<name>/<filter>``, or None if no session has that subscription."""
        group = self._loaded.get(text)
        if group is None:
            group = self._load(text)
            if group is not None:
                self._loaded[text] = group
        return group

    def _new(self, text: str) -> Group:
        return Group(parse_shared(text), self._listeners, self._filters, self._states.states, self._changed)

    def _load(self, text: str) -> Group | None:
        keys = GroupKeys(text)
        home = self._states.states[self._states.shard_of(text)]
        stored = home.get(keys.group)
        if stored is None:
            return None
        group = self._new(text)
        raise_places(group.places, decode(keys.group, stored, GroupRecord).places)
        taken: dict[tuple[int, int], int] = {}
        for key, value in home.scan(keys.members):
            client_id = self._states.client_of(key[len(keys.members) :].decode())
            number = decode(key, value, MemberRecord).number
            if self._is_member(client_id, number, text):
                group.members[client_id] = Membership(number, self._listeners.steady())
                self._load_lease(group, client_id, number, taken)
            else:
                group.dismiss(client_id)
        ends = np.array(self._listeners.hub.last_positions(), np.uint64)
        reached(group.places.max(axis=1).tolist(), ends.tolist())
        group.places[:] = group.committed[:] = np.minimum(group.places, ends[:, None])
        if not group.members:
            group.remove()
            return None
        group.load_returned(taken)
        group.take_back()
        if group.unsaved:
            group.save()
        return group

    def _is_member(self, client_id: str, number: int, text: str) -> bool:
        """Return whether the session has the subscription stored; a crash may have occurred before that."""
        found = self._states.find(client_id)
        key = self._states.keys_of(client_id).subscription(number)
        stored = self._state_of(client_id).get(key)
        if found is None or found.record.ending or stored is None:
            return False
        return decode(key, stored, SubscriptionRecord).topic_filter == text

    def _load_lease(self, group: Group, client_id: str, number: int, taken: dict[tuple[int, int], int]) -> None:
        key = self._states.keys_of(client_id).leases(number)
        stored = self._state_of(client_id).get(key)
        if stored is not None:
            lease = decode(key, stored, LeaseRecord)
            raise_places(group.places, lease.places)
            for shard, first, place in lease.returned:
                taken[shard, first] = max(place, taken.get((shard, first), 0))

    def _state_of(self, client_id: str) -> ShardState:
        return self._states.states[self._states.shard_of(client_id)]

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
        """Make the session of these keys a member, and create the group if there is none.

        The member gets messages after `GroupReader.attach`.

        guard: the guard of the session; see `SiteGroups.join`.
        ready: called with the member when it may have messages to read after it had none.
        start: by shard, the position after which a new group begins.
        """
        group = self.find(text)
        if group is None or not group.members:
            if group is not None:
                group.remove()  # an earlier removal has failed
                self._stale.pop(group, None)
            group = self._new(text)
            for shard, place in enumerate(start):
                group.places[shard] = group.committed[shard] = place
        group.enlist(keys.client_id, number)
        self._loaded[text] = group
        return SharedCursor(group, keys, number, options, ready)

    def left(self, cursor: SharedCursor) -> list[StateWrite]:
        """Take over the places of a member whose subscription is about to end. Returns no further writes."""
        cast("Group", cursor.group).save()
        return []

    def leave(self, cursor: SharedCursor) -> None:
        """Remove a session from its group, after the end of its subscription was stored."""
        self._dismiss(cast("Group", cursor.group), cursor.client_id)

    def _dismiss(self, group: Group, client_id: str) -> None:
        group.dismiss(client_id)
        self._changed(group)

    def _changed(self, group: Group) -> None:
        """Update a group; after an error, the next tick tries again."""
        self._stale.pop(group, None)
        try:
            if group.members:
                group.update()
            else:
                group.remove()
                self._loaded.pop(group.filter.text, None)
        except TopicstoreError:
            self._stale[group] = None
        if any(member.delivering for member in group.connected):
            self._stale[group] = None

    # --- sessions that end, or stay disconnected ---

    def ending(self, found: StoredSession, records: Iterable[SubscriptionRecord]) -> StoredSession | None:
        """Take back messages for groups from a session that is about to be removed; return the changed session.

        Returns None if the session has changed since it was read. Raises the errors of reading and writing; may be
        called again after an error.
        """
        client_id = found.client_id
        taken = self._states.revocable(client_id)
        shared = {record.topic_filter for record in records if is_shared(record.topic_filter)}
        shared |= {one.text for one in taken}
        groups = {text: group for text in shared if (group := self.find(text)) is not None}
        for group in groups.values():
            group.save()  # stores the places, because the session's records of them will be removed
        writes = [write for one in taken if one.text in groups for write in _moved(one)]
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
        for group in groups.values():
            group.revoked = True
            self._changed(group)
        return ending

    def ended(self, client_id: str, records: Iterable[SubscriptionRecord]) -> None:
        """Remove a session that had these subscriptions from its groups."""
        for record in records:
            group = self.find(record.topic_filter) if is_shared(record.topic_filter) else None
            if group is not None:
                self._dismiss(group, client_id)

    def _revoke(self, group: Group, client_id: str) -> None:
        """Take back the messages in flight at QoS 1 of a member that stays disconnected."""
        found, member = self._states.find(client_id), group.members[client_id]
        taken = self._states.revocable(client_id)
        writes = [write for one in taken if one.text == group.filter.text for write in _moved(one)]
        if found is not None and writes:
            group.save()  # stores the places: the member's own record of them would become outdated, and is removed
            places = FrameworkWrite(Keys(client_id).leases(member.number), None)
            self.taken_back += 1
            self._states.write_for(client_id, [found.guard, places, *writes])
            group.revoked = True
        member.revoked = True
        self._changed(group)

    # --- time ---

    def tick(self, now: int, stuck_since: Callable[[str], int | None]) -> None:
        """Handle slow members and members that stay disconnected, retry failed updates, and save places.

        stuck_since: returns, for a client id, the time since which a connected session's window has been full, or None.
        """
        for group in list(self._loaded.values()):
            group.look_after_slow(now, self.slow_after, stuck_since)
            if group.connected and self.handover_after is not None:
                self._revoke_all(group, group.away(now, self.handover_after))
        for group in list(self._stale):
            self._changed(group)
        self._save_in_time(now)

    def uncommitted(self) -> Collection[str]:
        """Return no clients: without a cluster, members acknowledge no grants."""
        return ()

    def _revoke_all(self, group: Group, clients: Iterable[str]) -> None:
        for client_id in clients:
            try:
                self._revoke(group, client_id)
            except TopicstoreError:
                return  # the next tick tries again

    def _save_in_time(self, now: int) -> None:
        ahead = [group for group in self._loaded.values() if group.ahead]
        if not ahead:
            self._save_due = None
        elif self._save_due is None:
            self._save_due = now + _SAVE_INTERVAL
        elif self._save_due <= now:
            self._save_due = None
            for group in ahead:
                group.unsaved = True
                self._changed(group)

    # --- inspecting ---

    def infos(self) -> list[GroupInfo]:
        """Return the descriptions of all groups, sorted by filter."""
        texts = [group_of(key) for state in self._states.states for key, _ in state.scan(GROUP)]
        groups = [self.find(text) for text in sorted(texts)]
        return [self._info(group) for group in groups if group is not None]

    def _info(self, group: Group) -> GroupInfo:
        connected = {member.client_id: member for member in group.connected}
        return GroupInfo(
            name=group.filter.name,
            topic_filter=group.filter.topic_filter.text,
            members=tuple(_member_info(client_id, connected.get(client_id)) for client_id in sorted(group.members)),
            returned=sum(len(assignment.behind(assignment.committed)) for assignment in group.assignments),
            dropped=group.dropped,
        )


def _member_info(client_id: str, member: Member | None) -> GroupMember:
    if member is None:
        return GroupMember(client_id=client_id, connected=False, slow=False, slices=())
    return GroupMember(
        client_id=client_id, connected=True, slow=member.slow, slices=tuple(member.mine.sum(axis=1).tolist())
    )


def _moved(one: Revocable) -> list[StateWrite]:
    key = GroupKeys(one.text).revoked_at(one.shard, int(one.positions[0]))
    return [put(key, returned(one.positions)), one.removal]


class SharedSubscriptions:
    """The shared subscriptions of one open database: the attribute `Sessions.groups`. Iterated in order of filters.

    All methods are thread-safe.
    """

    def __init__(self, groups: Groups | SiteGroups, entered: Around) -> None:
        self._groups = groups
        self._entered = entered
        """Calls a function under the sessions' mutex; raises if the database is closed."""

    def __iter__(self) -> Iterator[GroupInfo]:
        """Iterate over a snapshot of all shared subscriptions, with their members, connected or not."""
        return iter(self._entered(self._groups.infos))

    def __len__(self) -> int:
        """Return the number of shared subscriptions."""
        return len(self._entered(self._groups.infos))

    def __contains__(self, topic_filter: str) -> bool:
        """Return whether any session has this subscription, ``$share/<name>/<filter>``."""
        return self._entered(lambda: self._groups.find(topic_filter)) is not None

    def __repr__(self) -> str:
        return f"<SharedSubscriptions: slow after {self.slow_after} s, handed over after {self.handover_after} s>"

    @property
    def slow_after(self) -> float:
        """Seconds for which a member's window may be full before its share goes to other members; may be set."""
        return self._groups.slow_after

    @slow_after.setter
    def slow_after(self, length: Length) -> None:
        self._groups.slow_after = check_length("slow_after", length)

    @property
    def handover_after(self) -> float | None:
        """Seconds after a disconnect before other members get a member's messages in flight at QoS 1; None: never.

        May be set.
        """
        return self._groups.handover_after

    @handover_after.setter
    def handover_after(self, length: Length | None) -> None:
        self._groups.handover_after = None if seconds(length) is None else check_length("handover_after", length)
