"""`Lagging`: computes the lag of sessions behind the stored messages, and finds the sessions with the longest lag.

The places of each session are copied under the sessions' lock, session by session. Unread messages are then counted
without the lock. For several sessions, one pass reads the messages after the lowest place and counts each message for
all filters that match it. If there are too many messages for one pass, each filter is counted by itself.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.filter_index import FilterIndex
from topicstore.storage.counting.lag import Lag, LagCounter
from topicstore.storage.storage import Storage

from .entrance import Around
from .lookup import Lookup
from .records import PLACE, SUBSCRIPTION, SubscriptionRecord, decode, owner_in, owner_of
from .session_state import SessionState
from .shared.groups import Groups
from .shared_filters import is_shared
from .standings import Standing, StoredStandings, standings

__all__ = ["Lagging"]

_MANY = 1_000
"""Number of sessions from which one scan of all places is faster than a read for each session."""
_TOGETHER = 150_000
"""The most messages of a shard that one pass for all filters reads, including messages stored meanwhile."""
_MATCHES = 1_000_000
"""The most matches of messages with filters that a pass keeps in memory."""

_Standings = Mapping[str, Mapping[str, Standing]]


class Lagging:
    """Compares the sessions of one open database with its messages.

    entered: calls a function under the sessions' lock, and raises if the database is closed.
    storage: returns the database's shards.
    """

    def __init__(
        self,
        states: SessionState,
        groups: Groups,
        lookup: Lookup,
        entered: Around,
        storage: Callable[[], Storage],
    ) -> None:
        self._states = states
        self._groups = groups
        self._lookup = lookup
        self._entered = entered
        self._storage = storage

    def lag(self, client_ids: Sequence[str]) -> dict[str, dict[str, Lag]]:
        """Return the lags of sessions, of all if no ids are given; see `Sessions.lag`."""
        for client_id in client_ids:
            if client_id not in self._lookup.live:
                self._lookup.found(client_id)
        found = client_ids or [one for one in self._lookup.clients() if self._lookup.find(one) is not None]
        counter, standing = LagCounter(self._storage()), self._standings(found)
        if len(standing) > 1:
            _count_together(counter, standing)
        return _lags(counter, standing)

    def longest(self, client_ids: Sequence[str], limit: int) -> list[str]:
        """Return at most ``limit`` of these client ids, the longest lag first; see `Sessions.longest_behind`."""
        counter, standing = LagCounter(self._storage()), self._standings(client_ids)
        if not _count_together(counter, standing):
            most = {
                client_id: max((one.most_seconds(counter) for one in found.values()), default=0.0)
                for client_id, found in standing.items()
            }
            standing = {client_id: standing[client_id] for client_id in heapq.nlargest(limit, most, most.__getitem__)}
        behind = {
            client_id: max(one.seconds for one in lags.values() if one.messages)
            for client_id, lags in _lags(counter, standing).items()
            if any(one.messages for one in lags.values())
        }
        return sorted(heapq.nlargest(limit, behind, behind.__getitem__), key=lambda one: (-behind[one], one))

    def _standings(self, client_ids: Sequence[str]) -> _Standings:
        states: StoredStandings = self._states if len(client_ids) < _MANY else _AllStandings(self._states)
        found: dict[str, Mapping[str, Standing]] = {}
        for client_id in client_ids:
            found[client_id] = self._entered(partial(self._standings_of, states, client_id))
        return found

    def _standings_of(self, states: StoredStandings, client_id: str) -> Mapping[str, Standing]:
        return standings(states, self._groups, client_id, self._lookup.live.get(client_id))


class _AllStandings:
    """The subscriptions and places of all stored sessions, read with one scan of each shard."""

    def __init__(self, states: SessionState) -> None:
        self.states, self._old = states.states, states.old
        self._subscriptions: dict[str, list[tuple[int, SubscriptionRecord]]] = defaultdict(list)
        self._places: dict[str, dict[int, list[int]]] = defaultdict(dict)
        for state in self.states:
            for key, value in state.scan(SUBSCRIPTION):
                owner, number = owner_in(key, SUBSCRIPTION), int.from_bytes(key[-4:], "big")
                self._subscriptions[owner].append((number, decode(key, value, SubscriptionRecord)))
            for key, value in state.scan(PLACE):
                owner, number = owner_in(key, PLACE), int.from_bytes(key[-4:], "big")
                self._places[owner][number] = decode(key, value, tuple[int, list[int]])[1]

    def subscriptions(self, client_id: str) -> Iterable[tuple[int, SubscriptionRecord]]:
        return self._subscriptions.get(self._owner(client_id), ())

    def places(self, client_id: str) -> dict[int, list[int]]:
        return self._places.get(self._owner(client_id), {})

    def _owner(self, client_id: str) -> str:
        return client_id if client_id in self._old else owner_of(client_id).decode()


def _lags(counter: LagCounter, standing: _Standings) -> dict[str, dict[str, Lag]]:
    """Return the lags by client id and filter; the lag of a group is computed once for all its members."""
    shared: dict[str, Lag] = {}

    def lag(text: str, one: Standing) -> Lag:
        if not is_shared(text):
            return one.lag(counter)
        if text not in shared:
            shared[text] = one.lag(counter)
        return shared[text]

    return {
        client_id: {text: lag(text, one) for text, one in sorted(found.items())}
        for client_id, found in standing.items()
    }


def _count_together(counter: LagCounter, standing: _Standings) -> bool:
    """Count the unread messages of all sessions in one pass of each shard; return False if there are too many.

    Groups, and subscriptions with ``no_local``, are not counted here but separately.
    """
    lowest: dict[str, list[int]] = {}
    for one in chain.from_iterable(found.values() for found in standing.values()):
        if one.wanted is None:
            text = one.topic_filter.text
            near = [
                mark if counter.far(one.topic_filter, shard, place) else place
                for shard, (place, mark) in enumerate(zip(one.places, counter.marks, strict=True))
            ]
            lowest[text] = list(map(min, lowest.get(text, near), near))
    for shard, mark in enumerate(counter.marks):
        roots: dict[str, dict[str, int]] = defaultdict(dict)
        for text, places in lowest.items():
            if places[shard] < mark:
                roots[_root(text)][text] = places[shard]
        for root, behind in roots.items():
            try:
                if not _count_shard(counter, shard, TopicFilter(root), behind):
                    return False
            except GenerationDroppedError:  # each filter is counted separately instead
                return False
    return True


def _root(text: str) -> str:
    """Return a filter that matches all that this one does: ``#`` doesn't match topics that begin with ``$``."""
    return f"{text.partition('/')[0]}/#" if text.startswith("$") else "#"


def _count_shard(counter: LagCounter, shard: int, root: TopicFilter, behind: Mapping[str, int]) -> bool:
    index: FilterIndex[str] = FilterIndex()
    for text in behind:
        index.add(TopicFilter(text), text)
    found: dict[str, list[int]] = {text: [] for text in behind}
    looked = matches = 0
    for batch in counter.batches(root, shard, min(behind.values())):
        looked += len(batch)
        for topic, position in zip(to_iterable(batch.topics), batch.positions.tolist(), strict=True):
            texts = index.match(topic)
            matches += len(texts)
            for text in texts:
                found[text].append(position)
        if looked > _TOGETHER or matches > _MATCHES:
            return False
    for text, positions in found.items():
        first = np.array(positions, np.uint64)
        counter.note(TopicFilter(text), shard, behind[text], first[first > np.uint64(behind[text])])
    return True
