"""What of a database a query wants, narrowed by what Spark tells of its conditions.

Conditions only narrow what is read: Spark applies all of them to the rows again. So a selection may
hold more than what is asked for, and must never hold less.

* ``topic``: equality, ``IN`` and ``startswith`` become topic filters.
* ``client_id`` and ``shard``: equality and ``IN`` choose shards.
* ``position``: a range.
* ``timestamp``: lower bounds, where positions go by it (``timestamps="message"``): no position lies before
  its message's time. One may lie behind it, so upper bounds are Spark's; the option ``until`` is one of positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import attrs
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from topicstore.contract.positions import first_position, to_microseconds
from topicstore.contract.topics import TopicFilter
from topicstore.storage.manifest import Manifest
from topicstore.storage.shard_map import ShardMap

__all__ = ["Selection"]

_MOST_TOPICS = 64
"""An ``IN`` with more topics is not worth as many passes."""
_LAST = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class Selection:
    """Topic filters that no topic matches two of, shards, and positions from ``first`` to ``last``, both inclusive."""

    filters: tuple[str, ...] = ("#",)
    shards: frozenset[int] | None = None
    """None: all."""
    first: int = 0
    last: int = _LAST

    @property
    def empty(self) -> bool:
        """Whether nothing can match."""
        return not self.filters or self.shards == frozenset() or self.first > self.last

    def of_shard(self, shard: int) -> bool:
        """Say whether anything of a shard may match."""
        return not self.empty and (self.shards is None or shard in self.shards)

    def narrowed(self, conditions: Iterable[Filter], manifest: Manifest) -> Selection:
        """Return what is left of the selection under conditions that all hold."""
        selection = self
        for condition in conditions:
            selection = selection._narrowed(condition, manifest)
        return selection

    def _narrowed(self, condition: Filter, manifest: Manifest) -> Selection:
        match condition:
            case EqualTo(attribute=(column,), value=value) | EqualNullSafe(attribute=(column,), value=value):
                return self if value is None else self._among(column, (value,), manifest)
            case In(attribute=(column,), value=values):
                return self._among(column, tuple(values), manifest)
            case StringStartsWith(attribute=("topic",), value=prefix):
                return attrs.evolve(self, filters=_beginning(self.filters, prefix))
            case GreaterThan(attribute=("position",), value=value):
                return self._from("position", value + 1, manifest)
            case GreaterThan(attribute=(column,), value=value) | GreaterThanOrEqual(attribute=(column,), value=value):
                return self._from(column, value, manifest)
            case LessThan(attribute=("position",), value=value):
                return attrs.evolve(self, last=min(self.last, value - 1))
            case LessThanOrEqual(attribute=("position",), value=value):
                return attrs.evolve(self, last=min(self.last, value))
        return self

    def _among(self, column: str, values: tuple[Any, ...], manifest: Manifest) -> Selection:
        values = tuple(value for value in values if value is not None)
        match column:
            case "topic" if len(set(values)) <= _MOST_TOPICS:
                return attrs.evolve(self, filters=_spelled(self.filters, values))
            case "client_id":
                shard_map = ShardMap(manifest.shards)
                return self._in_shards(frozenset(map(shard_map.of, values)))
            case "shard":
                return self._in_shards(frozenset(values))
            case "position":
                chosen = attrs.evolve(self, last=min([self.last, max(values, default=-1)]))
                return attrs.evolve(chosen, first=max([self.first, min(values, default=_LAST)]))
            case "timestamp":
                return self._from(column, min(values, default=None), manifest)
        return self

    def _in_shards(self, shards: frozenset[int]) -> Selection:
        return attrs.evolve(self, shards=shards if self.shards is None else self.shards & shards)

    def _from(self, column: str, value: Any, manifest: Manifest) -> Selection:
        if column == "position":
            return attrs.evolve(self, first=max(self.first, value))
        if column == "timestamp" and isinstance(value, datetime) and manifest.timestamps == "message":
            return attrs.evolve(self, first=max(self.first, first_position(to_microseconds(value))))
        return self


def _spelled(filters: tuple[str, ...], topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics that match one of the filters: each is its own filter."""
    parsed = [TopicFilter(text) for text in filters]
    valid = [topic for topic in sorted(set(topics)) if topic and not set(topic) & set("+#\0")]
    return tuple(topic for topic in valid if any(one.matches(topic) for one in parsed))


def _beginning(filters: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    """Narrow filters to topics that begin with the whole levels of a prefix."""
    levels = prefix.split("/")[:-1]
    narrowed = [_within(TopicFilter(text), levels) for text in filters]
    return tuple(text for text in narrowed if text is not None)


def _within(topic_filter: TopicFilter, levels: list[str]) -> str | None:
    """Return the filter of the topics that match, have these first levels and go on; None if there can be none."""
    mine = list(topic_filter.levels)
    if levels and levels[0].startswith("$") and mine[0] in ("+", "#"):
        return None
    for number, level in enumerate(levels):
        if level in ("+", "#"):
            return None
        if mine[number] == "#":
            return "/".join([*levels, "#"])
        if mine[number] not in ("+", level) or number + 1 == len(mine):
            return None
        mine[number] = level
    return "/".join(mine)
