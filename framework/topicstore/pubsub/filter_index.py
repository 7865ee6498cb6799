"""An index that finds the topic filters that match a topic (MQTT 5, section 4.7).

Filters without wildcards are looked up by their text. The others are in a tree (trie) of filter levels, which is walked
once for each topic. Results are cached (`topicstore.pubsub.route_memo`), because publishers mostly use topics again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from topicstore.contract.forking import ProcessLock
from topicstore.contract.topics import TopicFilter

from .route_memo import RouteMemo

__all__ = ["FilterIndex"]

V = TypeVar("V")


class _Node(Generic[V]):
    """A node of the tree: one level of filters."""

    __slots__ = ("children", "ending", "open_ended")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] | None = None
        self.ending: dict[V, None] | None = None
        """The values of filters that end here."""
        self.open_ended: dict[V, None] | None = None
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
        self._literal: dict[str, dict[V, None]] = {}
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
            if topic_filter.literal:
                values = self._literal.setdefault(topic_filter.text, {})
            else:
                node = self._root
                for level in _path(topic_filter):
                    if node.children is None:
                        node.children = {}
                    node = node.children.setdefault(level, _Node())
                values = _values(node, topic_filter)
            if value in values:
                return False
            values[value] = None
            self._size += 1
            self._memo.change_locked(topic_filter)
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
        values = self._literal.get(topic_filter.text, {})
        if value not in values:
            return False
        del values[value]
        if not values:
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
        del values[value]
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


def _values(node: _Node[V], topic_filter: TopicFilter) -> dict[V, None]:
    if topic_filter.levels[-1] == "#":
        if node.open_ended is None:
            node.open_ended = {}
        return node.open_ended
    if node.ending is None:
        node.ending = {}
    return node.ending


def _prune(way: list[_Node[V]], path: tuple[str, ...]) -> None:
    for parent, level, node in zip(reversed(way[:-1]), reversed(path), reversed(way[1:]), strict=True):
        if not node.empty():
            return
        (parent.children or {}).pop(level)


def _match(root: _Node[V], topic: str) -> Iterator[V]:
    system = topic[0] == "$"  # not matched by wildcards in the first level [MQTT-4.7.2-1]
    nodes, hidden = [root], system
    for level in topic.split("/"):
        following = []
        for node in nodes:
            if not hidden:
                yield from node.open_ended or ()
            for child in (level,) if hidden else (level, "+"):
                found = (node.children or {}).get(child)
                if found is not None:
                    following.append(found)
        nodes, hidden = following, False
    for node in nodes:
        yield from node.ending or ()
        yield from node.open_ended or ()  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
