"""`SessionState`: sessions as they are stored, and the writes that change them.

Whatever happens to a session as a whole (it is opened, its connection ends, it ends) is one new
`SessionRecord`, written on condition that the old one is still there. The timers it names and the mark
of an open session change with it, in the same engine write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import attrs
import msgspec

from topicstore.contract.checksums import add_checksum
from topicstore.contract.errors import StateConflictError
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite, ShardState
from topicstore.storage.keyed_messages import state_key

from .inflight import InflightWindow
from .records import (
    EXPIRY,
    LIVE,
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
    client_of,
    decode,
    put,
    timer_of,
)

__all__ = ["Found", "SessionState", "encode_session", "will_key"]

_CHUNK = 1_000
"""Keys removed in one write."""


@attrs.frozen
class Found:
    """A session as it was found: what it is, and the bytes that later writes are conditional on."""

    client_id: str
    stored: bytes
    record: SessionRecord

    @property
    def guard(self) -> StateWrite:
        """A write that changes nothing, and fails if the session changed since."""
        key = Keys(self.client_id).session
        return FrameworkWrite(key, self.stored, expect=self.stored)


def encode_session(client_id: str, record: SessionRecord) -> Found:
    """Return a session as it is to be stored."""
    return Found(client_id, add_checksum(Keys(client_id).session, msgspec.msgpack.encode(record)), record)


class SessionState:
    """The sessions that one open database keeps. Methods raise what reading and writing state raises."""

    def __init__(self, states: Sequence[ShardState], shard_of: Callable[[str], int]) -> None:
        self.states = states
        """By shard."""
        self.shard_of = shard_of

    # --- reading ---

    def find(self, client_id: str) -> Found | None:
        """Return the session of a client, or None."""
        key = Keys(client_id).session
        stored = self.states[self.shard_of(client_id)].get(key)
        if stored is None:
            return None
        return Found(client_id, stored, decode(key, stored, SessionRecord))

    def clients(self) -> Iterator[str]:
        """Yield the client ids of all sessions, by shard."""
        for state in self.states:
            for key, _ in state.scan(SESSION):
                yield client_of(key, SESSION)

    def left_open(self, shard: int) -> Iterator[str]:
        """Yield the client ids of the sessions of a shard that were opened and not closed."""
        for key, _ in self.states[shard].scan(LIVE):
            yield client_of(key, LIVE)

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
        """Return the places of a session's subscriptions, by number."""
        found = self._of(client_id, "places")
        return {int.from_bytes(key[-4:], "big"): decode(key, value, tuple[int, list[int]])[1] for key, value in found}

    def retained(self, client_id: str) -> dict[int, str]:
        """Return, by number, up to which topic a session's subscriptions were sent retained messages."""
        found = self._of(client_id, "retained")
        return {int.from_bytes(key[-4:], "big"): decode(key, value, tuple[int, str])[1] for key, value in found}

    def window(self, client_id: str) -> InflightWindow:
        """Return what a session has in flight, all of it to be sent again."""
        window = InflightWindow(Keys(client_id))
        window.load(self.flights(client_id), self._of(client_id, "released"))
        return window

    def flights(self, client_id: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield what a session has in flight, as it is stored."""
        return self._of(client_id, "flights")

    def incoming(self, client_id: str) -> set[int]:
        """Return the packet ids of incoming QoS 2 messages whose PUBREL has not come."""
        return {int.from_bytes(key[-2:], "big") for key, _ in self._of(client_id, "incoming")}

    def _of(self, client_id: str, part: str) -> Iterator[tuple[bytes, bytes]]:
        return self.states[self.shard_of(client_id)].scan(Keys(client_id).prefixes()[part])

    # --- changing ---

    def write(self, shard: int, writes: Iterable[StateWrite]) -> None:
        """Commit writes of a shard together."""
        self.states[shard].write(writes)

    def write_for(self, client_id: str, writes: Iterable[StateWrite]) -> None:
        """Commit writes in the shard of a client."""
        self.states[self.shard_of(client_id)].write(writes)

    def current(self, found: Found) -> bool:
        """Say whether a session is still as it was found."""
        return self.states[self.shard_of(found.client_id)].get(Keys(found.client_id).session) == found.stored

    @staticmethod
    def change(client_id: str, before: Found | None, after: Found) -> list[StateWrite]:
        """Return the writes that turn one record of a session into another, with its mark and timers."""
        keys = Keys(client_id)
        writes: list[StateWrite] = [
            FrameworkWrite(keys.session, after.stored, expect=None if before is None else before.stored)
        ]
        was = None if before is None else before.record
        if after.record.connected:
            writes.append(put(keys.live, (VERSION,)))
        elif was is not None and was.connected:
            writes.append(FrameworkWrite(keys.live, None))
        old = set() if was is None else _timers(keys, was)
        new = _timers(keys, after.record)
        writes += [FrameworkWrite(key, None) for key in old - new]
        writes += [put(key, (VERSION,)) for key in new - old]
        return writes

    def remove(self, found: Found) -> bool:
        """Remove a session with all it kept; False if it changed since it was found.

        A crash in between leaves one that says it is ending, and its mark, by which the rest is removed.
        """
        keys = Keys(found.client_id)
        ending = encode_session(found.client_id, msgspec.structs.replace(found.record, ending=True))
        try:
            while True:
                doomed = list(islice(self._parts(found.client_id), _CHUNK + 1))
                writes = [FrameworkWrite(key, None) for key in doomed[:_CHUNK]]
                if len(doomed) <= _CHUNK:
                    break
                begun = [attrs.evolve(ending.guard, expect=found.stored), put(keys.live, (VERSION,))]
                self.write_for(found.client_id, [*begun, *writes])
                found = ending
            writes += [FrameworkWrite(key, None) for key in (*_timers(keys, found.record), keys.live, will_key(keys))]
            self.write_for(found.client_id, [FrameworkWrite(keys.session, None, expect=found.stored), *writes])
        except StateConflictError:
            return False
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

    def forget_timer(self, timer: Timer) -> None:
        """Remove a timer that no session's record names."""
        self.write_for(timer.client_id, [FrameworkWrite(Keys(timer.client_id).timer(timer.time, timer.kind), None)])


def will_key(keys: Keys) -> bytes:
    """Return the state key of a session's will."""
    return state_key(keys.will)


def _timers(keys: Keys, record: SessionRecord) -> set[bytes]:
    due = ((record.expires, EXPIRY), (record.will_due, WILL))
    return {keys.timer(time, kind) for time, kind in due if time != NEVER}
