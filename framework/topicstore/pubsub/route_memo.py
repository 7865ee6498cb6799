"""`RouteMemo`: the routes of topics that were looked up of late, so that filters needn't be searched for each message.

There are two halves, a younger and an older one. A topic that is found in the older half moves to the younger; when
that is full, it becomes the older one and what was not asked for meanwhile is forgotten.

A change of filters removes only what it may have changed: for a filter that begins with literal levels, the topics
that begin with them. Topics are listed by their first level and by their first two for that. If there are many of
them, or the filter begins with a wildcard, all routes count as stale, which costs nothing now and a walk of the tree
for each topic that is looked up again. So a change costs a bounded amount, however many topics and filters there are.
"""

from __future__ import annotations

from sys import getsizeof
from typing import Generic, TypeVar

from topicstore.contract.topics import TopicFilter

__all__ = ["RouteMemo"]

_HALF = 131_072
"""Number of routes that are put into one half: so many live topics are never forgotten if their bytes permit it."""
_BYTES = 48 << 20
"""About how many bytes the topics and routes of one half take at most."""
_ROUTE, _BEGINNING = 200, 400
"""About how many bytes the dictionaries take for a route, and for a beginning of topics, without the texts."""
_LONGEST = 512
"""Characters of a topic that is remembered."""
_MANY = 256
"""Largest number of routes that a change of filters removes one by one."""

V = TypeVar("V")


class _Half(Generic[V]):
    """Some of the routes."""

    __slots__ = ("beginning", "count", "routes", "size")

    def __init__(self) -> None:
        self.routes: dict[str, tuple[int, tuple[V, ...]]] = {}
        """By topic, the number of the state of the filters for which its route holds, and the route."""
        self.count = 0
        """How many routes were put in; some may have been removed."""
        self.size = 0
        """About how many bytes were put in."""
        self.beginning: dict[str, set[str]] = {}
        """By first level, and by the first two levels, the topics that continue with another level."""

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
        """Remove the routes of topics that begin with these one or two levels; return False if they are too many."""
        topics = self.beginning.get(start, ())
        if len(topics) > _MANY:
            return False
        self.routes.pop(start, None)
        for topic in topics:
            self.routes.pop(topic, None)
        return True


class RouteMemo(Generic[V]):
    """The routes of recent topics. `get` may be called from any thread; callers of the others hold a lock."""

    __slots__ = ("_older", "_state", "_younger")

    def __init__(self) -> None:
        self._state = 0
        """A number that is higher after each change that makes all routes stale."""
        self._younger: _Half[V] = _Half()
        self._older: _Half[V] = _Half()

    def get(self, topic: str) -> tuple[V, ...] | None:
        """Return the route of a topic if it was used of late."""
        found = self._younger.routes.get(topic)
        return None if found is None or found[0] != self._state else found[1]

    def get_locked(self, topic: str) -> tuple[V, ...] | None:
        """Return the route of a topic if it is known, and keep it longer."""
        found = self._younger.routes.get(topic) or self._older.routes.get(topic)
        if found is None or found[0] != self._state:
            return None
        self.put_locked(topic, found[1])
        return found[1]

    def put_locked(self, topic: str, route: tuple[V, ...]) -> None:
        """Keep the route of a topic, unless it is a very long one."""
        if len(topic) > _LONGEST:
            return
        if self._younger.count >= _HALF or self._younger.size >= _BYTES:
            self._older, self._younger = self._younger, _Half()
        self._younger.put(topic, self._state, route)

    def change_locked(self, topic_filter: TopicFilter) -> None:
        """Forget the routes that change because a filter came or went."""
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
