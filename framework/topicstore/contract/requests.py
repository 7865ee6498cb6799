"""What goes into the data-path hooks, and what comes out of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from .batch import MessageBatch
from .iterators import Iterator
from .model import MessageId
from .replay_plan import Order
from .state import State, StateWrite
from .topics import TopicFilter

__all__ = [
    "Destinations",
    "IterateRequest",
    "NextResult",
    "OpenDatabase",
    "ReplayRequest",
    "StoreRequest",
    "StoreResult",
    "Stream",
    "StreamsRequest",
]


class OpenDatabase(Protocol):
    """What hooks may know of the database that they are called for."""

    @property
    def path(self) -> Path:
        """Its directory, as an absolute path."""

    @property
    def id(self) -> bytes:
        """Sixteen bytes, the same for all copies of it, and in every iterator."""

    def clock(self) -> int:
        """Return the present: microseconds since the epoch, by the clock that it was opened with."""

    def state(self, shard: int) -> State:
        """Return the state of a shard."""


@attrs.frozen(kw_only=True)
class Destinations:
    """Where the rows of a batch go, if not all of them to the streams and nowhere else."""

    stored: npt.NDArray[np.bool_]
    """A value for each row: whether it goes to the streams."""
    keyed: Mapping[int, tuple[int, bytes]] = attrs.field(factory=dict)
    """Rows to be stored under a key (`topicstore.storage.keyed_messages`), with shard and key; a key has its last."""


@attrs.define(kw_only=True)
class StoreRequest:
    """Store a batch."""

    db: OpenDatabase
    batch: MessageBatch
    state: Mapping[int, Sequence[StateWrite]] = attrs.field(factory=dict)
    """State writes by shard, each shard's committed in one engine write with its messages."""
    destinations: Destinations | None = None
    """None: all rows go to the streams. Else the batch must keep its rows, each in its place."""


@attrs.frozen(kw_only=True, slots=False)
class StoreResult:
    """What was stored. All of it is visible to the next read, and durable as the database was told."""

    count: int
    """How many messages."""
    lifted: int = 0
    """How many were late and took the next position instead of their own (``late="lift"``)."""
    rejoin: Callable[[], MessageBatch] = attrs.field(repr=False)
    """Makes `batch`, which few callers look at."""

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """Return the messages with shards, positions and times, in the order handed in."""
        return self.rejoin()

    @property
    def ids(self) -> list[MessageId]:
        """Return the messages' ids, in the order handed in."""
        return self.batch.ids() if self.count else []


@attrs.frozen(kw_only=True)
class Stream:
    """A sequence of messages that is read in order, with `Database.iterate` and `Database.next`.

    Streams of different shards are independent. Within a shard, read those of a generation only
    after the end of the streams of the one before; within one generation they are independent.
    """

    shard: int
    generation: int
    number: int
    """Unique within shard and generation."""
    pattern: str
    """A topic filter that all topics of the stream match; see `topicstore.contract.layout.StreamInfo`."""
    sealed: bool
    """The generation takes no more messages."""


@attrs.define(kw_only=True)
class StreamsRequest:
    """List streams."""

    db: OpenDatabase
    topic_filter: TopicFilter
    start: int
    """Microseconds since the epoch, inclusive."""


@attrs.define(kw_only=True)
class IterateRequest:
    """Fetch a batch."""

    db: OpenDatabase
    iterator: Iterator
    """In generation 0, the messages that a shard keeps beside its streams (`topicstore.storage.keyed_messages`)."""
    limit: int
    until: int | None = None
    """Microseconds since the epoch, exclusive."""
    bound: int | None = None
    """Highest position to return, inclusive, if lower than the watermark."""
    timeout: float | None = None
    """Seconds."""


@attrs.frozen(kw_only=True)
class NextResult:
    """One batch of an iterator."""

    batch: MessageBatch
    """Messages with shards and positions. May be empty: that is not the end."""
    iterator: Iterator
    """Where to go on."""
    end_of_stream: bool
    """Nothing will ever follow: the generation is sealed and all of the stream was read."""
    caught_up: bool
    """Nothing more was visible (below ``until``) when the batch was fetched."""


@attrs.define(kw_only=True)
class ReplayRequest:
    """Plan a replay."""

    db: OpenDatabase
    topic_filter: TopicFilter
    start: int
    """Microseconds since the epoch, inclusive."""
    until: int | None
    """Microseconds since the epoch, exclusive."""
    order: Order | None
    batch_size: int
