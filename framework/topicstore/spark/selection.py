"""The part of a database that a query wants, narrowed by the conditions that Spark passes on.

Conditions only narrow the read: Spark applies all of them to the rows again. So a selection may
hold more than the query asks for, and must never hold less. A value that can't be a topic matches nothing.

* ``topic``: equality, ``IN`` and ``startswith`` become topic filters.
* ``client_id`` and ``shard``: equality and ``IN`` choose shards.
* ``position``: a range.
* ``timestamp``: a range. Parts that are known to hold no such messages are not read (`topicstore.shard.zones`). If
  positions go by timestamps (``timestamps="message"``), lower bounds are bounds of positions too, because no position
  lies before its message's time. One may lie after it, so upper bounds are not.
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

from topicstore.contract.errors import InvalidTopicError
from topicstore.contract.positions import first_position, to_microseconds
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.topics import MAX_TOPIC_BYTES, TopicFilter, check_topic
from topicstore.storage.manifest import Manifest
from topicstore.storage.shard_map import ShardMap

__all__ = ["Selection"]

_MOST_TOPICS = 64
"""The most topics of an ``IN`` that become filters: each takes a pass of its own."""
_LAST = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class Selection:
    """Topic filters that no topic matches two of, shards, and positions from ``first`` to ``last``, both inclusive."""

    filters: tuple[str, ...] = ("#",)
    shards: frozenset[int] | None = None
    """The wanted shards. None: all."""
    first: int = 0
    last: int = _LAST
    timestamps: TimeRange | None = None
    """The times of wanted messages. None: all."""

    @property
    def empty(self) -> bool:
        """Whether nothing can match."""
        times = self.timestamps
        no_time = times is not None and times.until is not None and times.start >= times.until
        return not self.filters or self.shards == frozenset() or self.first > self.last or no_time

    def of_shard(self, shard: int) -> bool:
        """Return whether anything of a shard may match."""
        return not self.empty and (self.shards is None or shard in self.shards)

    def narrowed(self, conditions: Iterable[Filter], manifest: Manifest) -> Selection:
        """Return the rest of the selection under conditions that all hold."""
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
            case LessThan(attribute=("timestamp",), value=value):
                return self._within(0, to_microseconds(value)) if isinstance(value, datetime) else self
            case LessThanOrEqual(attribute=("timestamp",), value=value):
                return self._within(0, to_microseconds(value) + 1) if isinstance(value, datetime) else self
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
            case "timestamp" if values and all(isinstance(value, datetime) for value in values):
                ends = GreaterThanOrEqual((column,), min(values)), LessThanOrEqual((column,), max(values))
                return self.narrowed(ends, manifest)
        return self

    def _within(self, start: int, until: int | None) -> Selection:
        """Return the rest of the selection with timestamps from ``start`` to before ``until``."""
        mine = self.timestamps or TimeRange()
        ends = [end for end in (mine.until, until) if end is not None]
        return attrs.evolve(self, timestamps=TimeRange(max(mine.start, start), min(ends, default=None)))

    def _in_shards(self, shards: frozenset[int]) -> Selection:
        return attrs.evolve(self, shards=shards if self.shards is None else self.shards & shards)

    def _from(self, column: str, value: Any, manifest: Manifest) -> Selection:
        if column == "position":
            return attrs.evolve(self, first=max(self.first, value))
        if column == "timestamp" and isinstance(value, datetime):
            time = to_microseconds(value)
            first = first_position(time) if manifest.timestamps == "message" else 0
            return attrs.evolve(self._within(time, None), first=max(self.first, first))
        return self


def _spelled(filters: tuple[str, ...], topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics that match one of the filters: each is its own filter."""
    parsed = [TopicFilter(text) for text in filters]
    valid = filter(_is_topic, sorted(set(topics)))
    return tuple(topic for topic in valid if any(one.matches(topic) for one in parsed))


def _beginning(filters: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    """Narrow filters to topics that begin with the whole levels of a prefix; none if no topic can begin with it."""
    if prefix and not _is_topic(prefix):
        return ()
    levels = prefix.split("/")[:-1]
    narrowed = [(text, _within(TopicFilter(text), levels)) for text in filters]
    # A narrowed filter can be longer than MQTT allows, though topics match it. Then the whole filter is read.
    return tuple(text if len(new.encode()) > MAX_TOPIC_BYTES else new for text, new in narrowed if new is not None)


def _is_topic(text: str) -> bool:
    try:
        check_topic(text)
    except InvalidTopicError:
        return False
    return True


def _within(topic_filter: TopicFilter, levels: list[str]) -> str | None:
    """Return the filter of the topics that match, have these first levels and more; None if there can be none."""
    mine = list(topic_filter.levels)
    if levels and levels[0].startswith("$") and mine[0] in ("+", "#"):
        return None
    for number, level in enumerate(levels):
        if mine[number] == "#":
            return "/".join([*levels, "#"])
        if mine[number] not in ("+", level) or number + 1 == len(mine):
            return None
        mine[number] = level
    return "/".join(mine)
