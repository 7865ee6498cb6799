"""The contract of a layout: how messages become keys and values, and back.

A **layout** makes slabs; a **slab** keeps the messages of one generation of one shard, and
is all that the logical layer sees. Layouts are the only code that touches an engine's
``meta``, ``data``, ``index`` and ``keys`` keyspaces, and each slab touches only the keys of its own
generation: keys of bytes begin with `encode_generation`, tuples with the generation's number, so that
a generation is dropped by four range deletes.

The logical layer promises a slab:

* Messages come in order of strictly increasing positions, one batch at a time. A batch has columns
  of any of the forms of `topicstore.contract.columns`; its positions are an array of unsigned 64-bit numbers.
* Writers (`Slab.store`, `Slab.delete`) are serialised; readers run beside them, in any thread.
* `Slab.compact` runs beside `Slab.store` and readers. No step of it runs beside a step of a delete
  or of another compaction, but those may run between two of its steps, so each step must look again
  at what is stored.
* No read asks for positions above ``bound``. All positions up to it are committed, and in the generation
  that is written ``bound`` is never above what `Slab.visible` allows. It is -1 if there is nothing yet.

Capabilities a layout may declare: ``position_order`` (a whole stream comes in order of
positions; without it, only each publisher's messages of each topic do, and `Slab.epoch` says
within how many positions the others may change places); ``few_streams`` (hundreds of topics that
differ in a level or two make few streams, and a generation inherits what the one before learned).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from .batch import MessageBatch
from .engine import Engine, WriteBatch
from .options import NoOptions
from .topics import TopicFilter

__all__ = [
    "CompactStep",
    "Damage",
    "DeleteStep",
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
    """How far one call of `Slab.next` reads."""

    rows: int
    """The most rows that the batch may have; at least 1."""
    bytes: int
    """About the most bytes of payloads that the batch may have. The first row is returned whatever its size."""
    bound: int
    """The highest position to return, inclusive."""
    deadline: float | None = None
    """The time, by `time.monotonic`, after which the call returns the rows that it has; None for no limit."""


@attrs.frozen(kw_only=True)
class StreamInfo:
    """One stream of a slab."""

    stream: int
    """The layout's number of the stream, unique within the slab."""
    pattern: str
    """A topic filter that all topics of the stream match; for topics that begin with ``$``, whose
    first level no wildcard matches, that level may be ``$+``."""


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
    """The messages, with positions and shards; it may be empty although more follow."""
    place: bytes
    """The place from which to read on."""
    exhausted: bool
    """Whether no message up to the bound follows ``place``."""


@attrs.frozen(kw_only=True)
class DeleteStep:
    """One step of a delete."""

    write: WriteBatch
    """The write that removes the messages; it may be empty."""
    messages: int
    """The number of messages that it removes."""
    freed: int
    """Bytes of the values that are removed, less those of the values that replace them."""


@attrs.frozen(kw_only=True)
class CompactStep:
    """One step of a compaction."""

    write: WriteBatch
    """The write that replaces stored messages by the same messages in another form; it isn't empty."""
    messages: int
    """The number of messages that it rewrites."""
    freed: int
    """Bytes of the values that are removed, less those of the values that replace them."""


@attrs.frozen(kw_only=True)
class TopicNode:
    """One node of the tree in which a slab keeps the structure that it learned from its topics."""

    path: tuple[str, ...]
    """The levels from the root: tokens, ``+``, or a last ``#``. Topics that begin with ``$`` have a tree of their
    own, in which a first level learned as ``+`` is written ``$+``."""
    stream: int | None
    """The stream of the topics that end at this node; None if there are none."""


@attrs.frozen(kw_only=True)
class Damage:
    """One damaged place, as `Database.verify` reports it."""

    place: str
    """The shard, generation, keyspace and key, as far as they are known."""
    reason: str
    """A sentence that says what is wrong."""


@attrs.define
class ReadCounters:
    """The cost of reads of a slab since it was opened. Layouts count it, and `Database.info` shows it."""

    seeks: int = 0
    """The number of scans begun."""
    visited: int = 0
    """The number of blocks or keys decoded, at least in part."""
    skipped: int = 0
    """The number of blocks or keys passed over without decoding their rows."""
    rows: int = 0
    """The number of messages returned."""


class Slab(ABC):
    """The messages of one generation of one shard."""

    counters: ReadCounters
    """The counters of this slab's reads, which ``__init__`` sets and `next` increments. They need no lock, so readers
    in several threads may lose a count."""

    epoch: int = 1
    """The number of positions in an epoch, a power of two. If it is 1, streams are in order of positions. Otherwise
    epochs follow each other, but the messages of one epoch are in an order of the layout's own."""

    @abstractmethod
    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add to ``write`` everything that stores the batch, which has its positions and times.

        The slab's memory may change before the commit only in ways that are harmless if the commit fails, because
        the next `store` may be of another batch. So records that a failed write would have persisted (new ids,
        learned structure) are put again until `committed` was called.
        """

    @abstractmethod
    def committed(self) -> None:
        """Called when the ``write`` of the last `store` is in the engine."""

    @abstractmethod
    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the streams that may hold matching messages."""

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the streams that together have each matching message exactly once, cheapest first.

        No message before position ``first`` is needed: streams that end before it may be left out.
        A layout that can read many of its streams in one pass may return a number that `streams` doesn't
        list, and must then accept it in `begin` and `next`.
        """
        return [info.stream for info in self.streams(topic_filter)]

    def visible(self, stream: int, watermark: int) -> int:
        """Return the highest position of a stream that may be read while positions above ``watermark`` may follow.

        An epoch that has not ended stays hidden, because messages may still be stored before those that were read.
        """
        return (watermark + 1) // self.epoch * self.epoch - 1

    @abstractmethod
    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place in a stream before the first message at or after ``position``.

        Raises `KeyError` if there is no such stream. Places stay valid across restarts, deletes
        and compaction.
        """

    def reached(self, stream: int, place: bytes) -> int | None:
        """Return the highest position that a reader at ``place`` may have read; -1 if it has read nothing.

        A place after everything that is stored, as after a restore from an older copy, is then refused. The default
        returns None: the layout can't say. Raises the errors of `next` for what is no place.
        """
        return None

    @abstractmethod
    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Return the matching messages that follow ``place``, in the stream's order.

        The call stops at the first of ``limits``. After a deadline it returns a place that is at least a little further
        on, whether it has rows or not. It never skips messages that it can't read, but raises `CorruptionError`, or
        `NewerFormatError` for a version that it doesn't know, and names the place. Raises `ValueError` if ``place``
        isn't a place of this layout, and `KeyError` or `ValueError` if there is no such stream.

        ``recovery="salvage"`` reads, but never writes, slabs of which some writes in the middle are missing. What a
        missing write said, such as the name that a number stands for, must never be guessed: a message is returned as
        it was stored, or not at all.
        """

    @abstractmethod
    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Yield steps that together remove the matching messages from ``first`` to ``last``.

        Messages whose topics match one of ``spare`` are kept.

        Each step is committed before the next is requested, and nothing else writes between the request and the
        commit. So a step looks at a bounded number of blocks or keys, and may find nothing.
        """

    def backlog(self, messages: int) -> int:
        """Return how many of the slab's ``messages`` wait to be compacted. This must be cheap."""
        return 0

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Yield steps that rewrite the messages up to ``bound`` in a form that reads better. The default has no steps.

        With ``whole``, all messages are rewritten, as well as the layout can; without it, those that are worth the
        work now. Each step is committed before the next is requested; if one isn't committed, no other is requested.
        Compaction changes neither the order of messages nor the validity of places. A step needs bounded memory, and
        well under a second.
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
        """Read everything up to ``bound``. Yield each damaged place, and the numbers of good messages in between."""


class Layout(ABC):
    """An object that makes slabs, with one set of options."""

    format: ClassVar[int] = 1
    """The version of the stored form, which is recorded with each generation. A generation of a higher version is
    refused with `NewerFormatError`, so raise it for every change that older versions of the layout would misread."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class of the layout's options. They are stored with each generation."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Add to ``write`` what a new, empty slab needs.

        ``parent`` is the slab of the previous generation, if that has the same layout. The structure learned from its
        topics may be inherited, and must then be added to ``write``.
        """

    @abstractmethod
    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Return the slab that `create` made. This must be quick, however much the slab holds."""
