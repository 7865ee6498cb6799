"""`Standing`: the places of a subscription, copied under the dispatcher's lock to compute the lag without the lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter
from topicstore.shard.state import ShardState
from topicstore.storage.counting.lag import Lag, LagCounter, Wanted

from .live_session import LiveSession
from .model import SubscribeOptions
from .records import SubscriptionRecord
from .shared.group import Group
from .shared.groups import Groups
from .shared.slices import slice_of
from .shared_filters import is_shared, read_filter
from .sources import FeedSource

__all__ = ["Standing", "StoredStandings", "standings"]

_READ = (1 << 64) - 1
"""A place above every position, used for a shard without unread messages."""


class StoredStandings(Protocol):
    """The subscriptions and places of stored sessions: `SessionState`, or a copy read in one scan."""

    states: Sequence[ShardState]

    def subscriptions(self, client_id: str) -> Iterable[tuple[int, SubscriptionRecord]]:
        """Return the subscriptions of a session, with their numbers."""

    def places(self, client_id: str) -> dict[int, list[int]]:
        """Return the places of a session's subscriptions, by number."""


@attrs.frozen
class Standing:
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


def standings(states: StoredStandings, groups: Groups, client_id: str, live: LiveSession | None) -> dict[str, Standing]:
    """Return, by filter, the standings of a session's subscriptions. The caller holds the dispatcher's lock.

    live: the session, if it is connected here; otherwise the stored session is used.
    """
    if live is not None:
        found = {text: _of_source(source) for text, source in live.sources.items() if isinstance(source, FeedSource)}
        shared = [text for text in live.sources if text not in found]
    else:
        found, shared, places = {}, [], states.places(client_id)
        for number, record in states.subscriptions(client_id):
            if is_shared(record.topic_filter):
                shared.append(record.topic_filter)
            else:
                place = places.get(number, [_READ] * len(states.states))  # at QoS 0 it has no place and no lag
                found[record.topic_filter] = _of_place(
                    TopicFilter(record.topic_filter), place, record.eras[-1].options, client_id
                )
    return found | {text: _of_group(groups.find(text), text, len(states.states)) for text in shared}


def _of_source(source: FeedSource) -> Standing:
    unread = source.unread()
    places = [place if shard in unread else _READ for shard, place in enumerate(source.places)]
    return _of_place(source.topic_filter, places, source.options, source.client_id)


def _of_place(topic_filter: TopicFilter, places: Sequence[int], options: SubscribeOptions, client_id: str) -> Standing:
    def of_others(_: int, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        return np.fromiter((one != client_id for one in to_iterable(batch.client_ids)), np.bool_, len(batch))

    return Standing(topic_filter, places, of_others if options.no_local else None)


def _of_group(group: Group | None, text: str, shards: int) -> Standing:
    """Return the standing of a shared subscription as a whole, not of one member."""
    if group is None:  # a crash occurred before its first member was enlisted
        return Standing(read_filter(text), [_READ] * shards)
    places = group.unread_places()

    def unread(shard: int, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        slices = np.fromiter(map(slice_of, to_iterable(batch.topics)), np.intp, len(batch))
        found: npt.NDArray[np.bool_] = batch.positions > places[shard][slices]
        return found

    lowest = places.min(axis=1).tolist()
    return Standing(
        group.filter.topic_filter, lowest, unread, [(loan.shard, loan.behind(loan.place)) for loan in group.loans]
    )
