"""A slab of blocks: merged segments first, then blocks as they were written, both in order of position.

Writing adds a block per batch (`writing`, `batch_blocks`). Compaction turns the oldest blocks into a segment,
sorted by stream and topic (`segments`). Reading goes through the segments, sorting the matching rows of each
by position, and then through the blocks. Both are read in one snapshot, which a concurrent merge doesn't change.
Stream 0 holds all messages.

A reader's place is the next position, 8 bytes big-endian.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import attrs
from topicstore import MessageBatch, TopicFilter
from topicstore.contract.engine import Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import (
    CompactStep,
    Damage,
    DeleteStep,
    Heads,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
    TopicNode,
)

from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable

from .batch_blocks import BatchBlocks
from .compression import Compressor
from .deletion import Deletion
from .heads import heads_of
from .reading import ALL, Reading
from .segments import Segments
from .verification import Verification
from .writing import Writing

__all__ = ["BlockSlab"]

_TOPICS, _CLIENTS = 0x10, 0x20
_ENOUGH = 512
"""The number of rows after which a batch that is read ends. Smaller blocks are joined; joining larger ones costs
more, in copies and cache misses, than the next call does. Rows selected from blocks are copies anyway, so all of
them that the limit allows are joined."""
_LARGE = 8_192
"""The number of rows for which blocks are joined if a reader accepts as many. Such readers convert whole columns, as to
Arrow, where each batch costs more than the copies."""


class BlockSlab(Slab):
    """A slab of the block layout; the docstring of the module describes it."""

    reads_heads = True

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
        self._engine = engine
        self.trie = trie
        place = f"shard {shard}, generation {generation}"
        self._topics = NameTable(engine, generation, _TOPICS, trie.learn_uncached, f"{place}, topic names")
        self._clients = NameTable(engine, generation, _CLIENTS, _no_streams, f"{place}, client id names")
        names = self._topics, self._clients
        blocks = BatchBlocks(shard, generation, compress)
        self._segments = Segments(engine, shard, generation)
        self._writing = Writing(blocks, trie, names)
        self._reading = Reading(engine, shard, place, blocks, self._segments, trie, names, self.counters)
        self._compress_merged = compress_merged
        self._deletion = Deletion(engine, self._reading, compress_merged)
        self._verification = Verification(engine, self._reading)

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add the batch's messages to ``write`` as blocks, with new names and newly learned structure."""
        self._writing.store(batch, write)

    def committed(self) -> None:
        """Mark names and learned structure as committed."""
        self._writing.committed()

    # --- streams ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the learned streams that may hold matches of the filter."""
        return [StreamInfo(stream=s, pattern=self.trie.pattern(s)) for s in self.trie.match(topic_filter)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        """Return the stream that may hold matches, or if there are several, stream 0, which holds all messages."""
        streams = self.trie.match(topic_filter)
        if not streams or (topic_filter.literal and self._topics.lacks(topic_filter.text)):
            return []
        return streams if len(streams) == 1 else [ALL]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a reader that starts at a position."""
        if stream != ALL and stream not in self.trie:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    def reached(self, stream: int, place: bytes) -> int:
        """Return the last position that a reader at this place has passed."""
        if len(place) != 8:
            raise ValueError(place)
        return int.from_bytes(place, "big") - 1

    # --- reading ---

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Read from the place, block by block or segment by segment, until a limit is reached."""
        if len(place) != 8 or (stream != ALL and stream not in self.trie):
            raise ValueError(place)
        at = int.from_bytes(place, "big")
        batches: list[MessageBatch] = []
        rows = size = 0
        exhausted = True
        joined = _LARGE if limits.rows >= _LARGE else min(limits.rows, _ENOUGH)
        with closing(self._reading.pieces(stream, topic_filter, at, limits, joined)) as pieces:
            try:
                for piece in pieces:
                    if batches and rows + piece.most > limits.rows:
                        exhausted = False  # the piece may exceed the limit; the next call returns it
                        break
                    rest = limits if piece.most or not batches else _rest(limits, rows, size)
                    batch, at = piece.read(rest)
                    if len(batch):
                        batches.append(batch)
                        rows += len(batch)
                        size += piece.bytes
                    most = limits.rows if piece.picked else min(limits.rows, _ENOUGH)
                    enough = rows >= most or size >= limits.bytes or at <= piece.last
                    late = limits.deadline is not None and time.monotonic() >= limits.deadline
                    if at <= limits.bound and (enough or late):
                        exhausted = False
                        break
            except (CorruptionError, NewerFormatError):
                if not batches:
                    raise
                exhausted = False  # return the messages before the damage; the next call raises
        self.counters.rows += rows
        place = (max(at, limits.bound + 1) if exhausted else at).to_bytes(8, "big")
        return SlabStep(batch=MessageBatch.concat(batches), place=place, exhausted=exhausted)

    def heads(self, topic_filter: TopicFilter, first: int, last: int) -> Iterator[Heads]:
        """Yield the heads of matching messages, segment by segment, and then many blocks at a time."""
        return heads_of(self._reading, topic_filter, first, last)

    def newest(self, stream: int, topic_filter: TopicFilter, first: int, last: int, rows: int) -> tuple[int, int]:
        """Search the blocks, and then the segments, from the last one on."""
        from .newest import newest_span  # imported here, because few processes read backwards

        return newest_span(self._reading, stream, topic_filter, first, last, rows)

    # --- maintenance ---

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Rewrite blocks and frames without the matching messages, under unchanged keys; each step examines a few."""
        return self._deletion.steps(topic_filter, first, last, spare)

    def backlog(self, messages: int) -> int:
        """Return the number of messages that are in no segment."""
        return max(messages - self._segments.total(), 0)

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Merge blocks up to position ``bound`` into segments; without ``whole``, only where that is worth its cost."""
        from .compaction import Compaction  # imported here, because storing and reading don't need it

        return Compaction(self._engine, self._reading, self._compress_merged).steps(bound, whole=whole)

    def learned(self) -> Iterator[TopicNode]:
        """Yield the nodes of the learned topic structure."""
        return self.trie.describe()

    def info(self) -> SlabInfo:
        """Return the number of streams, and the sizes of the dictionaries, the trie and the segments."""
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
        return self._verification.run(bound)


def _rest(limits: ReadLimits, rows: int, size: int) -> ReadLimits:
    """Return what remains of limits after some rows with ``size`` bytes of payloads."""
    return attrs.evolve(limits, rows=limits.rows - rows, bytes=max(limits.bytes - size, 1))


def _no_streams(names: list[str]) -> Sequence[int]:
    return [0] * len(names)
