"""`DurableFilters`: the filters of durable subscriptions; messages published to matching topics must be stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from topicstore.contract.topics import TopicFilter

from .filter_index import FilterIndex

__all__ = ["DurableFilters"]


class DurableFilters:
    """The filters of all durable subscriptions of one open database, and the number of subscriptions of each.

    Sessions load the stored filters before the first call of `match`, and change them under their mutex. `match` is
    thread-safe, and takes no lock that a change holds while it waits.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        """The number of subscriptions of each filter. Guarded by the sessions' mutex."""
        self._index: FilterIndex[str] = FilterIndex()
        """The filters of `_counts`."""
        self._shared: FilterIndex[str] = FilterIndex()
        """The filters of shared subscriptions with a connected member, by the text of the subscription. These
        subscriptions deliver stored messages even at QoS 0."""
        self.store_qos0 = True
        """Whether messages of QoS 0 are stored for all durable subscriptions, not only for those in `_shared`."""
        self.loaded = False
        """Whether the stored filters were loaded. Set once, under the sessions' mutex; reading it needs no lock."""

    def load(self, filters: Iterable[tuple[TopicFilter, int]]) -> None:
        """Set the filters, and the number of subscriptions of each; a filter may occur in several pairs.

        The caller holds all locks of sessions. Otherwise a change that is committed but not counted yet would be
        counted twice.
        """
        counts: Counter[str] = Counter()
        for topic_filter, count in filters:
            counts[topic_filter.text] += count
            self._index.add(topic_filter, topic_filter.text)
        self._counts, self.loaded = counts, True

    def add(self, topic_filter: TopicFilter) -> None:
        """Increment the number of durable subscriptions with a filter. Does nothing before `load`."""
        if self.loaded:
            self._counts[topic_filter.text] += 1
            if self._counts[topic_filter.text] == 1:
                self._index.add(topic_filter, topic_filter.text)

    def remove(self, topic_filter: TopicFilter) -> None:
        """Decrement the number of durable subscriptions with a filter. Does nothing before `load`."""
        if self.loaded:
            self._counts[topic_filter.text] -= 1
            if not self._counts[topic_filter.text]:
                del self._counts[topic_filter.text]
                self._index.remove(topic_filter, topic_filter.text)

    def add_shared(self, topic_filter: TopicFilter, text: str) -> None:
        """Record that the first member of the shared subscription ``text`` has connected."""
        self._shared.add(topic_filter, text)

    def remove_shared(self, topic_filter: TopicFilter, text: str) -> None:
        """Record that the last connected member of the shared subscription ``text`` has disconnected."""
        self._shared.remove(topic_filter, text)

    def match(self, topic: str, qos: int = 1) -> bool:
        """Return whether a message of this topic and QoS is stored for a durable subscription.

        Raises `RuntimeError` before `load`, because the message might be lost otherwise.
        """
        if not self.loaded:
            raise RuntimeError("the filters of durable subscriptions aren't loaded yet")
        return bool((self._index if qos or self.store_qos0 else self._shared).match(topic))
