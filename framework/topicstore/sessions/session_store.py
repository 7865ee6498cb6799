"""`SessionState`: sessions as they are stored, and the writes that change them.

Opening a session, ending its connection and ending the session each replace its `SessionRecord` by compare-and-set.
The record's timers, and the key that marks a session as open, change in the same engine write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import attrs
import msgspec

from topicstore.contract.arguments import check_count
from topicstore.contract.checksums import add_checksum
from topicstore.contract.errors import QuotaExceededError, StateConflictError, TopicstoreError
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite, ShardState
from topicstore.storage.keyed_messages import state_key
from topicstore.storage.storage import Storage
from topicstore.storage.store_path import commit_state

from .in_flight import InFlight
from .locks import Around
from .model import SessionInfo, is_shared
from .records import (
    EXPIRY,
    LIVE,
    NAME,
    NAMED,
    NEVER,
    SESSION,
    SUBSCRIPTION,
    TIMER,
    VERSION,
    WILL,
    Keys,
    SessionRecord,
    SubscriptionRecord,
    Timer,
    decode,
    owner_in,
    put,
    timer_key,
    timer_of,
)

__all__ = ["Revocable", "SessionState", "StoredBounds", "StoredCounts", "StoredSession", "encode_session", "will_key"]

_CHUNK = 1_000
"""Number of keys removed in one write."""
_FEW = 16
"""Most subscriptions of a session that are looked up one by one: a scan takes as long as some look-ups."""
_SHARED = b"$share/"
"""Bytes that occur in every stored in-flight batch of a shared subscription, and possibly in others."""


Followed = tuple[SubscriptionRecord, list[int] | None, str | None]
"""A stored subscription, its place if it has one, and the last topic whose retained message was sent, if some are
left to send."""


@attrs.frozen
class StoredSession:
    """A session as it was read: its record, and the stored bytes that later writes compare (compare-and-set)."""

    client_id: str
    stored: bytes
    record: SessionRecord

    @property
    def guard(self) -> StateWrite:
        """Return a write that changes nothing, and fails if the session has changed since it was read."""
        key = Keys(self.client_id).session
        return FrameworkWrite(key, self.stored, expect=self.stored)


class Revocable(NamedTuple):
    """Messages that a session has in flight, and that other members of a shared subscription may get instead."""

    text: str
    """The shared subscription."""
    shard: int
    positions: Positions
    removal: StateWrite
    """The write that removes these messages from those that the session has in flight."""


def encode_session(client_id: str, record: SessionRecord) -> StoredSession:
    """Return a session with its record in stored form."""
    keys = Keys(client_id)
    if keys.name is not None:
        record = msgspec.structs.replace(record, version=NAMED)
    return StoredSession(client_id, add_checksum(keys.session, msgspec.msgpack.encode(record)), record)


def _check(_instance: StoredBounds, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None:
        check_count(attribute.name, value)


@attrs.define
class StoredBounds:
    """The largest numbers of stored sessions. May be set at any time, in any thread; not stored.

    Opening a new session above a limit raises `QuotaExceededError`; stored sessions can still be opened. Sessions that
    are kept in memory don't count. Raises `InvalidArgumentError` for a value other than None or a positive integer.
    """

    in_all: int | None = attrs.field(default=None, validator=_check)
    """The limit for all clients together; None: no limit."""
    each_user: int | None = attrs.field(default=None, validator=_check)
    """The limit for each ``user`` of `Sessions.open`; sessions without a user count together. None: no limit."""


class StoredCounts:
    """Counts the stored sessions of one open database. Used under the sessions' mutex.

    users: yields the user of each stored session. Called when a limit is first checked.
    """

    def __init__(self, users: Callable[[], Iterable[str]]) -> None:
        self.bounds = StoredBounds()
        self._users = users
        self._counts: Counter[str] | None = None
        """The number of sessions by user; None before the first count."""
        self._total = 0

    def check(self, user: str) -> None:
        """Raise `QuotaExceededError` if one more session can't be stored."""
        bounds = self.bounds
        if bounds.in_all is None and bounds.each_user is None:
            return
        if self._counts is None:
            counts = Counter(self._users())
            self._counts, self._total = counts, counts.total()
        if bounds.in_all is not None and self._total >= bounds.in_all:
            raise QuotaExceededError(f"{self._total:,} sessions are stored, and {bounds.in_all:,} may be")
        if bounds.each_user is not None and self._counts[user] >= bounds.each_user:
            whose = f"user {user!r}" if user else "clients without a user"
            raise QuotaExceededError(f"{self._counts[user]:,} sessions of {whose} are stored, of {bounds.each_user:,}")

    def forget(self) -> None:
        """Count again at the next check, because other sites of a cluster have stored or ended sessions."""
        self._counts = None

    def add(self, user: str, change: int) -> None:
        """Add ``change``, 1 or -1, to the number of a user's sessions."""
        if self._counts is not None:
            self._counts[user] += change
            self._total += change


class SessionState:
    """The stored sessions of one open database. Methods raise the errors of reading and writing state.

    released: calls a function without the sessions' mutex; used for engine writes.
    """

    def __init__(self, storage: Storage, states: Sequence[ShardState], released: Around) -> None:
        self._shards = storage.shards
        self._released = released
        self.states = states
        """The states of all shards, by shard number."""
        self.shard_of = storage.shard_map.of
        self.counts = StoredCounts(self._users)
        self.old: frozenset[str] = frozenset()
        """The client ids whose sessions were stored by releases without digests in keys. Set once, when opening."""

    def epoch(self, shard: int) -> int | None:
        """Return the fencing token under which this process owns a shard; None while another site owns it."""
        return self._shards[shard].writer.epoch

    def owned(self, shard: int) -> bool:
        """Return whether this process owns a shard."""
        return self.epoch(shard) is not None

    @property
    def whole(self) -> bool:
        """Whether this process keeps all shards; a site of a cluster may keep only some of them."""
        return not any(shard.writer.elsewhere for shard in self._shards)

    # --- reading ---

    def find(self, client_id: str) -> StoredSession | None:
        """Return the session of a client, or None."""
        return self.find_all([client_id])[0]

    def find_all(self, client_ids: Sequence[str]) -> list[StoredSession | None]:
        """Return the session of each client, or None."""
        return [
            None
            if stored is None
            else StoredSession(client_id, stored, decode(self.keys_of(client_id).session, stored, SessionRecord))
            for client_id, stored in zip(client_ids, self._stored(client_ids), strict=True)
        ]

    def _stored(self, client_ids: Sequence[str]) -> list[bytes | None]:
        """Return the stored record of each client's session, with one read for each shard."""
        keys: dict[int, dict[str, bytes]] = {}
        for client_id in client_ids:
            keys.setdefault(self.shard_of(client_id), {})[client_id] = self.keys_of(client_id).session
        stored: dict[str, bytes | None] = {}
        for shard, some in keys.items():
            stored.update(zip(some, self.states[shard].get_many(list(some.values())), strict=True))
        return [stored[client_id] for client_id in client_ids]

    def info(self, found: StoredSession, wall: Callable[[int], int]) -> SessionInfo:
        """Return a session's information. ``wall`` converts a time of the sessions' clock to the wall clock."""
        record, client_id = found.record, found.client_id
        subscriptions = [subscription for _, subscription in self.subscriptions(client_id)]
        return SessionInfo(
            client_id=client_id,
            connected=record.connected,
            created=wall(record.created),
            expiry_interval=None if record.expiry_interval == NEVER else record.expiry_interval / 1e6,
            expires=None if record.expires == NEVER else wall(record.expires),
            will_due=None if record.will_due == NEVER else wall(record.will_due),
            will_delay=None if record.will_delay == NEVER else record.will_delay / 1e6,
            subscriptions=tuple((one.topic_filter, one.periods[-1].options) for one in subscriptions),
            in_flight=len(self.in_flight(client_id)),
            awaiting_pubrel=len(self.incoming(client_id)),
        )

    def clients(self) -> Iterator[str]:
        """Yield the client ids of all sessions, one shard after the other."""
        for state in self.states:
            for key, _ in state.scan(SESSION):
                yield self.client_of(owner_in(key, SESSION))

    def lasting(self) -> Iterator[str]:
        """Yield the client ids of the sessions that aren't being removed, in one scan of each shard."""
        for state in self.states:
            for key, value in state.scan(SESSION):
                if not decode(key, value, SessionRecord).ending:
                    yield self.client_of(owner_in(key, SESSION))

    def _users(self) -> Iterator[str]:
        for state in self.states:
            for key, value in state.scan(SESSION):
                yield decode(key, value, SessionRecord).user

    def left_open(self, shard: int) -> Iterator[str]:
        """Yield the client ids of the sessions of a shard that were opened and not closed."""
        for key, _ in self.states[shard].scan(LIVE):
            yield self.client_of(owner_in(key, LIVE))

    def client_of(self, owner: str, states: Sequence[ShardState] | None = None) -> str:
        """Return the client id that ``owner`` stands for; see `topicstore.sessions.records.owner_of`.

        states: the states in which a client id is looked up; None: those of all shards, as this process has them.

        Returns ``owner`` itself if that is a client id, or if the session has been removed.
        """
        if owner[:1] == "\0":
            key = NAME + owner.encode()
            for state in self.states if states is None else states:
                stored = state.get(key)
                if stored is not None:
                    return decode(key, stored, tuple[int, str])[1]
        return owner

    def subscriptions(self, client_id: str) -> Iterator[tuple[int, SubscriptionRecord]]:
        """Yield the subscriptions of a session, with their numbers."""
        for key, value in self._of(client_id, "subscriptions"):
            yield int.from_bytes(key[-4:], "big"), decode(key, value, SubscriptionRecord)

    def all_subscriptions(self) -> Iterator[SubscriptionRecord]:
        """Yield the subscriptions of all sessions."""
        for state in self.states:
            for key, value in state.scan(SUBSCRIPTION):
                yield decode(key, value, SubscriptionRecord)

    def places(self, client_id: str) -> dict[int, list[int]]:
        """Return the places of a session's subscriptions, by the subscription's number."""
        found = self._of(client_id, "places")
        return {int.from_bytes(key[-4:], "big"): decode(key, value, tuple[int, list[int]])[1] for key, value in found}

    def followed(self, client_id: str) -> dict[int, Callable[[], Followed]]:
        """Return the stored subscriptions of a session, by number, as functions that decode them when called."""
        records = {int.from_bytes(key[-4:], "big"): (key, value) for key, value in self._of(client_id, "subscriptions")}
        if len(records) > _FEW:
            places, sent = (
                {int.from_bytes(key[-4:], "big"): (key, value) for key, value in self._of(client_id, part)}
                for part in ("places", "retained")
            )
        else:
            keys = self.keys_of(client_id)
            places, sent = self._values(client_id, records, keys.place), self._values(client_id, records, keys.retained)
        return {
            number: partial(_followed, record, places.get(number), sent.get(number))
            for number, record in records.items()
        }

    def _values(
        self, client_id: str, numbers: Collection[int], key_of: Callable[[int], bytes]
    ) -> dict[int, tuple[bytes, bytes]]:
        """Return the stored keys and values of a few subscriptions, by number, without a scan."""
        keys = [key_of(number) for number in numbers]
        values = self.states[self.shard_of(client_id)].get_many(keys)
        found = zip(numbers, keys, values, strict=True)
        return {number: (key, value) for number, key, value in found if value is not None}

    def in_flight(self, client_id: str) -> InFlight:
        """Return the messages that a session has in flight, all of them to be sent again."""
        in_flight = InFlight(self.keys_of(client_id))
        in_flight.load(self.batches(client_id), self._of(client_id, "released"))
        return in_flight

    def batches(self, client_id: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the stored keys and values of a session's in-flight batches."""
        return self._of(client_id, "batches")

    def revocable(self, client_id: str) -> list[Revocable]:
        """Return the messages of QoS 1 of shared subscriptions that a session has in flight."""
        if not any(_SHARED in value for _, value in self.batches(client_id)):
            return []
        keys, found = Keys(client_id), []
        for batch in self.in_flight(client_id).resend:
            waiting = (batch.unsent or {}).values()
            back = [row for row in waiting if batch.qos_of(row) == 1]
            if back and is_shared(batch.topic_filter):
                kept = batch.rows([row for row in waiting if batch.qos_of(row) != 1])
                key = keys.batch(batch.number)
                removal = put(key, kept.record()) if kept.ids else FrameworkWrite(key, None)
                found.append(Revocable(batch.topic_filter, batch.shard, batch.rows(back).positions, removal))
        return found

    def incoming(self, client_id: str) -> set[int]:
        """Return the packet ids of incoming QoS 2 messages that wait for their PUBREL."""
        return {int.from_bytes(key[-2:], "big") for key, _ in self._of(client_id, "incoming")}

    def _of(self, client_id: str, part: str) -> Iterator[tuple[bytes, bytes]]:
        return self.states[self.shard_of(client_id)].scan(self.keys_of(client_id).prefixes()[part])

    def keys_of(self, client_id: str) -> Keys:
        """Return the keys under which a client's session is stored."""
        return Keys(client_id, old=client_id in self.old)

    # --- changing ---

    def write(self, shard: int, writes: Sequence[StateWrite]) -> None:
        """Commit writes to a shard together."""
        for failure in self.commit({shard: writes}).values():
            raise failure

    def commit(self, by_shard: Mapping[int, Sequence[StateWrite]]) -> Mapping[int, TopicstoreError]:
        """Commit writes of several shards, each shard's together; return the errors by shard."""
        return self._released(partial(commit_state, self._shards, by_shard))

    def write_for(self, client_id: str, writes: Sequence[StateWrite]) -> None:
        """Commit writes to the shard of a client together."""
        self.write(self.shard_of(client_id), writes)

    def all_current(self, found: Sequence[StoredSession]) -> list[bool]:
        """Return, for each session, whether its stored record is still the one that was read."""
        now = self._stored([one.client_id for one in found])
        return [one.stored == stored for one, stored in zip(found, now, strict=True)]

    @staticmethod
    def change(client_id: str, before: StoredSession | None, after: StoredSession) -> list[StateWrite]:
        """Return the writes that replace a session's record, its timers, and the key that marks it as open."""
        keys = Keys(client_id)
        writes: list[StateWrite] = [
            FrameworkWrite(keys.session, after.stored, expect=None if before is None else before.stored)
        ]
        was = None if before is None else before.record
        if after.record.connected:
            writes.append(put(keys.live, (VERSION,)))
        elif was is not None and was.connected:
            writes.append(FrameworkWrite(keys.live, None))
        if before is None and keys.name is not None:
            writes.append(put(keys.name, (VERSION, client_id)))
        old = set() if was is None else _timers(keys, was)
        new = _timers(keys, after.record)
        writes += [FrameworkWrite(key, None) for key in old - new]
        writes += [put(key, (VERSION,)) for key in new - old]
        return writes

    def remove(self, found: StoredSession) -> bool:
        """Remove a session with all its records; return False if it has changed since it was read.

        Takes several writes if there are many records. A crash between them leaves a record with ``ending`` set and
        the key of an open session, so that recovery removes the rest.
        """
        keys = Keys(found.client_id)
        ending = encode_session(found.client_id, msgspec.structs.replace(found.record, ending=True))
        try:
            while True:
                doomed = list(islice(self._parts(found.client_id), _CHUNK + 1))
                writes = [FrameworkWrite(key, None) for key in doomed[:_CHUNK]]
                if len(doomed) <= _CHUNK:
                    break
                begun = [msgspec.structs.replace(ending.guard, expect=found.stored), put(keys.live, (VERSION,))]
                self.write_for(found.client_id, [*begun, *writes])
                found = ending
            names = () if keys.name is None else (keys.name,)
            last = (*_timers(keys, found.record), keys.live, will_key(keys), *names)
            writes += [FrameworkWrite(key, None) for key in last]
            self.write_for(found.client_id, [FrameworkWrite(keys.session, None, expect=found.stored), *writes])
        except StateConflictError:
            return False
        self.counts.add(found.record.user, -1)
        return True

    def _parts(self, client_id: str) -> Iterator[bytes]:
        state = self.states[self.shard_of(client_id)]
        for prefix in Keys(client_id).prefixes().values():
            for key, _ in state.scan(prefix):
                yield key

    # --- timers ---

    def timers(self, shard: int) -> Iterator[Timer]:
        """Yield a shard's timers, the earliest first."""
        for key, _ in self.states[shard].scan(TIMER):
            yield timer_of(key)

    def forget_timer(self, shard: int, timer: Timer) -> None:
        """Remove a timer that no session's record names."""
        key = timer_key(timer.time, timer.kind) + timer.owner.encode()
        self.write(shard, [FrameworkWrite(key, None)])


def _followed(
    record: tuple[bytes, bytes], place: tuple[bytes, bytes] | None, sent: tuple[bytes, bytes] | None
) -> Followed:
    return (
        decode(*record, SubscriptionRecord),
        None if place is None else decode(*place, tuple[int, list[int]])[1],
        None if sent is None else decode(*sent, tuple[int, str])[1],
    )


def will_key(keys: Keys) -> bytes:
    """Return the state key of a session's will."""
    return state_key(keys.will)


def _timers(keys: Keys, record: SessionRecord) -> set[bytes]:
    due = ((record.expires, EXPIRY), (record.will_due, WILL))
    return {keys.timer(time, kind) for time, kind in due if time != NEVER}
