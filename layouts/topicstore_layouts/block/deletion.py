"""Deleting: blocks and frames with matching messages are rewritten without them, under the same keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from topicstore import TopicFilter
from topicstore.contract.columns import Indices
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.layout import DeleteStep

from .compression import Compressor
from .format import Block
from .frames import FrameRows, encode_frame
from .reading import ALL, Reading
from .segments import Segment

__all__ = ["Deletion"]

_LOOKED_AT = 16
"""The number of blocks or frames that one step examines. Writers wait for it, about 10 ms if they are full."""


class Deletion:
    """The deletion of messages from one slab."""

    def __init__(self, engine: Engine, reading: Reading, compress_merged: Compressor) -> None:
        self._engine = engine
        self._reading = reading
        self._segments = reading.segments
        self._blocks = reading.blocks
        self._compress = compress_merged

    def steps(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter]
    ) -> Iterator[DeleteStep]:
        """Yield the writes that delete matching messages, first from segments and then from blocks."""
        at, choice = first, _Choice(self._reading, topic_filter, spare, first, last)
        while (segment := next(self._segments.between(self._engine, at, last), None)) is not None:
            yield from self._in_segment(segment, choice)
            at = segment.end + 1
        yield from self._in_blocks(choice, at, last)

    def _in_segment(self, segment: Segment, choice: _Choice) -> Iterator[DeleteStep]:
        numbers = self._reading.select(segment, ALL, choice.topic_filter, choice.first, choice.last)
        # Each segment has at least one step, so that the caller can let other threads run.
        for start in range(0, max(len(numbers), 1), _LOOKED_AT):
            step, segment = self._some_frames(segment, numbers[start : start + _LOOKED_AT], choice)
            with self._reading.deleting():
                yield step

    def _some_frames(self, segment: Segment, numbers: Sequence[int], choice: _Choice) -> tuple[DeleteStep, Segment]:
        """Return the step that deletes from some frames of a segment, and the segment's new index."""
        write, left, freed = WriteBatch(), dict[int, int](), 0
        for number, block in zip(numbers, self._segments.frames(self._engine, segment, numbers), strict=True):
            keep = choice.others(block)
            if keep is not None:
                key = self._segments.frame_key(segment.end, number)
                value = self._frame(block, keep, segment, number) if len(keep) else None
                left[number] = len(keep)
                freed += block.size - _replace(key, value, write)
        if not left:
            return DeleteStep(write=write, messages=0, freed=0), segment
        after = segment.without(left)
        deleted = segment.messages - after.messages
        freed += self._segments.replace_index(segment, after, write)
        self._segments.put_total(self._segments.total() - deleted, write)
        return DeleteStep(write=write, messages=deleted, freed=freed), after

    def _frame(self, block: Block, keep: Indices, segment: Segment, number: int) -> bytes:
        seed = self._segments.frame_seed(segment.end, number)
        rows = FrameRows.of(block.columns().take(keep))
        return encode_frame(rows, block.stream, block.base, seed, self._compress)

    def _in_blocks(self, choice: _Choice, first: int, last: int) -> Iterator[DeleteStep]:
        more = True
        while more:
            write, deleted, freed, seen = WriteBatch(), 0, 0, 0
            more = False
            for together in self._blocks.batches(self._engine, first, last):
                for block in together:
                    keep = choice.others(block)
                    if keep is not None:
                        value = self._block(block, keep) if len(keep) else None
                        deleted += block.rows - len(keep)
                        freed += block.size - _replace(self._blocks.key(block.last), value, write)
                first = together[-1].last + 1
                seen += len(together)
                if seen >= _LOOKED_AT:
                    more = True
                    break
            with self._reading.deleting():
                yield DeleteStep(write=write, messages=deleted, freed=freed)

    def _block(self, block: Block, keep: Indices) -> bytes:
        return self._blocks.encode(block.columns().take(keep), block.stream, block.base, block.last)


class _Choice:
    """The rows that one delete removes: those that match a filter, except spared ones, in a range of positions."""

    def __init__(
        self, reading: Reading, topic_filter: TopicFilter, spare: Sequence[TopicFilter], first: int, last: int
    ) -> None:
        self._reading = reading
        self.topic_filter = topic_filter
        self._spare = spare
        self.first = first
        self.last = last

    def others(self, block: Block) -> Indices | None:
        """Return the indexes of the rows that remain in a block; None if all remain."""
        gone = self._rows(block, self.topic_filter)
        for one in self._spare:
            if len(gone):
                gone = np.setdiff1d(gone, self._rows(block, one), assume_unique=True)
        return np.setdiff1d(np.arange(block.rows), gone, assume_unique=True) if len(gone) else None

    def _rows(self, block: Block, topic_filter: TopicFilter) -> Indices:
        rows = self._reading.match(block, ALL, topic_filter, self.first, self.last)
        if isinstance(rows, bool):
            return np.empty(0, dtype=np.intp)
        return np.arange(block.rows)[slice(None) if rows is None else rows]


def _replace(key: tuple[int, int, int], value: bytes | None, write: WriteBatch) -> int:
    """Replace the value of a key, or delete it if the value is None; return the new value's bytes."""
    if value is None:
        write.delete(DATA, key)
        return 0
    write.put(DATA, key, value)
    return len(value)
