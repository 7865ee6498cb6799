"""Verification: every block and frame is decoded, and checked against its neighbours and indexes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from topicstore.contract.columns import Column, to_list
from topicstore.contract.engine import DATA, INDEX, Engine, Reader
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage

from .format import MIXED, Block, Columns
from .reading import Reading
from .segments import Segment

__all__ = ["Verification"]


class Verification:
    """The verification of one slab."""

    def __init__(self, engine: Engine, reading: Reading) -> None:
        self._engine = engine
        self._reading = reading
        self._segments = reading.segments
        self._blocks = reading.blocks
        self._trie = reading.trie

    def run(self, bound: int) -> Iterator[Damage | int]:
        """Yield each damage, and the number of messages of each intact block or frame."""
        for table, stream_of in ((self._reading.topics, self._trie.find), (self._reading.clients, lambda _: 0)):
            for sentence in table.verify(stream_of):
                yield Damage(place=table.place, reason=sentence)
        with self._engine.snapshot() as view:
            yield from self._all_segments(view, bound)
            yield from self._all_blocks(view, bound)

    # --- segments ---

    def _all_segments(self, view: Reader, bound: int) -> Iterator[Damage | int]:
        before, total = -1, 0
        for chunk in view.scan(INDEX, self._segments.index_key(0), self._segments.behind()):
            for key, value in chunk:
                try:
                    segment = self._segments.open(key[1], value)
                    total += segment.messages
                    _check_index(segment, before)
                except (CorruptionError, NewerFormatError) as bad:  # a damaged version byte looks like a newer format
                    yield _damage(self._segments.place(key[1]), bad)
                else:
                    yield from self._frames(view, segment)
                before = key[1]
        try:
            if total != (stored := self._segments.stored_total(view)):
                raise CorruptionError(f"they hold {total:,} messages, and should hold {stored:,}")
        except CorruptionError as bad:
            yield _damage(f"{self._reading.place}, segments", bad)

    def _frames(self, view: Reader, segment: Segment) -> Iterator[Damage | int]:
        for number in np.flatnonzero(segment.rows).tolist():
            value = view.get(DATA, self._segments.frame_key(segment.end, number))
            try:
                block = self._segments.frame(segment, number, value)
                self._check_frame(block, segment, number)
            except (CorruptionError, NewerFormatError) as bad:
                yield _damage(self._segments.place(segment.end, number), bad)
            else:
                yield block.rows

    def _check_frame(self, block: Block, segment: Segment, number: int) -> None:
        columns = block.columns()
        positions, topics = columns.positions, to_list(columns.topics)
        streams = self._trie.find_all(topics)
        rows = list(zip(streams, topics, positions.tolist(), strict=True))
        if rows != sorted(rows):
            raise CorruptionError("its rows are not in order of stream, topic and position")
        if int(positions.min()) < segment.lowest[number] or int(positions.max()) > segment.highest[number]:
            raise CorruptionError("its positions are not those that the segment's index says")
        if rows[0][:2] < segment.first[number] or rows[-1][:2] > segment.last[number]:
            raise CorruptionError("its topics are not those that the segment's index says")
        if segment.directory and not _listed(segment, number).issuperset(topics):
            raise CorruptionError("its topics are not all among those that the segment's index lists")
        if block.stream != MIXED and set(streams) != {block.stream}:
            raise CorruptionError(f"it holds topics that are not of its stream {block.stream}")
        if number >= segment.small and segment.own_streams.intersection(streams):
            raise CorruptionError("it holds topics of streams that have frames of their own")
        _check_sizes(block, columns)

    # --- blocks ---

    def _all_blocks(self, view: Reader, bound: int) -> Iterator[Damage | int]:
        end_of_batch_before = end = base = self._segments.end(view)
        for chunk in view.scan(DATA, self._blocks.key(0), self._blocks.end):
            for key, value in chunk:
                last = key[2]
                try:
                    block = self._blocks.decode(last, value)
                    if block.base > bound:
                        return
                    if block.base != base:
                        base, end_of_batch_before = block.base, end
                    end = last
                    self._check_block(block, end_of_batch_before)
                except (CorruptionError, NewerFormatError) as bad:
                    yield _damage(self._blocks.place(last), bad)
                else:
                    yield block.rows

    def _check_block(self, block: Block, end_before: int) -> None:
        columns = block.columns()
        positions = columns.positions
        if block.base <= end_before:
            raise CorruptionError(f"its batch begins at {block.base}, before the end of the one before, {end_before}")
        if int(positions[0]) < block.base or int(positions[-1]) > block.last or (positions[1:] <= positions[:-1]).any():
            raise CorruptionError("its positions are not in order")
        self._reading.texts(self._reading.clients, columns.client_ids)  # raises for a number without a name
        streams = set(self._trie.find_all(set(to_list(self._reading.texts(self._reading.topics, columns.topics)))))
        if block.stream != MIXED and streams != {block.stream}:
            raise CorruptionError(f"it holds topics that are not of its stream {block.stream}")
        _check_sizes(block, columns)


def _damage(place: str, bad: CorruptionError | NewerFormatError) -> Damage:
    return Damage(place=place, reason=bad.reason)


def _check_index(segment: Segment, end_before: int) -> None:
    if segment.base <= end_before:
        raise CorruptionError(f"it begins at {segment.base}, before the end of the one before, {end_before}")
    spans = list(zip(segment.first, segment.last, strict=True))
    for together in (spans[: segment.small], spans[segment.small :]):
        ends = [end for span in together for end in span]
        if ends != sorted(ends):
            raise CorruptionError("its frames are not in order of stream and topic")


def _listed(segment: Segment, number: int) -> set[str]:
    """Return the topics of the directory that are in a frame."""
    return {segment.directory[topic] for topic in segment.topics_in([number]).tolist()}


def _check_sizes(block: Block, columns: Columns[Column]) -> None:
    if to_list(block.sizes()) != columns.sizes:  # the stored lengths differ from those of the payloads
        raise CorruptionError("its lengths don't fit its payloads")
