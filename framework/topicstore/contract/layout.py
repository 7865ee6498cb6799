"""The contract of a layout, which encodes messages as keys and values of an engine, and decodes them.

A **layout** creates slabs; a **slab** holds the messages of one generation of one shard. The logical layer, that is,
topicstore's shards and storage, accesses messages only through slabs. Layouts are the only code that touches an
engine's ``meta``, ``data``, ``index`` and ``keys`` keyspaces, and each slab touches only the keys of its own
generation: keys of bytes begin with `encode_generation`, tuples with the generation's number, so that a generation is
dropped by four range deletes.

The logical layer guarantees to a slab:

* Messages arrive in order of strictly increasing positions, one batch at a time. A batch has columns
  of any of the forms of `topicstore.contract.columns`; its positions are an array of unsigned 64-bit numbers.
* Writers (`Slab.store`, `Slab.delete`) are serialised; readers run concurrently with them, in any thread.
* `Slab.compact` runs concurrently with `Slab.store` and readers. No step of it runs concurrently with a step of a
  delete or of another compaction. Such steps may run between two of its steps, so each step must read the stored state
  again.
* Reads never request positions above ``bound``. All positions up to it are committed, and in the current generation
  ``bound`` is never above the position that `Slab.visible` returns. It is -1 if nothing is committed.

A slab guarantees to the logical layer:

* Every message is read back as it was stored, whatever its size: payloads of up to 256 MB, strings of up to 65,535
  bytes, timestamps from 0 to `topicstore.contract.positions.MAX_TIME`, positions of 64 bits, batches of any length.
* Topics and client ids are compared by all their characters, and never by a hash or a normalised form. This holds for
  any number of names, and for names that were not used for a long time.
* After any change (a store, a failed store, a delete, a compaction, a reopening) every reading method returns exactly
  the remaining messages. No result that was cached before the change is returned.
* A place (an offset in a stream, in a form that the layout defines) stays valid for any time, beside any number of
  other places, and in every process that opens the slab.
* A read that has ended occupies no memory.

Capabilities a layout may declare:

``position_order``
    A whole stream is returned in order of positions. Without it, only each publisher's messages of each topic are, and
    `Slab.epoch` says within how many positions the others may be reordered.
``few_streams``
    Hundreds of topics that differ in one or two levels share a few streams, and a new generation inherits the learned
    structure of the previous one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from .batch import ALL_FIELDS, MessageBatch
from .columns import Coded, Constant
from .engine import Engine, WriteBatch
from .options import NoOptions
from .positions import Positions
from .topics import TopicFilter

__all__ = [
    "CompactStep",
    "Damage",
    "DeleteStep",
    "Heads",
    "Layout",
    "ReadCounters",
    "ReadLimits",
    "Slab",
    "SlabInfo",
    "SlabStep",
    "StreamInfo",
    "TopicNode",
]


@attrs.frozen(kw_only=True)
class ReadLimits:
    """The limits of one call of `Slab.next`."""

    rows: int
    """The maximum number of rows in the batch; at least 1. A layout may end a batch earlier. A reader that accepts
    8,192 rows or more wants large batches, because it converts whole columns, as to Arrow."""
    bytes: int
    """The approximate maximum size of the batch's payloads in bytes. The first row is returned whatever its size."""
    bound: int
    """The highest position to return, inclusive."""
    deadline: float | None = None
    """The time, by `time.monotonic`, after which the call returns the rows found so far; None for no limit. The layout
    checks the clock after at most 65,536 rows."""
    columns: frozenset[str] = ALL_FIELDS
    """The columns of the batch that the caller uses, besides topics, positions and shards. A layout may leave others
    unread, and return `topicstore.contract.batch.unread` for them; payloads that are left unread count no bytes."""


@attrs.frozen(kw_only=True)
class StreamInfo:
    """One stream of a slab."""

    stream: int
    """The number that the layout has given to the stream, unique within the slab."""
    pattern: str
    """A topic filter that matches all topics of the stream. For topics that begin with ``$`` its first level may be
    ``$+``, because no wildcard matches such a level in MQTT."""


@attrs.frozen(kw_only=True)
class SlabInfo:
    """A slab's statistics."""

    streams: int
    details: Mapping[str, str | int] = attrs.field(factory=dict)
    """Other values worth showing to a person, by name."""


@attrs.frozen(kw_only=True)
class SlabStep:
    """The result of one call of `Slab.next`."""

    batch: MessageBatch
    """The messages, with positions and shards. The batch may be empty although more messages follow."""
    place: bytes
    """The place from which the next call continues."""
    exhausted: bool
    """Whether no message up to the bound follows ``place``."""


@attrs.frozen(kw_only=True)
class DeleteStep:
    """One step of a delete."""

    write: WriteBatch
    """The write that removes the messages; it may be empty."""
    messages: int
    """The number of messages that the write removes."""
    freed: int
    """The size of the removed values less the size of the values that replace them, in bytes."""


@attrs.frozen(kw_only=True, eq=False)
class Heads:
    """The metadata of messages in a range of positions, without the payloads. Messages are counted from it.

    The columns have equal length, and their rows may be in any order.
    """

    before: int
    """The position before the range; -1 if the range begins with the first position."""
    last: int
    """The last position of the range."""
    topics: Coded | Constant[str]
    """The topics. A `Coded` column may list a text repeatedly, and texts that no row has."""
    client_ids: Coded | Constant[str]
    """The client ids, in the same forms."""
    positions: Positions
    sizes: npt.NDArray[np.integer[Any]]
    """The number of bytes of each payload."""


@attrs.frozen(kw_only=True)
class CompactStep:
    """One step of a compaction."""

    write: WriteBatch
    """The write that replaces stored messages with the same messages in another form. It is never empty."""
    messages: int
    """The number of messages that the write replaces."""
    freed: int
    """The size of the removed values less the size of the values that replace them, in bytes."""
    heads: Heads | None = None
    """All messages of the slab in a range of positions, which the step rewrites. The framework counts them in the same
    write. None if the slab doesn't read heads (`Slab.reads_heads`)."""


@attrs.frozen(kw_only=True)
class TopicNode:
    """One node of the tree of topic levels that a slab has learned from its topics."""

    path: tuple[str, ...]
    """The levels from the root: literal levels, ``+``, or ``#`` as the last. Topics that begin with ``$`` have a
    separate tree, in which a first level learned as ``+`` is written ``$+``."""
    stream: int | None
    """The stream of the topics that end at this node; None if no topic ends here."""


@attrs.frozen(kw_only=True)
class Damage:
    """One damaged place, as `Database.verify` reports it."""

    place: str
    """The shard, generation, keyspace and key, where known."""
    reason: str
    """A sentence that describes the damage."""


@attrs.define
class ReadCounters:
    """Counters of the work done by reads of a slab since it was opened. `Database.info` shows them."""

    seeks: int = 0
    """The number of scans begun."""
    visited: int = 0
    """The number of blocks or keys decoded, at least in part."""
    skipped: int = 0
    """The number of blocks or keys skipped without decoding their rows."""
    rows: int = 0
    """The number of messages returned."""


class Slab(ABC):
    """The messages of one generation of one shard."""

    counters: ReadCounters
    """The counters of this slab's reads. ``__init__`` creates them and `next` increments them without a lock, so
    concurrent readers may lose counts."""

    epoch: int = 1
    """The number of positions in an epoch, a power of two. If it is 1, streams are in order of positions. Otherwise
    epochs are read in order, but the layout chooses the order of messages within an epoch."""

    reads_heads: bool = False
    """Whether the slab implements `heads`, and each step of `compact` has `CompactStep.heads`.

    The framework then counts compacted messages in the write of the step, and all other messages when a count is
    requested. Otherwise it reads all messages in the background to count them."""

    @abstractmethod
    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add to ``write`` all records that store the batch, whose positions and timestamps are set.

        The commit of ``write`` may fail, and the next `store` may be of another batch. So changes of the slab's
        in-memory state must be harmless without the commit: the records of these changes (new ids, learned structure)
        are added to each write until `committed` is called.
        """

    @abstractmethod
    def committed(self) -> None:
        """Record that the engine has committed the ``write`` of the last `store`."""

    @abstractmethod
    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the streams that may hold matching messages."""

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the numbers of streams that together have each matching message exactly once, cheapest first.

        Streams whose last message lies before position ``first`` may be left out. A layout that can read many of its
        streams in one pass may return a number that `streams` doesn't list, which `begin` and `next` must accept.
        """
        return [info.stream for info in self.streams(topic_filter)]

    def visible(self, stream: int, watermark: int) -> int:
        """Return the highest position of a stream that may be read when later writes are above ``watermark``.

        The current epoch (see `epoch`) stays hidden until it ends, because in the layout's order a later message may
        come before messages of the epoch that were already read.
        """
        return (watermark + 1) // self.epoch * self.epoch - 1

    @abstractmethod
    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place (the offset) in a stream before the first message at or after ``position``.

        Raises `KeyError` if the stream doesn't exist. Places stay valid across restarts, deletes
        and compaction.
        """

    def reached(self, stream: int, place: bytes) -> int | None:
        """Return the highest position that a reader at ``place`` may have read; -1 if it has read nothing.

        The caller uses it to refuse a place after all stored messages, which occurs after a restore from an older copy.
        The default returns None, which means unknown. Raises the errors of `next` for an invalid place.
        """
        return None

    @abstractmethod
    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Return the matching messages that follow ``place``, in the stream's order.

        The call returns when the first of ``limits`` is reached. At a deadline the returned place must be after
        ``place``, even if no row was found, so that repeated calls make progress. Unreadable messages are never
        skipped: the call raises `CorruptionError`, or `NewerFormatError` for an unknown version, and names the place.
        Raises `ValueError` if ``place`` isn't a place of this layout, and `KeyError` or `ValueError` if the stream
        doesn't exist.

        ``recovery="salvage"`` reads slabs in which writes in the middle are missing, but never writes to them. The
        contents of a missing write, such as the name that an id stands for, must not be guessed: a message is
        returned exactly as it was stored, or not at all.
        """

    def heads(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[Heads]:
        """Yield the metadata (`Heads`) of the matching messages at positions ``first`` to ``last``, inclusive.

        The ranges of the yielded heads follow each other without gaps: the first begins at ``first``, and the last ends
        at ``last``. A range may have no matching message. The caller may cancel between two heads, so each takes
        bounded memory and much less than a second. Raises the errors of `next` for unreadable messages; payloads aren't
        checked. Only a slab that `reads_heads` implements it, and only with an `epoch` of 1.
        """
        raise NotImplementedError

    def newest(
        self, stream: int, topic_filter: TopicFilter, first: int, last: int, rows: int
    ) -> tuple[int, int] | None:
        """Return a span of positions, within ``first`` to ``last``, that has the stream's newest matching messages.

        No message between the span's end and ``last`` matches, and a read of the span returns about ``rows`` messages,
        fewer if more of them would cost much more. The span begins after its end only if nothing matches at all. The
        default returns None, which means unknown. Raises the errors of `next`.
        """
        return None

    @abstractmethod
    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Yield steps that together remove the matching messages at positions ``first`` to ``last``, inclusive.

        Messages whose topics match one of ``spare``, which has any number of filters, are kept.

        Each step is committed before the next is requested, and no other write happens between the request and the
        commit. To keep that time short, a step examines a bounded number of blocks or keys; it may remove nothing.
        """

    def backlog(self, messages: int) -> int:
        """Return how many of the slab's ``messages`` are due for compaction. This must be cheap."""
        return 0

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Yield steps that rewrite the messages up to ``bound`` in a form that is faster to read.

        With ``whole``, all messages are rewritten into the layout's most compact form; without it, only those where the
        gain is worth the work. Each step is committed before the next is requested; after a failed commit, no other
        step is requested. Compaction preserves the order of messages and the validity of places. A step takes bounded
        memory and much less than a second. The default yields no step.
        """
        return iter(())

    def learned(self) -> Iterator[TopicNode]:
        """Yield the learned structure of the topics, parents before children. The default yields nothing."""
        return iter(())

    @abstractmethod
    def info(self) -> SlabInfo:
        """Return the slab's statistics. This must be cheap."""

    @abstractmethod
    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Read everything up to ``bound``; yield each damaged place, and in between the numbers of intact messages.

        All keyspaces that the slab uses are read, and reading continues after damage. The numbers count every message
        up to ``bound``, and later messages that are merged with them.
        """


class Layout(ABC):
    """A factory of slabs, with one set of options."""

    format: ClassVar[int] = 1
    """The version of the stored form, which is recorded with each generation. A generation of a higher version is
    refused with `NewerFormatError`. Increment it for every change that older versions of the layout would misread."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class of the layout's options. They are stored with each generation."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Add to ``write`` the records of a new, empty slab.

        ``parent`` is the slab of the previous generation, if that has the same layout, else None. A layout that
        inherits the parent's learned topic structure adds it to ``write``.
        """

    @abstractmethod
    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Return the slab that `create` made. The time must not depend on the number of stored messages."""
