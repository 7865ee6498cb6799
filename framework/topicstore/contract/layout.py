"""The contract of a layout: how messages become keys and values, and back.

A **layout** makes slabs; a **slab** keeps the messages of one generation of one shard, and
is all that the logical layer sees. Layouts are the only code that touches an engine's
``meta``, ``data``, ``index`` and ``keys`` keyspaces, and only below their own generation:
keys of bytes begin with `encode_generation`, tuples with the generation's number, so that
a generation is dropped by four range deletes.

The logical layer promises a slab:

* Messages come in order of strictly increasing positions, one batch at a time. A batch has columns
  of any of the forms of `topicstore.contract.columns`; its positions are an array of unsigned 64-bit numbers.
* Writers (`Slab.store`, `Slab.delete`) are serialised; readers run beside them, in any thread.
* `Slab.compact` runs beside `Slab.store` and readers. No step of it runs beside a step of a delete
  or of another compaction, but those may come between two of its steps: look anew in each.
* No read asks for positions above ``bound``, all up to it are committed, and in the generation
  that is written ``bound`` is never above what `Slab.visible` allows. -1: there is nothing yet.

Capabilities a layout may declare: ``position_order`` (a whole stream comes in order of
positions; without it, only each publisher's messages of each topic do, and `Slab.epoch` says
within how many positions the others may change places); ``few_streams`` (hundreds of topics that
differ in a level or two make few streams, and a generation inherits what the one before learned).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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
    "Slab",
    "SlabInfo",
    "SlabStep",
    "StreamInfo",
    "TopicNode",
]


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
    """A slab in numbers."""

    streams: int
    details: Mapping[str, str | int] = attrs.field(factory=dict)
    """Anything else worth showing to a person."""


@attrs.frozen(kw_only=True)
class SlabStep:
    """What one `Slab.next` read."""

    batch: MessageBatch
    """Rows with positions and shards; may be empty though more follows."""
    place: bytes
    """Where to go on."""
    exhausted: bool
    """True if nothing up to the bound lies behind ``place``."""


@attrs.frozen(kw_only=True)
class DeleteStep:
    """A part of a delete."""

    write: WriteBatch
    """May be empty."""
    messages: int
    """How many it removes."""
    freed: int
    """Bytes of the values that go, less those that are put in their place."""


@attrs.frozen(kw_only=True)
class CompactStep:
    """A part of a compaction."""

    write: WriteBatch
    """Replaces what was stored by the same messages in another form. Not empty."""
    messages: int
    """How many it rewrites."""
    freed: int
    """Bytes of the values that go, less those that are put in their place."""


@attrs.frozen(kw_only=True)
class TopicNode:
    """One node of what a slab learned of its topics' structure."""

    path: tuple[str, ...]
    """The levels from the root on: tokens, ``+``, or a last ``#``. Topics that begin with ``$`` have a
    tree of their own, where a first level learned as ``+`` reads ``$+``."""
    stream: int | None
    """The stream of the topics that end here; None if none do."""


@attrs.frozen(kw_only=True)
class Damage:
    """One damaged place, as `Database.verify` reports it."""

    place: str
    """Where: shard, generation, keyspace and key, as far as known."""
    reason: str
    """What is wrong."""


@attrs.define
class ReadCounters:
    """What reading cost a slab since it was opened. Counted by layouts, shown by `Database.info`."""

    seeks: int = 0
    """Scans begun."""
    visited: int = 0
    """Blocks or keys decoded, at least in part."""
    skipped: int = 0
    """Blocks or keys passed over without decoding their rows."""
    rows: int = 0
    """Messages returned."""


class Slab(ABC):
    """The messages of one generation of one shard."""

    counters: ReadCounters
    """To be set in ``__init__``, and counted up by `next`. Readers in several threads may lose a count."""

    epoch: int = 1
    """Positions of an epoch, a power of two. 1: streams come in order of positions. Above: epochs
    follow each other, but within one messages come in an order of the layout's own."""

    @abstractmethod
    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add to ``write`` all that keeps the batch, whose positions are set and times filled in.

        Memory may change ahead of the commit only in ways that are harmless if it fails, because
        the next `store` may be of another batch: what a failed write would have persisted (new
        ids, learned structure) is put again until `committed` was called.
        """

    @abstractmethod
    def committed(self) -> None:
        """The ``write`` of the last `store` is in the engine."""

    @abstractmethod
    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the streams that may hold matching messages."""

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the streams to read so that each matching message comes exactly once, cheapest first.

        Nothing in front of position ``first`` is wanted: streams that end before it may be left out.
        A layout that can read many of its streams in one pass may answer with a number that
        `streams` doesn't list, and that `begin` and `next` then know.
        """
        return [info.stream for info in self.streams(topic_filter)]

    def visible(self, stream: int, watermark: int) -> int:
        """Return the highest position of a stream that may be read while positions above ``watermark`` may follow.

        In an epoch that has not ended, a message may still come before one that was read: it stays hidden.
        """
        return (watermark + 1) // self.epoch * self.epoch - 1

    @abstractmethod
    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place in a stream before the first message at or behind ``position``.

        Raises `KeyError` if there is no such stream. Places stay valid across restarts, deletes
        and compaction.
        """

    @abstractmethod
    def next(
        self,
        stream: int,
        topic_filter: TopicFilter,
        place: bytes,
        *,
        limit: int,
        limit_bytes: int,
        bound: int,
        deadline: float | None,
    ) -> SlabStep:
        """Return the matching messages that follow ``place``, in the stream's order.

        At most ``limit`` rows; about ``limit_bytes`` of payloads, but at least one row; positions
        up to ``bound``. Past ``deadline`` (of `time.monotonic`) it returns what it has, having
        moved on at least a little. Raises `CorruptionError` or, of a version that it doesn't know,
        `NewerFormatError`, naming the place, rather than skip what it can't read; `ValueError` if
        ``place`` is not one of its own, `KeyError` or `ValueError` if there is no such stream.
        """

    @abstractmethod
    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[DeleteStep]:
        """Yield steps that together remove the matching messages from ``first`` to ``last``.

        Each is committed before the next is asked for, and runs alone: nothing else writes between
        asking for it and committing it. So a step looks at a bounded number of blocks or keys, and
        may find nothing.
        """

    def backlog(self, messages: int) -> int:
        """Return how many of the ``messages`` that the slab holds wait to be compacted; cheap."""
        return 0

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Yield steps that bring the messages up to ``bound`` into the form that is read fastest; by default none.

        ``whole``: all of them, as well as it can be done. Else what is worth the work now. Each step
        is committed before the next is asked for, or never, and then no other is. Readers, places
        and order notice nothing. A step takes bounded memory, and well under a second.
        """
        return iter(())

    def learned(self) -> Iterator[TopicNode]:
        """Yield what was learned of the topics' structure, parents before children; by default nothing."""
        return iter(())

    @abstractmethod
    def info(self) -> SlabInfo:
        """Return what a person may want to know of the slab; cheap."""

    @abstractmethod
    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Read everything up to ``bound``: yield each damage, and the number of good messages as it goes."""


class Layout(ABC):
    """Makes slabs with one set of options."""

    format: ClassVar[int] = 1
    """Version of the stored form. Recorded with each generation: one of a higher version is refused
    with `NewerFormatError`, so raise it with whatever an older version of the layout would misread."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class of the layout's options. They are stored with each generation."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Add to ``write`` what a new, empty slab needs.

        ``parent`` is the slab of the generation before, if that has the same layout: what was
        learned from its topics may be inherited, and must then be persisted here.
        """

    @abstractmethod
    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Return the slab that `create` made. Quick, whatever the slab holds."""
