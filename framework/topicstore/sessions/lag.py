"""`Lagging`: computes the lag of sessions behind the stored messages, and finds the sessions with the longest lag.

The places of each session are copied under the sessions' mutex (`ReadPositions`), session by session. Unread messages
are then counted without the lock. For several sessions, one pass reads the messages after the lowest place and counts
each message for all filters that match it. If there are too many messages for one pass, each filter is counted by
itself.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.filter_index import FilterIndex
from topicstore.shard.state import ShardState
from topicstore.storage.counting.lag import Lag, LagCounter, Wanted

from .cursors import FilterCursor
from .locks import Around
from .model import SubscribeOptions, is_shared, read_filter
from .records import PLACE, SUBSCRIPTION, SubscriptionRecord, decode, owner_in, owner_of
from .registry import SessionRegistry
from .session import Session
from .session_store import SessionState
from .shared.group import Group
from .shared.groups import Groups
from .shared.reader import partition_of

if TYPE_CHECKING:
    from .shared.site_groups import SiteGroups
    from .shared.stored_group import StoredGroup

__all__ = [
    "Lagging",
    "ReadPositions",
    "StoredPlaces",
    "StoredPositions",
    "read_positions",
]

_READ = (1 << 64) - 1
"""A place above every position, used for a shard without unread messages."""


class StoredPositions(Protocol):
    """The subscriptions and places of stored sessions: `SessionState`, or a copy read in one scan."""

    states: Sequence[ShardState]

    def subscriptions(self, client_id: str) -> Iterable[tuple[int, SubscriptionRecord]]:
        """Return the subscriptions of a session, with their numbers."""

    def places(self, client_id: str) -> dict[int, list[int]]:
        """Return the places of a session's subscriptions, by the subscription's number."""


@attrs.frozen
class ReadPositions:
    """The filter and places of a subscription, from which its lag is counted."""

    topic_filter: TopicFilter
    """The filter, of a shared subscription without ``$share/<name>/``."""
    places: Sequence[int]
    """By shard, the position up to which all messages were delivered."""
    wanted: Wanted | None = None
    """Selects the messages after its places that are still to be delivered; None: all of them."""
    returned: Sequence[tuple[int, Positions]] = ()
    """By shard, the positions of messages before its places that wait for another member of the group."""

    def lag(self, counter: LagCounter) -> Lag:
        """Return the lag of the subscription. Raises the errors of reading."""
        lag = counter.lag(self.topic_filter, self.places, self.wanted)
        for shard, positions in self.returned:
            there = counter.readable(self.topic_filter, shard, positions)
            if len(there):
                lag += Lag(messages=len(there), exact=True, seconds=counter.seconds_from(int(there[0])))
        return lag

    def most_seconds(self, counter: LagCounter) -> float:
        """Return an upper bound of the lag in seconds. Reads no messages."""
        returned = [counter.seconds_from(int(positions[0])) for _, positions in self.returned if len(positions)]
        return max([counter.most_seconds(self.places), *returned])


def read_positions(
    states: StoredPositions, groups: Groups | SiteGroups, client_id: str, session: Session | None
) -> dict[str, ReadPositions]:
    """Return, by filter, the positions of a session's subscriptions. The caller holds the sessions' mutex.

    session: the session, if it is connected here; otherwise the stored session is used.
    """
    if session is not None:
        found = {
            text: _of_cursor(cursor) for text, cursor in session.cursors.items() if isinstance(cursor, FilterCursor)
        }
        shared = [text for text in session.cursors if text not in found]
    else:
        found, shared, places = {}, [], states.places(client_id)
        for number, record in states.subscriptions(client_id):
            if is_shared(record.topic_filter):
                shared.append(record.topic_filter)
            else:
                place = places.get(number, [_READ] * len(states.states))  # QoS 0 has no stored place and no lag
                found[record.topic_filter] = _of_place(
                    TopicFilter(record.topic_filter), place, record.periods[-1].options, client_id
                )
    return found | {text: _of_group(groups.find(text), text, len(states.states)) for text in shared}


def _of_cursor(cursor: FilterCursor) -> ReadPositions:
    unread = cursor.unread()
    places = [place if shard in unread else _READ for shard, place in enumerate(cursor.places)]
    return _of_place(cursor.topic_filter, places, cursor.options, cursor.client_id)


def _of_place(
    topic_filter: TopicFilter, places: Sequence[int], options: SubscribeOptions, client_id: str
) -> ReadPositions:
    def of_others(_: int, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        return np.fromiter((one != client_id for one in to_iterable(batch.client_ids)), np.bool_, len(batch))

    return ReadPositions(topic_filter, places, of_others if options.no_local else None)


def _of_group(group: Group | StoredGroup | None, text: str, shards: int) -> ReadPositions:
    """Return the positions of a shared subscription as a whole, not of one member."""
    if group is None:  # a crash came before the group's first member was enlisted
        return ReadPositions(read_filter(text), [_READ] * shards)
    places = group.unread_places()

    def unread(shard: int, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        partitions = np.fromiter(map(partition_of, to_iterable(batch.topics)), np.intp, len(batch))
        found: npt.NDArray[np.bool_] = batch.positions > places[shard][partitions]
        return found

    lowest = places.min(axis=1).tolist()
    return ReadPositions(
        group.filter.topic_filter,
        lowest,
        unread,
        [(assignment.shard, assignment.behind(assignment.place)) for assignment in group.assignments],
    )


_MANY = 1_000
"""Number of sessions from which one scan of all places is faster than a read for each session."""
_TOGETHER = 150_000
"""The most messages of a shard that one pass for all filters reads, including messages stored meanwhile."""
_MATCHES = 1_000_000
"""The most matches of messages with filters that a pass keeps in memory."""

_Positions = Mapping[str, Mapping[str, ReadPositions]]


class Lagging:
    """Compares the sessions of one open database with its messages.

    entered: calls a function under the sessions' mutex, and raises if the database is closed.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        entered: Around,
    ) -> None:
        self._registry = registry
        self._entered = entered

    def lag(self, client_ids: Sequence[str]) -> dict[str, dict[str, Lag]]:
        """Return the lags of sessions, of all if no ids are given; see `Sessions.lag`."""
        for client_id in client_ids:
            if client_id not in self._registry.connected:
                self._registry.found(client_id)
        found = client_ids or [one for one in self._registry.clients() if self._registry.find(one) is not None]
        counter, positions = LagCounter(self._registry.publisher.storage()), self._read_positions(found)
        if len(positions) > 1:
            _count_together(counter, positions)
        return _lags(counter, positions)

    def longest(self, client_ids: Sequence[str], limit: int) -> list[str]:
        """Return at most ``limit`` of these client ids, the longest lag first; see `Sessions.longest_behind`."""
        counter, positions = LagCounter(self._registry.publisher.storage()), self._read_positions(client_ids)
        if not _count_together(counter, positions):
            most = {
                client_id: max((one.most_seconds(counter) for one in found.values()), default=0.0)
                for client_id, found in positions.items()
            }
            positions = {client_id: positions[client_id] for client_id in heapq.nlargest(limit, most, most.__getitem__)}
        behind = {
            client_id: max(one.seconds for one in lags.values() if one.messages)
            for client_id, lags in _lags(counter, positions).items()
            if any(one.messages for one in lags.values())
        }
        return sorted(heapq.nlargest(limit, behind, behind.__getitem__), key=lambda one: (-behind[one], one))

    def _read_positions(self, client_ids: Sequence[str]) -> _Positions:
        states: StoredPositions = (
            self._registry.states if len(client_ids) < _MANY else StoredPlaces(self._registry.states)
        )
        found: dict[str, Mapping[str, ReadPositions]] = {}
        for client_id in client_ids:
            found[client_id] = self._entered(partial(self._positions_of, states, client_id))
        return found

    def _positions_of(self, states: StoredPositions, client_id: str) -> Mapping[str, ReadPositions]:
        return read_positions(states, self._registry.groups, client_id, self._registry.connected.get(client_id))


class StoredPlaces:
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
        """Return the subscriptions of a session, with their numbers."""
        return self._subscriptions.get(self._owner(client_id), ())

    def places(self, client_id: str) -> dict[int, list[int]]:
        """Return the places of a session's subscriptions, by the subscription's number."""
        return self._places.get(self._owner(client_id), {})

    def of_filters(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the filter and the places of every subscription that isn't shared and has places."""
        for owner, found in self._subscriptions.items():
            places = self._places.get(owner, {})
            for number, record in found:
                if number in places and not is_shared(record.topic_filter):
                    yield record.topic_filter, places[number]

    def _owner(self, client_id: str) -> str:
        return client_id if client_id in self._old else owner_of(client_id).decode()


def _lags(counter: LagCounter, positions: _Positions) -> dict[str, dict[str, Lag]]:
    """Return the lags by client id and filter; the lag of a group is computed once for all its members."""
    shared: dict[str, Lag] = {}

    def lag(text: str, one: ReadPositions) -> Lag:
        if not is_shared(text):
            return one.lag(counter)
        if text not in shared:
            shared[text] = one.lag(counter)
        return shared[text]

    return {
        client_id: {text: lag(text, one) for text, one in sorted(found.items())}
        for client_id, found in positions.items()
    }


def _count_together(counter: LagCounter, positions: _Positions) -> bool:
    """Count the unread messages of all sessions in one pass of each shard; return False if there are too many.

    Groups, and subscriptions with ``no_local``, are not counted here but separately.
    """
    lowest: dict[str, list[int]] = {}
    for one in chain.from_iterable(found.values() for found in positions.values()):
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
            except GenerationDroppedError:  # the caller then counts each filter separately
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
