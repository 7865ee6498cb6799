"""The standing of subscriptions: copied under the dispatcher's lock, so that lag can be counted without it."""

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
"""The place in a shard in which nothing is unread."""


class StoredStandings(Protocol):
    """Where stored sessions stand: `SessionState`, or what was read of it at once."""

    states: Sequence[ShardState]

    def subscriptions(self, client_id: str) -> Iterable[tuple[int, SubscriptionRecord]]:
        """Return the subscriptions of a session, with their numbers."""

    def places(self, client_id: str) -> dict[int, list[int]]:
        """Return the places of a session's subscriptions, by number."""


@attrs.frozen
class Standing:
    """The filter and places of a subscription, from which its lag is counted."""

    topic_filter: TopicFilter
    """The filter that it reads."""
    places: Sequence[int]
    """By shard, the position up to which everything was delivered."""
    wanted: Wanted | None = None
    """Selects the messages after its places that are still to be delivered; None: all of them."""
    returned: Sequence[tuple[int, Positions]] = ()
    """Shards, and positions there, of messages before its places that are to be delivered again to somebody."""

    def lag(self, counter: LagCounter) -> Lag:
        """Return how far the subscription lags behind. Raises the errors of reading."""
        lag = counter.lag(self.topic_filter, self.places, self.wanted)
        for shard, positions in self.returned:
            there = counter.readable(self.topic_filter, shard, positions)
            if len(there):
                lag += Lag(messages=len(there), exact=True, seconds=counter.seconds_from(int(there[0])))
        return lag

    def most_seconds(self, counter: LagCounter) -> float:
        """Return the seconds by which the subscription lags behind at most. Reads nothing."""
        returned = [counter.seconds_from(int(positions[0])) for _, positions in self.returned if len(positions)]
        return max([counter.most_seconds(self.places), *returned])


def standings(states: StoredStandings, groups: Groups, client_id: str, live: LiveSession | None) -> dict[str, Standing]:
    """Return, by filter, the standings of a session's subscriptions. Under the dispatcher's lock.

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
                place = places.get(number, [_READ] * len(states.states))  # at QoS 0 no messages wait for it
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
    if group is None:  # a crash came before its first member was enlisted
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
