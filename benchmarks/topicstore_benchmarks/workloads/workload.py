"""The interface of workloads: messages in order of time, made in parts, and requests for them.

A plugin brings a *kind* of workload through the hook ``topicstore_workloads``: a `WorkloadSpec` whose target is
a subclass of `Workload`. A TOML file names a kind and sets its options (`definition`).
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
    """A workload is not what it should be: its file, an option, its messages. Nothing was measured."""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every kind's ``Options``: what the table ``[workload]`` of a TOML file may say.

    Plain values, lists and tables of them: the options, as JSON, name the data that is made.
    """

    kind: str
    """Name of the kind, as its plugin registered it."""
    summary: str = ""
    """One line for people, of a full run; a kind may fill in numbers that depend on how many messages there are."""
    messages: int | None = None
    """The number of messages of a full run; a run may use fewer. None means all messages."""
    requests: Mapping[str, tuple[str, ...]] = {}
    """More filters to replay, by the names of their requests."""

    def limited(self, messages: int | None) -> WorkloadOptions:
        """Return the options with at most ``messages`` messages."""
        if messages is None or (self.messages is not None and self.messages <= messages):
            return self
        return msgspec.structs.replace(self, messages=messages)


class Workload(ABC):
    """Messages in order of time, in parts that can be made one without the other.

    Objects are made in every process that makes parts: from ``options``, and the directory ``beside`` of the
    file that these came from (relative paths in them start there).

    The same options always give the same messages, whichever process makes a part. So the randomness of a part
    is seeded with its number.
    """

    Options: ClassVar[type[WorkloadOptions]] = WorkloadOptions
    replaceable: ClassVar[tuple[str, ...]] = ()
    """Names of requests that every workload has, and for which the options' ``requests`` may give other filters."""

    def __init__(self, options: WorkloadOptions, beside: Path) -> None:
        self.options = options
        self.beside = beside
        known = (REPLAY_ALL, WILDCARD, DEVICE, LATE_START)
        for name, filters in options.requests.items():
            if not filters or name == WORKER or name in set(phases(known)).difference(self.replaceable):
                raise WorkloadError(f"'requests' has {name!r}, which is a phase of its own or has no filters")
            for text in filters:
                TopicFilter(text)  # raises

    @property
    def summary(self) -> str:
        """One line for people, true of these messages."""
        return self.options.summary

    def why_missing(self) -> str | None:
        """Return why there are no messages here, such as a file that isn't there; None if there are."""
        return None

    def identity(self) -> str:
        """Return what besides the options decides which messages these are: a version, or the size of a file."""
        return ""

    @property
    @abstractmethod
    def parts(self) -> int:
        """The number of parts, at least 1."""

    @abstractmethod
    def part(self, number: int) -> pa.RecordBatch:
        """Return the messages of a part, of `topicstore.SCHEMA`, all of them with a timestamp.

        Timestamps never fall, within a part or from one to the next, and lie in the past. A part has some
        10,000 to 100,000 messages; it is in memory as a whole. Raises `WorkloadError`.
        """

    @abstractmethod
    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return filters by the name of their request; those of one name are replayed one after the other.

        There are ``wildcard``, a filter that many topics match, but not all, and ``one device``, filters that each
        match the topics of one device, or one topic, and not all of busy ones. Any others may follow. Replays of
        everything and of the last hundredth in time are added to them. Each filter matches at least one message.
        Called once, where the data is made.
        """
