"""Which of many topic filters match a topic.

A tree of filter levels is walked once a topic, however many filters there are, and the answer
is kept: publishers mostly send to topics that were seen before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from topicstore.contract.topics import TopicFilter

__all__ = ["FilterIndex"]

_KEPT = 65_536
"""Answers kept before all are forgotten."""

V = TypeVar("V")


class _Node(Generic[V]):
    """A level of filters."""

    __slots__ = ("children", "ending", "open_ended")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] | None = None
        self.ending: dict[V, None] | None = None
        """Of filters that end here."""
        self.open_ended: dict[V, None] | None = None
        """Of filters that end with ``#`` behind this level."""

    def empty(self) -> bool:
        return not (self.children or self.ending or self.open_ended)


class FilterIndex(Generic[V]):
    """Maps topics to the values of all filters that match. Values are hashable; a filter has any number.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards what follows."""
        self._root: _Node[V] = _Node()
        self._answers: dict[str, tuple[V, ...]] = {}
        """By topic. Replaced as a whole when filters change, so a glance needs no lock."""
        self._size = 0

    def __len__(self) -> int:
        """Return how many pairs of filter and value there are."""
        return self._size

    def add(self, topic_filter: TopicFilter, value: V) -> bool:
        """Give a filter a value; return whether it did not have it yet."""
        with self._lock:
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
            self._answers = {}
            return True

    def remove(self, topic_filter: TopicFilter, value: V) -> bool:
        """Take a value from a filter; return whether it had it."""
        with self._lock:
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
            self._size -= 1
            self._answers = {}
            return True

    def match(self, topic: str) -> tuple[V, ...]:
        """Return the values of all filters that match a valid topic, each once."""
        found = self._answers.get(topic)
        if found is None:
            with self._lock:
                found = tuple(dict.fromkeys(_match(self._root, topic)))
                if len(self._answers) >= _KEPT:
                    self._answers = {}
                self._answers[topic] = found
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
    system = topic[0] == "$"  # no wildcard of the first level matches those
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
        yield from node.open_ended or ()  # "a/#" matches "a"
