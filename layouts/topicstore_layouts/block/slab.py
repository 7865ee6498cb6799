"""A slab of blocks: first merged segments, then blocks as they were written; both in order of position.

Writing adds a block a batch (`fresh`). Merging (`merging`) turns the oldest blocks into a segment,
sorted by stream and topic (`segments`). Reading goes through the segments, putting what it wants of
each back in order of position, and then through the blocks: one moment's view of both, so that it
never matters when a merge commits. Stream 0 is everything.

A place is the next position, 8 bytes big-endian.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.columns import Coded, Constant, to_list
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import (
    CompactStep,
    Damage,
    DeleteStep,
    ReadCounters,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
    TopicNode,
)

from topicstore_layouts.learned import LearnedTopics
from topicstore_layouts.names import NameTable

from .batch_blocks import FreshBlocks
from .compaction import Merger
from .compression import Compressor
from .deletion import Deleter
from .format import MIXED, Array, Columns
from .reading import ALL, Reading
from .segments import Segments
from .verification import Auditor

__all__ = ["BlockSlab"]

_TOPICS, _CLIENTS = 0x10, 0x20
_MOST_ROWS = 8_192
_MOST_BYTES = 1 << 20
"""Payload bytes after which a block ends: what a reader of one message may have to decompress."""
_SPLIT_ROWS = 256
"""A batch is split by stream if each would get this many rows on average; smaller blocks cost more than they save."""
_ENOUGH = 512
"""Rows after which a batch that is read ends. Smaller blocks are joined; joining larger ones costs
more, in copies and cold memory, than the next call does. Rows picked out of blocks are copies anyway: of
those, all that the limit allows are joined."""


class BlockSlab(Slab):
    """See the head of the module."""

    def __init__(
        self,
        engine: Engine,
        shard: int,
        generation: int,
        trie: LearnedTopics,
        compress: Compressor,
        compress_merged: Compressor,
    ) -> None:
        self.counters = ReadCounters()
        self.trie = trie
        place = f"shard {shard}, generation {generation}"
        self._topics = NameTable(engine, generation, _TOPICS, trie.learn, f"{place}, topic names")
        self._clients = NameTable(engine, generation, _CLIENTS, lambda _: 0, f"{place}, client id names")
        self._fresh = FreshBlocks(shard, generation, compress)
        self._segments = Segments(engine, shard, generation)
        self._reading = Reading(
            engine, shard, place, self._fresh, self._segments, trie, (self._topics, self._clients), self.counters
        )
        self._merger = Merger(engine, self._reading, compress_merged)
        self._deleter = Deleter(engine, self._reading, compress_merged)
        self._auditor = Auditor(engine, self._reading)

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Put the batch as blocks, with the names and the learned structure that are new in it."""
        payloads = to_list(batch.payloads)
        columns = Columns(
            np.asarray(batch.positions),
            self._topics.encode(batch.topics),
            self._clients.encode(batch.client_ids),
            batch.qos,
            batch.retain,
            batch.timestamps,
            batch.properties,
            payloads,
            list(map(len, payloads)),
        )
        for part in _by_size(columns):
            self._put(part, write)
        self.trie.save(write)
        self._topics.save(write)
        self._clients.save(write)

    def _put(self, columns: Columns, write: WriteBatch) -> None:
        base = int(columns.positions[0])
        for stream, part in self._by_stream(columns):
            last = int(part.positions[-1])
            write.put(DATA, self._fresh.key(last), self._fresh.encode(part, stream, base, last))

    def _by_stream(self, columns: Columns) -> list[tuple[int, Columns]]:
        streams = self._streams(columns)
        if isinstance(streams, int):
            return [(streams, columns)]
        if (streams == streams[0]).all():
            return [(int(streams[0]), columns)]
        touched = np.unique(streams).tolist()
        if len(streams) < _SPLIT_ROWS * len(touched):
            return [(MIXED, columns)]
        return [(stream, columns.take(np.flatnonzero(streams == stream))) for stream in touched]

    def _streams(self, columns: Columns) -> int | Array:
        """Return the stream of each row, or the one of all; topics that have no number are learned here."""
        topics = columns.topics
        if isinstance(topics, Constant):
            known = isinstance(topics.value, int)
            return self._topics.stream(topics.value) if known else self.trie.learn(topics.value)
        if isinstance(topics, Coded):
            used, places = np.unique(topics.codes, return_inverse=True)
            streams: Array = np.array(self.trie.learn_all(topics.texts.values[used].tolist()))[places]
            return streams
        return self._topics.streams(topics)

    def committed(self) -> None:
        """Names and structure are saved."""
        self.trie.saved()
        self._topics.saved()
        self._clients.saved()

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the learned streams that the filter may touch."""
        return [StreamInfo(stream=s, pattern=self.trie.pattern(s)) for s in self.trie.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the one stream that is touched, or that of everything: one pass serves them all."""
        streams = self.trie.match(topic_filter)
        if not streams or (topic_filter.literal and self._topics.lacks(topic_filter.text)):
            return []
        return streams if len(streams) == 1 else [ALL]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """A place is a position."""
        if stream != ALL and stream not in self.trie:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    # --- reading ---

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
        """Read pieces from the place on until there are enough rows."""
        if len(place) != 8 or (stream != ALL and stream not in self.trie):
            raise ValueError(place)
        at = int.from_bytes(place, "big")
        batches: list[MessageBatch] = []
        rows = size = 0
        exhausted = True
        with closing(self._reading.pieces(stream, topic_filter, at, bound)) as pieces:
            try:
                for piece in pieces:
                    if batches and rows + piece.most > limit:
                        exhausted = False  # it may not fit; the next call takes it whole
                        break
                    batch, at = piece.read(limit, limit_bytes)
                    if len(batch):
                        batches.append(batch)
                        rows += len(batch)
                        size += piece.bytes
                    most = limit if piece.picked else min(limit, _ENOUGH)
                    enough = rows >= most or size >= limit_bytes or at <= piece.last
                    if at <= bound and (enough or (deadline is not None and time.monotonic() >= deadline)):
                        exhausted = False
                        break
            except (CorruptionError, NewerFormatError):
                if not batches:
                    raise
                exhausted = False  # what lies before the damage first; the next call comes to it
        self.counters.rows += rows
        place = (max(at, bound + 1) if exhausted else at).to_bytes(8, "big")
        return SlabStep(batch=MessageBatch.concat(batches), place=place, exhausted=exhausted)

    # --- care ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[DeleteStep]:
        """Rewrite what holds matching messages under the same keys; each step looks at a few blocks."""
        return self._deleter.steps(topic_filter, first, last)

    def backlog(self, messages: int) -> int:
        """Return how many messages are in no segment."""
        return max(messages - self._segments.total(), 0)

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Merge blocks into segments."""
        return self._merger.steps(bound, whole=whole)

    def learned(self) -> Iterator[TopicNode]:
        """Yield the trie's nodes."""
        return self.trie.describe()

    def info(self) -> SlabInfo:
        """Streams, and what the dictionaries, the trie and the segments hold."""
        return SlabInfo(
            streams=len(self.trie),
            details={
                "topics with numbers": len(self._topics),
                "client ids with numbers": len(self._clients),
                "trie nodes": self.trie.nodes,
                "merged messages": self._segments.total(),
            },
        )

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Decode every block and frame, check each against its neighbours, and check the dictionaries."""
        return self._auditor.run(bound)


def _by_size(columns: Columns) -> Iterator[Columns]:
    """Cut a large batch so that no block has too many rows or bytes."""
    sizes = columns.sizes
    if len(sizes) <= _MOST_ROWS and sum(sizes) <= _MOST_BYTES:
        yield columns
        return
    ends = np.cumsum(sizes)
    start = filled = 0
    while start < len(sizes):
        fit = int(np.searchsorted(ends, filled + _MOST_BYTES, side="right"))
        stop = min(max(fit, start + 1), start + _MOST_ROWS)
        yield columns.window(start, stop)
        start, filled = stop, int(ends[stop - 1])
