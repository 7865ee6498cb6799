"""Which topics durable subscriptions want: what is published there must be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from topicstore.pubsub.filter_index import FilterIndex

from .records import SubscriptionRecord
from .shared.filters import is_shared, read_filter

__all__ = ["DurableFilters", "is_durable"]


def is_durable(record: SubscriptionRecord) -> bool:
    """Say whether a subscription's messages are stored for it: whether it is shared, or ever needs packet ids."""
    return is_shared(record.topic_filter) or any(era.options.qos for era in record.eras)


class DurableFilters:
    """The filters of all durable subscriptions. Nothing is read before somebody asks.

    `wants` may be called from any thread.
    """

    def __init__(self, load: Callable[[], Iterable[SubscriptionRecord]], lock: AbstractContextManager[object]) -> None:
        self._load = load
        self._lock = lock
        self._routes: FilterIndex[str] = FilterIndex()
        """Changed under the lock; looked up in any thread."""
        self._counts: Counter[str] = Counter()
        """How many subscriptions a filter has. Guarded by the lock."""
        self._loaded = False
        """Everything was read. Set once, under the lock; a glance needs none."""

    def add_locked(self, topic_filter: str) -> None:
        """There is one more durable subscription of a filter."""
        if self._loaded:
            self._counts[topic_filter] += 1
            if self._counts[topic_filter] == 1:
                self._routes.add(read_filter(topic_filter), topic_filter)

    def remove_locked(self, topic_filter: str) -> None:
        """There is one durable subscription of a filter less."""
        if self._loaded:
            self._counts[topic_filter] -= 1
            if not self._counts[topic_filter]:
                del self._counts[topic_filter]
                self._routes.remove(read_filter(topic_filter), topic_filter)

    def wants(self, topic: str) -> bool:
        """Say whether a durable subscription matches a topic."""
        if not self._loaded:
            with self._lock:
                self._read_locked()
        return bool(self._routes.match(topic))

    def _read_locked(self) -> None:
        if not self._loaded:
            self._counts = Counter(record.topic_filter for record in self._load() if is_durable(record))
            for topic_filter in self._counts:
                self._routes.add(read_filter(topic_filter), topic_filter)
            self._loaded = True
