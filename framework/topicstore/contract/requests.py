"""The requests that the data-path hooks take, and the results that they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from .batch import ALL_FIELDS, MessageBatch
from .cursors import Cursor
from .errors import TopicstoreError
from .model import MessageId
from .replay_plan import Order, TimeRange
from .state import State, StateWrite
from .topics import TopicFilter

__all__ = [
    "Destinations",
    "OpenDatabase",
    "ReadRequest",
    "ReadResult",
    "ReplayRequest",
    "StoreRequest",
    "StoreResult",
    "Stream",
]


class OpenDatabase(Protocol):
    """The part of a database's interface that hooks may use."""

    @property
    def path(self) -> Path:
        """The database's directory, as an absolute path."""

    @property
    def id(self) -> bytes:
        """The database's id: sixteen bytes, the same for all copies of it, and part of every cursor."""

    def clock(self) -> int:
        """Return the current time in microseconds since the epoch, by the clock that the database was opened with."""

    def state(self, shard: int) -> State:
        """Return the state of a shard."""


@attrs.frozen(kw_only=True)
class Destinations:
    """The destinations of a batch's rows: the shards' streams, a key of a shard's state, both, or neither."""

    stored: npt.NDArray[np.bool_]
    """Whether each row is stored in the streams."""
    keyed: Mapping[int, tuple[int, bytes]] = attrs.field(factory=dict)
    """The shard and key of each row that is stored under a key (`topicstore.storage.keyed_messages`). A key keeps the
    last message that was stored under it."""


@attrs.define(kw_only=True)
class StoreRequest:
    """A request to store a batch."""

    db: OpenDatabase
    batch: MessageBatch
    state: Mapping[int, Sequence[StateWrite]] = attrs.field(factory=dict)
    """State writes by shard. Those of a shard are committed in the same engine write as its messages."""
    destinations: Destinations | None = None
    """The destinations of the rows, or None if all rows are stored in the streams. If it is set, hooks must keep the
    number and the order of the batch's rows."""
    failures: dict[int, TopicstoreError] | None = None
    """None: if a shard's part fails, so does the request. On a site of a cluster it may be a dictionary instead: then
    the parts of other shards are stored nevertheless, and it receives the errors by shard. A shard with an error has
    stored nothing, unless the error says that this is unknown."""


@attrs.frozen(kw_only=True, slots=False)
class StoreResult:
    """The result of a store. Its messages are visible to later reads, and as durable as ``durability`` says."""

    count: int
    """The number of messages stored."""
    lifted: int = 0
    """The number of late messages that took the next position instead of their own (``late="lift"``)."""
    rejoin: Callable[[], MessageBatch] = attrs.field(repr=False)
    """A function that computes `batch` on demand, because few callers use it."""

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """The messages as they were stored, with shards, positions and times, in the order in which they were given.

        In a database with plugins these are the messages that the innermost plugin passed on. If a plugin transforms
        messages, they are in the transformed form.
        """
        return self.rejoin()

    @property
    def ids(self) -> list[MessageId]:
        """The messages' ids, in the order in which the messages were given."""
        return self.batch.ids() if self.count else []


@attrs.frozen(kw_only=True)
class Stream:
    """A sequence of messages that is read in order, with `Database.cursor` and `Database.read`.

    Streams of different shards are independent, and so are those of one generation. Within a shard, read the streams
    of a generation only after the end of all streams of the previous one.
    """

    shard: int
    generation: int
    number: int
    """The stream's number, unique within shard and generation."""
    pattern: str
    """A topic filter that all topics of the stream match; see `topicstore.contract.layout.StreamInfo`."""
    sealed: bool
    """Whether the generation takes no more messages."""


@attrs.define(kw_only=True)
class ReadRequest:
    """A request to fetch a batch."""

    db: OpenDatabase
    cursor: Cursor
    """The place to read from. A cursor with generation 0 reads the messages that a shard stores under keys, outside its
    streams (`topicstore.storage.keyed_messages`)."""
    limit: int
    until: int | None = None
    """The time up to which to read, in microseconds since the epoch, exclusive; None for no limit."""
    bound: int | None = None
    """The highest position to return, inclusive, if it is below the watermark."""
    timeout: float | None = None
    """Seconds after which the read returns the messages found so far; None for no limit."""
    columns: frozenset[str] = ALL_FIELDS
    """The columns of the batch that are used; see `topicstore.contract.layout.ReadLimits`. All of them if the database
    has plugins, because each plugin may use any column."""


@attrs.frozen(kw_only=True)
class ReadResult:
    """One batch of a cursor."""

    batch: MessageBatch
    """The messages, with shards and positions. An empty batch doesn't mean that the stream has ended."""
    cursor: Cursor
    """The place from which to continue."""
    end_of_stream: bool
    """Whether no message can ever follow, because the generation is sealed and all of the stream was read."""
    caught_up: bool
    """Whether no more messages (before ``until``) were visible when the batch was fetched."""


@attrs.define(kw_only=True)
class ReplayRequest:
    """A request to plan a replay."""

    db: OpenDatabase
    topic_filter: TopicFilter
    start: int
    """The time of the first position, in microseconds since the epoch, inclusive."""
    until: int | None
    """The time of the last position, in microseconds since the epoch, exclusive; None for no end."""
    order: Order
    batch_size: int
    timestamps: TimeRange | None = None
    """The range in which a message's own timestamp, as it was stored, must lie; None for all. The plan that a hook
    returns must have the same range."""
    columns: frozenset[str] = ALL_FIELDS
    """The columns of the messages that the caller uses; see `ReadRequest.columns`."""
