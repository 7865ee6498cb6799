"""The interface of workloads: messages in order of time, generated or read in parts, and requests to replay them.

A plugin provides a *kind* of workload through the hook ``topicstore_workloads``: a `WorkloadSpec` whose target is a
subclass of `Workload`. A TOML file names a kind and sets its options (see `definition`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import pyarrow as pa
from topicstore import TopicFilter
from topicstore.contract.errors import InvalidArgumentError

from topicstore_benchmarks.results import DEVICE, LATE_START, REPLAY_ALL, WILDCARD, WORKER, phases

__all__ = ["Workload", "WorkloadError", "WorkloadOptions"]


class WorkloadError(InvalidArgumentError):
    """Raised, before anything is measured, if a workload's file, options or messages are invalid."""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every kind's ``Options``, which are the keys of the table ``[workload]`` in a TOML file.

    Options must be encodable as JSON, because a hash of them identifies the data set.
    """

    kind: str
    """Name of the kind, under which its plugin registered it."""
    summary: str = ""
    """One line of description; a kind may insert numbers that depend on the number of messages."""
    messages: int | None = None
    """The number of messages of a full run; a run may use fewer. None means all messages."""
    requests: Mapping[str, tuple[str, ...]] = {}
    """Additional filters to replay, by the names of their requests."""

    def limited(self, messages: int | None) -> WorkloadOptions:
        """Return the options with at most ``messages`` messages."""
        if messages is None or (self.messages is not None and self.messages <= messages):
            return self
        return msgspec.structs.replace(self, messages=messages)


class Workload(ABC):
    """Messages in order of time, in parts that can be made independently of each other.

    Every process that makes parts creates its own object, from ``options`` and from ``beside``, the directory of the
    TOML file, to which relative paths in the options are relative.

    The same options must always yield the same messages, in any process. A part's random numbers must therefore be
    seeded with the part's number.
    """

    Options: ClassVar[type[WorkloadOptions]] = WorkloadOptions
    replaceable: ClassVar[tuple[str, ...]] = ()
    """The built-in requests whose filters may be replaced by the options' ``requests``."""

    def __init__(self, options: WorkloadOptions, beside: Path) -> None:
        self.options = options
        self.beside = beside
        known = (REPLAY_ALL, WILDCARD, DEVICE, LATE_START)
        for name, filters in options.requests.items():
            if not filters or name == WORKER or name in set(phases(known)).difference(self.replaceable):
                raise WorkloadError(f"'requests' has {name!r}, which is a phase of its own or has no filters")
            for text in filters:
                TopicFilter(text)  # raises for an invalid filter

    @property
    def summary(self) -> str:
        """Return one line of description of these messages."""
        return self.options.summary

    def why_missing(self) -> str | None:
        """Return why the messages are not available, such as a missing file, or None if they are."""
        return None

    def identity(self) -> str:
        """Return a text that, together with the options, identifies the messages: a version, or a file's hash."""
        return ""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Return the number of parts, at least 1."""

    @abstractmethod
    def part(self, number: int) -> pa.RecordBatch:
        """Return the messages of a part, numbered from 0, with the schema `topicstore.SCHEMA`.

        All messages have a timestamp. Timestamps never decrease, within a part or from one to the next, and lie in the
        past. A part should have 10,000 to 100,000 messages, because it is in memory as a whole. Raises `WorkloadError`.
        """

    @abstractmethod
    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return filters by the name of their request; filters of one request are replayed one after the other.

        The request ``wildcard`` must have a filter that many topics match, but not all. ``one device`` must have
        filters that each match the topics of one device, or one topic, and not only those with many messages. Others
        may follow. Replays of everything and of the last hundredth of the messages are added. Each filter must match at
        least one message. Called once, in the process that makes the data set.
        """
