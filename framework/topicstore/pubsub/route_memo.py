"""`RouteMemo`: a cache of the filters that match recent topics (their routes), so that most messages need no search.

The cache has two halves, a younger and an older one. A topic that is found in the older half moves to the younger. When
the younger half is full, it becomes the older half, and the previous older half is discarded.

A change of filters removes only the routes that it may affect: for a filter that begins with literal levels, the topics
that begin with these levels. For this, topics are indexed by their first level and by their first two levels. If there
are many such topics, or the filter begins with a wildcard, all routes become stale and are searched again on their next
use. So the cost of a change is bounded, whatever the number of topics and filters.
"""

from __future__ import annotations

from sys import getsizeof
from typing import Generic, TypeVar

from topicstore.contract.topics import TopicFilter

__all__ = ["RouteMemo"]

_HALF = 131_072
"""Largest number of routes in one half."""
_BYTES = 48 << 20
"""Approximate largest size of the topics and routes of one half in bytes."""
_ROUTE, _BEGINNING = 200, 400
"""Approximate overhead, in bytes, of the dictionaries for a route, and for an index entry."""
_LONGEST = 512
"""Length, in characters, above which topics are not cached."""
_MANY = 256
"""Largest number of routes that a change of filters removes one by one."""

V = TypeVar("V")


class _Half(Generic[V]):
    """One half of the cache."""

    __slots__ = ("beginning", "count", "routes", "size")

    def __init__(self) -> None:
        self.routes: dict[str, tuple[int, tuple[V, ...]]] = {}
        """By topic, the version of the filters (`RouteMemo._state`) for which the route is valid, and the route."""
        self.count = 0
        """The number of routes that were added, including removed ones."""
        self.size = 0
        """The approximate size, in bytes, of all that was added."""
        self.beginning: dict[str, set[str]] = {}
        """By first level, and by the first two levels, the topics that have further levels."""

    def put(self, topic: str, state: int, route: tuple[V, ...]) -> None:
        self.routes[topic] = state, route
        self.count += 1
        self.size += getsizeof(topic) + getsizeof(route) + _ROUTE
        end = topic.find("/")
        for _ in range(2):
            if end < 0:
                break
            topics = self.beginning.get(topic[:end])
            if topics is None:
                topics = self.beginning[topic[:end]] = set()
                self.size += getsizeof(topic[:end]) + _BEGINNING
            topics.add(topic)
            end = topic.find("/", end + 1)

    def remove(self, start: str) -> bool:
        """Remove the routes of topics that begin with these one or two levels; return False if there are too many."""
        topics = self.beginning.get(start, ())
        if len(topics) > _MANY:
            return False
        self.routes.pop(start, None)
        for topic in topics:
            self.routes.pop(topic, None)
        return True


class RouteMemo(Generic[V]):
    """The routes of recent topics. `get` is thread-safe; callers of the other methods hold a lock."""

    __slots__ = ("_older", "_state", "_younger")

    def __init__(self) -> None:
        self._state = 0
        """A version number, incremented by each change that makes all routes stale."""
        self._younger: _Half[V] = _Half()
        self._older: _Half[V] = _Half()

    def get(self, topic: str) -> tuple[V, ...] | None:
        """Return the route of a topic if the younger half has it, otherwise None."""
        found = self._younger.routes.get(topic)
        return None if found is None or found[0] != self._state else found[1]

    def get_locked(self, topic: str) -> tuple[V, ...] | None:
        """Return the route of a topic if it is cached, otherwise None; move it to the younger half."""
        found = self._younger.routes.get(topic) or self._older.routes.get(topic)
        if found is None or found[0] != self._state:
            return None
        self.put_locked(topic, found[1])
        return found[1]

    def put_locked(self, topic: str, route: tuple[V, ...]) -> None:
        """Cache the route of a topic, unless the topic is longer than `_LONGEST`."""
        if len(topic) > _LONGEST:
            return
        if self._younger.count >= _HALF or self._younger.size >= _BYTES:
            self._older, self._younger = self._younger, _Half()
        self._younger.put(topic, self._state, route)

    def change_locked(self, topic_filter: TopicFilter) -> None:
        """Remove the routes that the addition or removal of a filter may change."""
        levels = topic_filter.levels
        if levels[0] in ("+", "#"):
            self._state += 1
        elif not topic_filter.literal:
            start = levels[0] if levels[1] in ("+", "#") else "/".join(levels[:2])
            if not (self._younger.remove(start) and self._older.remove(start)):
                self._state += 1
        else:
            for half in (self._younger, self._older):
                half.routes.pop(topic_filter.text, None)
