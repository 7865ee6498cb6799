"""The filters of durable subscriptions: messages published to matching topics must be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from topicstore.pubsub.filter_index import FilterIndex

from .locks import Around
from .records import SubscriptionRecord
from .shared_filters import is_shared, read_filter

__all__ = ["DurableFilters", "is_durable"]


def is_durable(record: SubscriptionRecord) -> bool:
    """Return whether matching messages are stored for a subscription: if it is shared, or of QoS 1 or 2 in any era."""
    return is_shared(record.topic_filter) or any(era.options.qos for era in record.eras)


class DurableFilters:
    """The filters of all durable subscriptions, which are read from the store when they are first needed.

    `read` and `wants` are thread-safe.

    alone: calls a function under the lock, while no other call changes subscriptions. Otherwise a change that is
           committed but not yet counted would be counted twice.
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
        """The index of the filters of shared subscriptions with a connected member, which are delivered from the stored
        messages also at QoS 0. Guarded like `_routes`."""
        self.store_qos0 = True
        """Whether messages of QoS 0 are stored for all durable subscriptions, not only for those in `_shared`."""
        self._loaded = False
        """Whether all subscriptions were read. Set once, under the lock; reading it needs no lock."""

    def add_locked(self, topic_filter: str) -> None:
        """Increment the number of durable subscriptions with a filter."""
        if self._loaded:
            self._counts[topic_filter] += 1
            if self._counts[topic_filter] == 1:
                self._routes.add(read_filter(topic_filter), topic_filter)

    def remove_locked(self, topic_filter: str) -> None:
        """Decrement the number of durable subscriptions with a filter."""
        if self._loaded:
            self._counts[topic_filter] -= 1
            if not self._counts[topic_filter]:
                del self._counts[topic_filter]
                self._routes.remove(read_filter(topic_filter), topic_filter)

    def present_locked(self, topic_filter: str) -> None:
        """Record that the first member of a shared subscription has connected."""
        self._shared.add(read_filter(topic_filter), topic_filter)

    def absent_locked(self, topic_filter: str) -> None:
        """Record that the last connected member of a shared subscription has disconnected."""
        self._shared.remove(read_filter(topic_filter), topic_filter)

    def read(self) -> None:
        """Read the filters, if that was not done before. A call that takes claims must call this before taking them."""
        if not self._loaded:
            self._alone(self._read_locked)

    def wants(self, topic: str, qos: int = 1) -> bool:
        """Return whether a message of this topic and QoS is stored for a durable subscription."""
        self.read()
        return bool((self._routes if qos or self.store_qos0 else self._shared).match(topic))

    def _read_locked(self) -> None:
        if not self._loaded:
            self._counts = Counter(record.topic_filter for record in self._load() if is_durable(record))
            for topic_filter in self._counts:
                self._routes.add(read_filter(topic_filter), topic_filter)
            self._loaded = True
