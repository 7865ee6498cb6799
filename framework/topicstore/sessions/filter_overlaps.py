"""`FilterOverlaps`: an index that finds the filters that overlap with a given one, so that some topic matches both.

Filters are kept in a tree (trie) of their levels, and a look-up visits only the branches that can overlap. So a new
subscription is not compared with every subscription of its session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from topicstore.contract.topics import TopicFilter

__all__ = ["FilterOverlaps"]

V = TypeVar("V")


class _Node(Generic[V]):
    """A node of the tree: one level of filters."""

    __slots__ = ("children", "ending", "open_ended")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] = {}
        """The next levels."""
        self.ending: V | None = None
        """The value of the filter that ends here."""
        self.open_ended: V | None = None
        """The value of the filter that ends with ``#`` after this level."""

    def values(self) -> Iterator[V]:
        if self.ending is not None:
            yield self.ending
        if self.open_ended is not None:
            yield self.open_ended

    def empty(self) -> bool:
        return not self.children and self.ending is None and self.open_ended is None


class FilterOverlaps(Generic[V]):
    """A map from filters to values, searched by overlap."""

    __slots__ = ("_new", "_root")

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()
        self._new: tuple[tuple[TopicFilter, V], ...] = ()
        """Filters added since the last look-up; most sessions have one filter, and so never build the tree."""

    def add(self, topic_filter: TopicFilter, value: V) -> None:
        """Add a filter, or replace its value."""
        self._new = (*self._new, (topic_filter, value))

    def _keep(self, topic_filter: TopicFilter, value: V) -> None:
        path, open_ended = _path(topic_filter)
        node = self._root
        for level in path:
            found = node.children.get(level)
            if found is None:
                found = node.children[level] = _Node()
            node = found
        if open_ended:
            node.open_ended = value
        else:
            node.ending = value

    def _look(self) -> None:
        new, self._new = self._new, ()
        for topic_filter, value in new:
            self._keep(topic_filter, value)

    def remove(self, topic_filter: TopicFilter, value: object) -> None:
        """Remove a filter if ``value`` is its value, compared by identity."""
        self._look()
        path, open_ended = _path(topic_filter)
        way = [self._root]
        for level in path:
            found = way[-1].children.get(level)
            if found is None:
                return
            way.append(found)
        if open_ended and way[-1].open_ended is value:
            way[-1].open_ended = None
        elif not open_ended and way[-1].ending is value:
            way[-1].ending = None
        while path and way[-1].empty():
            way.pop()
            del way[-1].children[path.pop()]

    def overlapping(self, topic_filter: TopicFilter) -> Iterator[V]:
        """Yield the values of the filters that overlap with this one, in no particular order.

        The empty topic counts as well, although no message can be published to it: ``+`` and ``/#`` overlap.
        """
        self._look()
        path, open_ended = _path(topic_filter)
        system = path[:1] != [] and path[0][:1] == "$"  # not matched by wildcards in the first level [MQTT-4.7.2-1]
        left: list[tuple[_Node[V], int]] = [(self._root, 0)]
        while left:
            node, depth = left.pop()
            hidden = system and not depth
            if depth > len(path):  # anything below may be matched by its "#"
                yield from node.values()
                left += [(child, depth + 1) for child in node.children.values()]
                continue
            if node.open_ended is not None and not hidden:
                yield node.open_ended
            if depth == len(path):
                if node.ending is not None:  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
                    yield node.ending
                levels = list(node.children) if open_ended else []
            elif path[depth] == "+":
                levels = list(node.children)
            else:
                levels = [path[depth]] if hidden else [path[depth], "+"]
            for level in levels:
                found = node.children.get(level)
                if found is not None and (depth or hidden or level[:1] != "$"):
                    left.append((found, depth + 1))

    def matching(self, topic: str) -> list[V]:
        """Return the values of the filters that match a valid topic, in no particular order."""
        self._look()
        found: list[V] = []
        nodes, hidden = [self._root], topic[0] == "$"  # not matched by wildcards in the first level [MQTT-4.7.2-1]
        for level in topic.split("/"):
            following: list[_Node[V]] = []
            for node in nodes:
                if node.open_ended is not None and not hidden:
                    found.append(node.open_ended)
                children = node.children
                if level in children:
                    following.append(children[level])
                if "+" in children and not hidden:
                    following.append(children["+"])
            nodes, hidden = following, False
        for node in nodes:
            found += node.values()  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
        return found


def _path(topic_filter: TopicFilter) -> tuple[list[str], bool]:
    """Return the levels of a filter before a ``#`` at its end, and whether it has one."""
    levels = list(topic_filter.levels)
    return (levels[:-1], True) if levels[-1] == "#" else (levels, False)
