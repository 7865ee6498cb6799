"""An index that finds the topic filters that match a topic (MQTT 5, section 4.7), and a cache of its results.

Filters without wildcards are looked up by their text. The others are in a tree (trie) of filter levels, which is walked
once for each topic. Publishers mostly reuse topics, so `RouteMemo` caches the filters that match recent topics
(their routes), and most messages need no search.

The cache has two halves, a younger and an older one. A topic that is found in the older half moves to the younger. When
the younger half is full, it becomes the older half, and the previous older half is discarded.

A change of filters removes only the routes that it may affect: for a filter that begins with literal levels, the topics
that begin with these levels. For this, topics are indexed by their first level and by their first two levels. If there
are many such topics, or the filter begins with a wildcard, all routes become stale and are searched again on their next
use. So the cost of a change is bounded, whatever the number of topics and filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from sys import getsizeof
from typing import Generic, TypeVar

from topicstore.contract.forking import ProcessLock
from topicstore.contract.topics import TopicFilter

__all__ = [
    "FilterIndex",
    "RouteMemo",
]

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


_Values = tuple[V, ...] | dict[V, None]
"""The values of one filter. Most filters have one, and a dictionary of one value takes 232 bytes."""
_FEW = 8
"""Most values in a tuple."""


def _with(values: _Values[V], value: V) -> _Values[V]:
    """Return values and a new one."""
    if isinstance(values, dict):
        values[value] = None
        return values
    return (*values, value) if len(values) < _FEW else dict.fromkeys((*values, value))


def _without(values: _Values[V], value: V) -> _Values[V]:
    """Return values without one of them."""
    if isinstance(values, dict):
        del values[value]
        return values
    return tuple(one for one in values if one != value)


class _Node(Generic[V]):
    """A node of the tree: one level of filters."""

    __slots__ = ("children", "ending", "open_ended")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] | None = None
        self.ending: _Values[V] = ()
        """The values of filters that end here."""
        self.open_ended: _Values[V] = ()
        """The values of filters that end with ``#`` after this level."""

    def empty(self) -> bool:
        return not (self.children or self.ending or self.open_ended)


class FilterIndex(Generic[V]):
    """A map from topics to the values of all matching filters. Values are hashable; a filter has any number of values.

    All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards the attributes below."""
        self._root: _Node[V] = _Node()
        """The tree of filters with wildcards."""
        self._literal: dict[str, _Values[V]] = {}
        """The values of filters without wildcards, by their text."""
        self._memo: RouteMemo[V] = RouteMemo()
        """The cached results by topic; `RouteMemo.get` is also called without the lock."""
        self._size = 0

    def __len__(self) -> int:
        """Return the number of pairs of filter and value."""
        return self._size

    def add(self, topic_filter: TopicFilter, value: V) -> bool:
        """Add a value to a filter; return whether it is new."""
        with self._lock:
            added = self._add_literal if topic_filter.literal else self._add_to_tree
            if not added(topic_filter, value):
                return False
            self._size += 1
            self._memo.change_locked(topic_filter)
            return True

    def _add_literal(self, topic_filter: TopicFilter, value: V) -> bool:
        values = self._literal.get(topic_filter.text, ())
        if value in values:
            return False
        self._literal[topic_filter.text] = _with(values, value)
        return True

    def _add_to_tree(self, topic_filter: TopicFilter, value: V) -> bool:
        node = self._root
        for level in _path(topic_filter):
            if node.children is None:
                node.children = {}
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        values = _values(node, topic_filter)
        if value in values:
            return False
        _set_values(node, topic_filter, _with(values, value))
        return True

    def remove(self, topic_filter: TopicFilter, value: V) -> bool:
        """Remove a value from a filter; return whether it was there."""
        with self._lock:
            removed = self._remove_literal if topic_filter.literal else self._remove_from_tree
            if not removed(topic_filter, value):
                return False
            self._size -= 1
            self._memo.change_locked(topic_filter)
            return True

    def _remove_literal(self, topic_filter: TopicFilter, value: V) -> bool:
        values = self._literal.get(topic_filter.text, ())
        if value not in values:
            return False
        left = self._literal[topic_filter.text] = _without(values, value)
        if not left:
            del self._literal[topic_filter.text]
        return True

    def _remove_from_tree(self, topic_filter: TopicFilter, value: V) -> bool:
        way = [self._root]
        for level in _path(topic_filter):
            child = (way[-1].children or {}).get(level)
            if child is None:
                return False
            way.append(child)
        values = _values(way[-1], topic_filter)
        if value not in values:
            return False
        _set_values(way[-1], topic_filter, _without(values, value))
        _prune(way, _path(topic_filter))
        return True

    def match(self, topic: str) -> tuple[V, ...]:
        """Return the values of all filters that match a valid topic, each once."""
        found = self._memo.get(topic)
        if found is None:
            with self._lock:
                found = self._memo.get_locked(topic)
                if found is None:
                    found = tuple(dict.fromkeys(chain(self._literal.get(topic, ()), _match(self._root, topic))))
                    self._memo.put_locked(topic, found)
        return found


def _path(topic_filter: TopicFilter) -> tuple[str, ...]:
    levels = topic_filter.levels
    return levels[:-1] if levels[-1] == "#" else levels


def _values(node: _Node[V], topic_filter: TopicFilter) -> _Values[V]:
    return node.open_ended if topic_filter.levels[-1] == "#" else node.ending


def _set_values(node: _Node[V], topic_filter: TopicFilter, values: _Values[V]) -> None:
    if topic_filter.levels[-1] == "#":
        node.open_ended = values
    else:
        node.ending = values


def _prune(way: list[_Node[V]], path: tuple[str, ...]) -> None:
    for parent, level, node in zip(reversed(way[:-1]), reversed(path), reversed(way[1:]), strict=True):
        if not node.empty():
            return
        (parent.children or {}).pop(level)


def _match(root: _Node[V], topic: str) -> Iterator[V]:
    system = topic[0] == "$"  # a wildcard in the first level doesn't match such topics [MQTT-4.7.2-1]
    nodes, hidden = [root], system
    for level in topic.split("/"):
        following = []
        for node in nodes:
            if not hidden:
                yield from node.open_ended
            for child in (level,) if hidden else (level, "+"):
                found = (node.children or {}).get(child)
                if found is not None:
                    following.append(found)
        nodes, hidden = following, False
    for node in nodes:
        yield from node.ending
        yield from node.open_ended  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
