"""The options of the data source, checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import first_position
from topicstore.contract.topics import TopicFilter
from topicstore.times import parse_when

from .selection import Selection

__all__ = ["ReadSettings", "WriteSettings"]

T = TypeVar("T")
_FLAGS = {"true": True, "false": False}


@attrs.frozen(kw_only=True)
class ReadSettings:
    """What is read, and how."""

    path: str
    selection: Selection
    ids: bool
    most_messages: int | None
    """Of a micro-batch."""
    least_partitions: int
    """Of a batch query, where there are enough messages."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadSettings:
        """Return what a query's options say. Raises `InvalidArgumentError`."""
        start, until = (_option(options, name, _time, None) for name in ("start", "until"))
        selection = Selection(filters=(TopicFilter(options.get("filter", "#")).text,))
        if start is not None:
            selection = attrs.evolve(selection, first=first_position(start))
        if until is not None:
            selection = attrs.evolve(selection, last=first_position(until) - 1)
        return cls(
            path=_path(options),
            selection=selection,
            ids=_option(options, "ids", lambda text: _FLAGS[text.lower()], False),
            most_messages=_option(options, "maxMessagesPerTrigger", _count, None),
            least_partitions=_option(options, "minPartitions", _count, os.cpu_count() or 1),
        )


@attrs.frozen(kw_only=True)
class WriteSettings:
    """Where messages are written, and as whose."""

    path: str
    staging: str
    writer: str | None
    batch: int
    checkpoint: str | None
    """The checkpoint of the streaming query, which has its id."""
    making: Mapping[str, Any]
    """Arguments of `topicstore.open`."""

    @classmethod
    def of(cls, options: Mapping[str, str], *, overwrite: bool) -> WriteSettings:
        """Return what a query's options say. Raises `InvalidArgumentError`."""
        if overwrite:
            raise InvalidArgumentError('messages are only ever appended: write with mode("append")')
        path, writer = Path(_path(options)), options.get("writer")
        if "batch" in options and writer is None:
            raise InvalidArgumentError("batch is the number of a writer's batch: it needs the option writer")
        if writer == "":
            raise InvalidArgumentError("the option writer is a name of at least one character")
        kinds: dict[str, Callable[[str], Any]] = {"shards": _count, "max_skew": float}
        names = ("backend", "layout", "shards", "durability", "late", "max_skew")
        making = {name: _option(options, name, kinds.get(name, str), None) for name in names}
        return cls(
            path=str(path),
            staging=options.get("staging", str(path.with_name(f".{path.name}.staging"))),
            writer=writer,
            batch=_option(options, "batch", _whole, 0),
            checkpoint=options.get("checkpointLocation"),
            making={name: value for name, value in making.items() if value is not None},
        )


def _path(options: Mapping[str, str]) -> str:
    path = options.get("path")
    if not path:
        raise InvalidArgumentError('the directory of the database is missing: load("data") or save("data")')
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
