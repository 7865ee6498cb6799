"""`InterestNotes`: the messages that sessions on one site of a cluster need, for the sites that remove messages.

The places of stored sessions are in the state of their shards, of which every site that removes messages has a copy.
Two kinds of subscriptions have their places only in the memory of the site where their clients are connected: those of
sessions that are kept in memory, and those of QoS 0. So the owner of a shard commits a note to the shard's state. The
note covers all clients of the shard that are connected to this site. It has a horizon, the position up to which the
site had applied each shard, and by filter the places behind the horizon. Stored subscriptions are included, because a
change from stored to unstored may be under way.

A note is valid until the next one replaces it. It is a lower bound: places only advance, and a later subscription
begins after the horizon, or receives only messages that were stored before it was made. So the note of an earlier
owner, whose connections have ended, also holds for the sessions of the next owner until that owner commits its own. A
subscription that begins in the past is noted before its call returns, with a record that makes running removals start
again.

Stored form (state keyspace of each shard; keys begin with the byte 1, which is left out here; values as in
`topicstore.sessions.records`)::

    "sw"   the messages that connected sessions need: `InterestNote`
    "sb"   written after a subscription of the shard's sessions has begun in the past: [1]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.runtime.locks import FairLock
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard
from topicstore.storage.store_path import commit_state

from .cursors import FilterCursor
from .dispatcher import Dispatcher
from .locks import SessionLocks
from .records import VERSION, decode, decoder, put
from .session import Session
from .session_store import SessionState

__all__ = ["BEGUN_IN_PAST", "DECODERS", "InterestNote", "InterestNotes"]

_NOTE = b"\1sw"
BEGUN_IN_PAST = b"\1sb"
_MOST_FILTERS = 1_000
"""The most filters of a note. Above it, the horizon is the lowest place of all of them."""


class InterestNote(msgspec.Struct, frozen=True, array_like=True):
    """The messages that the connected sessions of a shard's clients need."""

    version: int
    horizon: list[int]
    """By shard of the messages, the position after which all messages may be needed."""
    filters: dict[str, list[int]]
    """By filter, and shard of the messages, the position after which matching messages are needed."""


class InterestNotes:
    """The notes of the shards that this site owns, and those of other sites. Thread-safe."""

    def __init__(
        self,
        shards: Sequence[Shard],
        states: SessionState,
        dispatcher: Dispatcher[Session],
        locks: SessionLocks[Session],
        connected: Mapping[str, Session],
    ) -> None:
        self._shards = shards
        self._states = states
        self._hub, self._mutex = dispatcher.hub, dispatcher.mutex
        self._locks = locks
        self._connected = connected
        self._writing = FairLock()
        """Held while notes are made and committed, so that no note replaces a later one. Acquired before all others."""

    def stored(self, shard: int) -> InterestNote | None:
        """Return the latest note of a shard that this site has applied; None if it has applied none."""
        stored = self._states.states[shard].get(_NOTE)
        return None if stored is None else decode(_NOTE, stored, InterestNote)

    def commit(self, shards: Collection[int], *, begun_in_past: bool = False) -> Mapping[int, TopicstoreError]:
        """Commit the notes of some shards, unless the notes are unchanged; return the errors by shard.

        begun_in_past: whether the notes cover a new subscription, of these shards' sessions, that begins in the past.
        """
        with self._writing:
            writes: dict[int, list[StateWrite]] = {}
            more = [put(BEGUN_IN_PAST, (VERSION,))] if begun_in_past else []
            for shard, note in self._made(shards).items():
                write = put(_NOTE, note)
                if more or self._states.states[shard].get(_NOTE) != write.value:
                    writes[shard] = [write, *more]
            return commit_state(self._shards, writes)

    def _made(self, shards: Collection[int]) -> dict[int, InterestNote]:
        # Read before the places, so that messages stored in between lie above the horizon.
        horizon = self._locks.hold_all(self._hub.watermarks)
        known = [self._hub.knows(shard) for shard in range(len(horizon))]
        found: dict[int, dict[str, list[int]]] = {shard: {} for shard in shards}
        for client_id in list(self._connected):
            shard = self._states.shard_of(client_id)
            if shard in found:
                self._mutex.hold(partial(self._add, found[shard], client_id, horizon, known))
        return {shard: _note(horizon, filters) for shard, filters in found.items()}

    def _add(
        self, filters: dict[str, list[int]], client_id: str, horizon: Sequence[int], known: Sequence[bool]
    ) -> None:
        """Add the filters of a session whose places are behind the horizon."""
        session = self._connected.get(client_id)
        for cursor in () if session is None else session.cursors.values():
            if not isinstance(cursor, FilterCursor) or not cursor.places:
                continue
            places = [
                last if knows and place == read and cursor.quiet(shard) else min(place, last)
                for shard, (place, read, last, knows) in enumerate(
                    zip(cursor.settled_places(), cursor.places, horizon, known, strict=False)
                )
            ]
            if any(place < last for place, last in zip(places, horizon, strict=False)):
                text = cursor.topic_filter.text
                filters[text] = list(map(min, filters.get(text, places), places))


def _note(horizon: list[int], filters: dict[str, list[int]]) -> InterestNote:
    if len(filters) > _MOST_FILTERS:
        return InterestNote(VERSION, list(map(min, horizon, *filters.values())), {})
    return InterestNote(VERSION, horizon, dict(sorted(filters.items())))


DECODERS: Decoders = {_NOTE: decoder(InterestNote), BEGUN_IN_PAST: decoder(tuple[int])}
"""Decoders of the state of notes."""
