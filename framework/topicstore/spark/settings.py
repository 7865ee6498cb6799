"""The options of the data source, parsed and checked."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import attrs

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import By, TimeRange
from topicstore.contract.times import parse_when
from topicstore.contract.topics import TopicFilter
from topicstore.storage.manifest import existing_manifest

from .selection import Selection

__all__ = ["ReadSettings", "WriteSettings"]

T = TypeVar("T")
_FLAGS = {"true": True, "false": False}
_READ = ("path", "of", "filter", "start", "until", "by", "ids", "maxMessagesPerTrigger", "minPartitions")
_COUNTED = ("path", "of", "filter")
_OF = {"messages": None, "topics": "topics", "clients": "clients"}
_MADE_WITH = ("backend", "layout", "shards", "durability", "late", "max_skew")
"""The options that are arguments of `topicstore.open`."""
_WRITTEN = ("path", "staging", "writer", "batch", "checkpointLocation", *_MADE_WITH)


@attrs.frozen(kw_only=True)
class ReadSettings:
    """The options of reading."""

    path: str
    selection: Selection
    ends: bool
    """Whether there is a time at which the read ends."""
    ids: bool
    most_messages: int | None
    """The most messages of a micro-batch."""
    least_partitions: int
    """The least number of partitions of a batch query, if there are enough messages."""
    counted: str | None
    """The kind of counts to read, ``topics`` or ``clients``. None: messages are read."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadSettings:
        """Return the settings in a query's options. Raises `InvalidArgumentError`, also for an unknown option."""
        counted = _option(options, "of", _OF.__getitem__, None)
        _check_known(options, _READ if counted is None else _COUNTED)
        start, until = (_option(options, name, _time, None) for name in ("start", "until"))
        selection = Selection(filters=(TopicFilter(options.get("filter", "#")).text,))
        by_position, bounded = _option(options, "by", _by, "position") == "position", (start, until) != (None, None)
        # Where positions go by the messages' own times, some may be later; then each message is judged by its own.
        own = bounded and by_position and existing_manifest(Path(_path(options))).timestamps == "message"
        if not by_position or own:
            selection = attrs.evolve(selection, timestamps=TimeRange(start or 0, until))
        if by_position and start is not None:
            selection = attrs.evolve(selection, first=first_position(start))
        if by_position and until is not None and not own:
            selection = attrs.evolve(selection, last=first_position(until) - 1)
        return cls(
            path=_path(options),
            selection=selection,
            ends=until is not None,
            ids=_option(options, "ids", lambda text: _FLAGS[text.lower()], False),
            most_messages=_option(options, "maxMessagesPerTrigger", _count, None),
            least_partitions=_option(options, "minPartitions", _count, os.cpu_count() or 1),
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
    """The checkpoint of the streaming query, which has its id."""
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
        kinds: dict[str, Callable[[str], Any]] = {"shards": _count, "max_skew": float}
        making = {name: _option(options, name, kinds.get(name, str), None) for name in _MADE_WITH}
        return cls(
            path=str(path),
            staging=_absolute(options.get("staging") or str(path.with_name(f".{path.name}.staging"))),
            writer=writer,
            batch=_option(options, "batch", _whole, 0),
            checkpoint=options.get("checkpointLocation"),
            making={name: value for name, value in making.items() if value is not None},
        )


def _check_known(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Refuse an option that would be ignored. Spark's options are case-insensitive."""
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
    """Return a path that names the same directory whatever the working directory of a process is."""
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
