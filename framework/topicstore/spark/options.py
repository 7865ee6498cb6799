"""The options of the data source, parsed and checked, and the part of a database that a query selects.

Conditions that Spark pushes down only narrow the read: Spark applies all of them to the rows again. So a selection may
include more than the query needs, but never less. A value that can't be a topic matches nothing.

* ``topic``: equality, ``IN`` and ``startswith`` become topic filters.
* ``client_id`` and ``shard``: equality and ``IN`` choose shards.
* ``position``: a range.
* ``timestamp``: a range. Zones that can't hold such messages are skipped (`topicstore.shard.zones`). If positions
  follow the messages' own times (``timestamps="message"``), a lower bound also bounds positions, because no position is
  earlier than its message's time. A position may be later, so an upper bound does not bound positions.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

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

from topicstore.contract.errors import InvalidArgumentError, InvalidTopicError
from topicstore.contract.positions import first_position, to_microseconds
from topicstore.contract.quantities import parse_duration
from topicstore.contract.replay_plan import By, TimeRange
from topicstore.contract.times import parse_when
from topicstore.contract.topics import MAX_TOPIC_BYTES, TopicFilter, check_topic
from topicstore.opening import shared_manifest
from topicstore.replication.settings import Cluster
from topicstore.storage.directory.manifest import Manifest, existing_manifest
from topicstore.storage.shard_map import ShardMap

__all__ = ["ReadSettings", "Selection", "WriteSettings"]

T = TypeVar("T")
_FLAGS = {"true": True, "false": False}
_READ = ("path", "of", "filter", "start", "until", "by", "ids", "maxMessagesPerTrigger", "minPartitions")
_COUNTED = ("path", "of", "filter")
_CLUSTER = "cluster"
_STORE = "cluster."
"""The beginning of the names of options of the cluster's log store."""
_READ_CLUSTER = (_CLUSTER, "filter", "start", "until", "by", "ids", "maxMessagesPerTrigger")
_OF = {"messages": None, "topics": "topics", "clients": "clients"}
_MADE_WITH = ("backend", "layout", "shards", "durability", "late", "max_skew")
"""The options that are arguments of `topicstore.open`."""
_WRITTEN = ("path", "staging", "writer", "batch", "checkpointLocation", *_MADE_WITH)
_MOST_TOPICS = 64
"""The maximum number of topics of an ``IN`` condition that become filters, because each filter is read separately."""
_LAST = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class Selection:
    """The part of a database to read: disjoint topic filters, shards, times, and positions ``first`` to ``last``.

    Both positions are inclusive. Disjoint means that no topic matches two of the filters.
    """

    filters: tuple[str, ...] = ("#",)
    shards: frozenset[int] | None = None
    """The selected shards; None for all."""
    first: int = 0
    last: int = _LAST
    timestamps: TimeRange | None = None
    """The range of the messages' own times; None for all."""

    @property
    def empty(self) -> bool:
        """Whether nothing can match."""
        times = self.timestamps
        no_time = times is not None and times.until is not None and times.start >= times.until
        return not self.filters or self.shards == frozenset() or self.first > self.last or no_time

    def of_shard(self, shard: int) -> bool:
        """Return whether messages of a shard may match."""
        return not self.empty and (self.shards is None or shard in self.shards)

    def narrowed(self, conditions: Iterable[Filter], manifest: Manifest) -> Selection:
        """Return the selection narrowed by conditions that are combined with AND."""
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
        """Return the selection narrowed to timestamps from ``start`` (inclusive) to ``until`` (exclusive)."""
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


@attrs.frozen(kw_only=True)
class ReadSettings:
    """The options of reading."""

    path: str
    """The database's directory; empty if a cluster is read."""
    cluster: Cluster | None
    """The cluster whose log store is read; None if a directory is read."""
    selection: Selection
    ends: bool
    """Whether the option ``until`` is given."""
    ids: bool
    most_messages: int | None
    """The maximum number of messages in a micro-batch; None for no limit."""
    tasks: int
    """The number of tasks that share the messages of a query or micro-batch, if there are enough messages."""
    counted: str | None
    """The kind of counts to read, ``topics`` or ``clients``; None to read messages."""

    @classmethod
    def of(cls, options: Mapping[str, str], tasks: int = 1) -> ReadSettings:
        """Return the settings in a query's options, by default with ``tasks`` tasks.

        Raises `InvalidArgumentError`, also for an unknown option.
        """
        cluster = _cluster(options)
        counted = _option(options, "of", _OF.__getitem__, None) if cluster is None else None
        if cluster is None:
            _check_known(options, _READ if counted is None else _COUNTED)
        else:
            _check_known([name for name in options if not name.lower().startswith(_STORE)], _READ_CLUSTER)
        path = _path(options) if cluster is None else ""
        start, until = (_option(options, name, _time, None) for name in ("start", "until"))
        selection = Selection(filters=(TopicFilter(options.get("filter", "#")).text,))
        by_position, bounded = _option(options, "by", _by, "position") == "position", (start, until) != (None, None)
        # Positions that follow the messages' own times may be later, so each message's own time is compared as well.
        own = False
        if bounded and by_position:
            manifest = existing_manifest(Path(path)) if cluster is None else shared_manifest(cluster)
            own = manifest.timestamps == "message"
        if not by_position or own:
            selection = attrs.evolve(selection, timestamps=TimeRange(start or 0, until))
        if by_position and start is not None:
            selection = attrs.evolve(selection, first=first_position(start))
        if by_position and until is not None and not own:
            selection = attrs.evolve(selection, last=first_position(until) - 1)
        return cls(
            path=path,
            cluster=cluster,
            selection=selection,
            ends=until is not None,
            ids=_option(options, "ids", lambda text: _FLAGS[text.lower()], False),
            most_messages=_option(options, "maxMessagesPerTrigger", _count, None),
            tasks=_option(options, "minPartitions", _count, tasks),
            counted=counted,
        )


@attrs.frozen(kw_only=True)
class WriteSettings:
    """The options of writing: where messages are written, and under which writer's name."""

    path: str
    staging: str
    writer: str | None
    batch: int
    checkpoint: str | None
    """The path of the streaming query's checkpoint, which contains the query's id."""
    making: Mapping[str, Any]
    """The arguments of `topicstore.open`."""

    @classmethod
    def of(cls, options: Mapping[str, str], *, overwrite: bool) -> WriteSettings:
        """Return the settings in a query's options. Raises `InvalidArgumentError`, also for an unknown option."""
        _check_known(options, _WRITTEN)
        if overwrite:
            raise InvalidArgumentError('messages are only ever appended: write with mode("append")')
        path, writer = Path(_path(options)), options.get("writer")
        if "batch" in options and writer is None:
            raise InvalidArgumentError("batch is the number of a writer's batch: it needs the option writer")
        if writer == "":
            raise InvalidArgumentError("the option writer is a name of at least one character")
        kinds: dict[str, Callable[[str], Any]] = {"shards": _count, "max_skew": _seconds}
        making = {name: _option(options, name, kinds.get(name, str), None) for name in _MADE_WITH}
        return cls(
            path=str(path),
            staging=_absolute(options.get("staging") or str(path.with_name(f".{path.name}.staging"))),
            writer=writer,
            batch=_option(options, "batch", _whole, 0),
            checkpoint=options.get("checkpointLocation"),
            making={name: value for name, value in making.items() if value is not None},
        )


def _seconds(text: str) -> float:
    """Return a duration in seconds; a number without a unit is in seconds."""
    try:
        return float(text)
    except ValueError:
        return parse_duration(text)


def _cluster(options: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that the options name; ``cluster.a.b`` is the entry ``b`` of the log store's option ``a``.

    Raises `InvalidArgumentError` for options of a log store without ``cluster``, and for both ``path`` and ``cluster``.
    """
    store: dict[str, Any] = {}
    for option in sorted(name for name in options if name.lower().startswith(_STORE)):
        name, _, entry = option[len(_STORE) :].partition(".")
        if not entry:
            store[name] = options[option]
        elif isinstance(entries := store.setdefault(name, {}), dict):
            entries[entry] = options[option]
        else:
            raise InvalidArgumentError(f"option {option!r} is an entry of {_STORE}{name}, which is given as a value")
    if _CLUSTER not in options:
        if store:
            raise InvalidArgumentError(f"the options {_STORE}… are of a log store, whose URL is the option {_CLUSTER}")
        return None
    if options.get("path"):
        raise InvalidArgumentError(f"a query reads a directory (path) or a log store ({_CLUSTER}), not both")
    return Cluster(options[_CLUSTER], options=store)


def _check_known(options: Iterable[str], known: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` for an unknown option. Spark's options are case-insensitive."""
    names = {name.lower(): name for name in known}
    for option in options:
        if option.lower() not in names:
            near = difflib.get_close_matches(option.lower(), names, 1)
            meant = f" Did you mean {names[near[0]]!r}?" if near else ""
            raise InvalidArgumentError(f"there is no option {option!r}; they are {', '.join(known)}.{meant}")


def _path(options: Mapping[str, str]) -> str:
    path = options.get("path")
    if not path:
        raise InvalidArgumentError('the directory of the database is missing: load("data") or save("data")')
    return _absolute(path)


def _absolute(path: str) -> str:
    """Return an absolute path, so that processes with other working directories find the same directory."""
    return str(Path(path.removeprefix("file://").removeprefix("file:")).absolute())


def _option(options: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    if name not in options:
        return default
    try:
        return parse(options[name])
    except (ValueError, KeyError) as bad:
        raise InvalidArgumentError(f"option {name!r}: {bad}") from bad


def _time(text: str) -> int | None:
    return parse_when(text, time.time_ns() // 1_000)


def _by(text: str) -> str:
    if text not in get_args(By):
        raise ValueError(f"it is position or timestamp, not {text}")
    return text


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(f"{text} is not at least 1")
    return count


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{text} is negative")
    return number


def _spelled(filters: tuple[str, ...], topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics that match one of the filters; each topic is a filter that matches itself only."""
    parsed = [TopicFilter(text) for text in filters]
    valid = filter(_is_topic, sorted(set(topics)))
    return tuple(topic for topic in valid if any(one.matches(topic) for one in parsed))


def _beginning(filters: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    """Return the filters narrowed to the complete levels of a prefix; none if no topic can begin with the prefix."""
    if prefix and not _is_topic(prefix):
        return ()
    levels = prefix.split("/")[:-1]
    narrowed = [(text, _within(TopicFilter(text), levels)) for text in filters]
    # A narrowed filter that matches valid topics can exceed MQTT's length limit; then the original filter is kept.
    return tuple(text if len(new.encode()) > MAX_TOPIC_BYTES else new for text, new in narrowed if new is not None)


def _is_topic(text: str) -> bool:
    try:
        check_topic(text)
    except InvalidTopicError:
        return False
    return True


def _within(topic_filter: TopicFilter, levels: list[str]) -> str | None:
    """Return the filter of the matching topics that begin with ``levels`` and have more; None if there can be none."""
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
