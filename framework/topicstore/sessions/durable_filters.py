"""The filters of durable subscriptions: messages published to matching topics must be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from topicstore.pubsub.filter_index import FilterIndex

from .entrance import Around
from .records import SubscriptionRecord
from .shared_filters import is_shared, read_filter

__all__ = ["DurableFilters", "is_durable"]


def is_durable(record: SubscriptionRecord) -> bool:
    """Say whether matching messages are stored for a subscription: if it is shared, or ever needs packet ids."""
    return is_shared(record.topic_filter) or any(era.options.qos for era in record.eras)


class DurableFilters:
    """The filters of all durable subscriptions. They are read when they are first needed.

    `read` and `wants` may be called from any thread.

    alone: calls a function under the lock, while no other call changes subscriptions. A call that has committed a
           change, and has not counted it yet, would have it counted twice.
    """

    def __init__(
        self,
        load: Callable[[], Iterable[SubscriptionRecord]],
        alone: Around,
    ) -> None:
        self._load = load
        self._alone = alone
        self._routes: FilterIndex[str] = FilterIndex()
        """The index of filters. Changed under the lock; looked up in any thread."""
        self._counts: Counter[str] = Counter()
        """The number of subscriptions of each filter. Guarded by the lock."""
        self._shared: FilterIndex[str] = FilterIndex()
        """The index of the filters of shared subscriptions that a connected session has: it is served from what is
        stored, at QoS 0 too. Changed and looked up as `_routes`."""
        self.store_qos0 = True
        """Whether messages of QoS 0 are stored for all durable subscriptions, and not only for `present` ones."""
        self._loaded = False
        """Whether all subscriptions were read. Set once, under the lock; reading it needs no lock."""

    def add_locked(self, topic_filter: str) -> None:
        """Count one more durable subscription of a filter."""
        if self._loaded:
            self._counts[topic_filter] += 1
            if self._counts[topic_filter] == 1:
                self._routes.add(read_filter(topic_filter), topic_filter)

    def remove_locked(self, topic_filter: str) -> None:
        """Count one durable subscription of a filter less."""
        if self._loaded:
            self._counts[topic_filter] -= 1
            if not self._counts[topic_filter]:
                del self._counts[topic_filter]
                self._routes.remove(read_filter(topic_filter), topic_filter)

    def present_locked(self, topic_filter: str) -> None:
        """Note that a session with a shared subscription is connected, and none was before."""
        self._shared.add(read_filter(topic_filter), topic_filter)

    def absent_locked(self, topic_filter: str) -> None:
        """Note that no session with a shared subscription is connected any more."""
        self._shared.remove(read_filter(topic_filter), topic_filter)

    def read(self) -> None:
        """Read the filters, unless that was done. A call that holds claims must do so before it takes them."""
        if not self._loaded:
            self._alone(self._read_locked)

    def wants(self, topic: str, qos: int = 1) -> bool:
        """Say whether a message of this topic and QoS is stored for a durable subscription."""
        self.read()
        return bool((self._routes if qos or self.store_qos0 else self._shared).match(topic))

    def _read_locked(self) -> None:
        if not self._loaded:
            self._counts = Counter(record.topic_filter for record in self._load() if is_durable(record))
            for topic_filter in self._counts:
                self._routes.add(read_filter(topic_filter), topic_filter)
            self._loaded = True
