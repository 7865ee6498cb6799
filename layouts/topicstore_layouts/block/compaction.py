"""Merging: batch blocks and small segments become one sorted segment.

Rows are sorted by stream, topic, position, and cut into frames. A merge is one atomic write. It reads
committed data and replaces all of it, so it needs no lock against readers or the writer of new blocks,
only against deletes.

Source of the method: the log-structured merge tree (P. O'Neil, E. Cheng, D. Gawlick, E. O'Neil, "The
log-structured merge-tree (LSM-tree)", 1996).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.columns import Coded, Column, Constant, Indices, Texts, take, to_list
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.layout import CompactStep

from .compression import Compressor
from .format import MIXED, Block, Columns, encode_frame
from .heads import merged_heads
from .reading import Reading
from .segments import FrameSpan, Segment, make_segment

__all__ = ["Compaction"]

T = TypeVar("T")

SEGMENT_ROWS = 131_072
SEGMENT_BYTES = 32 << 20
"""Most bytes of payloads and names in a segment: a reader in order of position may hold all of it in memory."""
FRAME_ROWS = 1_024
FRAME_BYTES = 256 << 10
"""Payload bytes after which a frame ends: a reader of one message may have to decompress all of them."""
WORTH_ROWS = 65_536
"""The least rows of a merge that isn't ``whole``: half a segment, so that a row is merged twice at most."""
MOST_BLOCKS = 8_192
"""The most blocks that one step merges, however small they are."""


class Compaction:
    """The compaction of one slab's blocks and segments."""

    def __init__(self, engine: Engine, reading: Reading, compress: Compressor) -> None:
        self._engine = engine
        self._reading = reading
        self._blocks = reading.blocks
        self._segments = reading.segments
        self._compress = compress

    def steps(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        """Yield the steps that merge the blocks up to a position; without ``whole``, only those worth their cost."""
        while blocks := self._take(bound, whole=whole):
            rows, size = sum(block.rows for block in blocks), sum(block.raw_bytes for block in blocks)
            newest = self._segments.newest()
            small = newest is not None and _fits(newest.messages + rows, newest.raw_bytes + size)
            yield self._merge([newest] if newest is not None and small else [], blocks)
        if whole:
            yield from self._join_small(bound)

    def _take(self, bound: int, *, whole: bool) -> list[Block]:
        """Return the oldest blocks, in whole batches, that fill a segment; fewer only if that is worth its cost."""
        taken: list[Block] = []
        rows = size = 0
        runs = self._blocks.batches(self._engine, self._segments.end(self._engine) + 1, bound)
        for _, batch in groupby(runs, lambda run: run[0].base):
            together = list(chain.from_iterable(batch))
            more, bytes_ = sum(b.rows for b in together), sum(b.raw_bytes for b in together)
            if together[-1].last > bound:
                break
            if taken and not _fits(rows + more, size + bytes_):
                return taken
            taken += together
            rows, size = rows + more, size + bytes_
            if len(taken) >= MOST_BLOCKS:
                return taken
        return taken if whole or rows >= WORTH_ROWS or size >= SEGMENT_BYTES // 2 else []

    def _join_small(self, bound: int) -> Iterator[CompactStep]:
        """Join neighbouring segments that are small because of deletes or of early merges."""
        at = 0
        while group := self._neighbours(at, bound):
            at = group[-1].end + 1
            if len(group) > 1:
                yield self._merge(group, [])

    def _neighbours(self, first: int, bound: int) -> list[Segment]:
        """Return the next segments that fit into one. Deletes may run between steps, so the indexes are read again."""
        group: list[Segment] = []
        rows = size = 0
        for segment in self._segments.between(self._engine, first, bound):
            rows, size = rows + segment.messages, size + segment.raw_bytes
            if group and not _fits(rows, size):
                break
            group.append(segment)
        return group

    def _merge(self, segments: list[Segment], blocks: list[Block]) -> CompactStep:
        """Return the write that replaces neighbouring segments, and the blocks that follow, by one segment."""
        engine, write = self._engine, WriteBatch()
        frames = [f for s in segments for f in self._segments.frames(engine, s, np.flatnonzero(s.rows))]
        freed = sum(map(self._segments.stored_bytes, segments)) + sum(block.size for block in blocks)
        base = segments[0].base if segments else blocks[0].base
        before = self._segments.end(engine, segments[0].end if segments else None)
        end = blocks[-1].last if blocks else segments[-1].end
        self._segments.reach = max(self._segments.reach, end)
        for segment in segments:
            self._segments.remove(segment, write)
        if blocks:
            write.delete_range(DATA, self._blocks.key(blocks[0].last), self._blocks.key(end + 1))
        columns, streams = self._sorted([*frames, *blocks])
        values, spans = [], []
        small = _small(streams)
        for number, (part, span) in enumerate(_frames(columns, streams, small)):
            stream = MIXED if small[span.first[0]] else span.first[0]
            seed = self._segments.frame_seed(end, number)
            values.append(encode_frame(part, stream, base, seed, self._compress))
            spans.append(span)
        own = sum(not small[span.first[0]] for span in spans)
        size = self._segments.put(make_segment(base, end, columns, spans, own), values, write)
        rows = len(columns.positions)
        self._segments.put_total(self._segments.total() - sum(s.messages for s in segments) + rows, write)
        heads = merged_heads(columns, before, end)
        return CompactStep(write=write, messages=rows, freed=freed - size, heads=heads)

    def _sorted(self, blocks: Sequence[Block]) -> tuple[Columns[Coded], npt.NDArray[np.int64]]:
        """Return the rows of all blocks by stream, topic, position, and the stream of each row.

        The topics' codes are in the same order, so they ascend from row to row.
        """
        parts = [block.columns() for block in blocks]
        topics = _joined([self._reading.texts(self._reading.topics, part.topics) for part in parts])
        texts = topics.texts.values.tolist()
        streams = np.array(self._reading.find_all(texts), dtype=np.int64)
        ranked = _order(_small(streams[topics.codes])[streams], streams, texts)
        rank = np.empty(len(texts), dtype=np.int64)
        rank[ranked] = np.arange(len(texts))
        codes = rank[topics.codes]
        positions = np.concatenate([part.positions for part in parts])
        order = np.lexsort((positions, codes))
        columns = Columns(
            positions[order],
            Coded(codes[order], Texts.of([texts[number] for number in ranked.tolist()])),
            take(_joined([self._reading.texts(self._reading.clients, part.client_ids) for part in parts]), order),
            _numbers([part.qos for part in parts], np.uint8)[order],
            _numbers([part.retain for part in parts], np.uint8)[order],
            _numbers([part.timestamps for part in parts], np.int64)[order],
            _properties([part.properties for part in parts], order),
            _taken([part.payloads for part in parts], order),
            _taken([part.sizes for part in parts], order),
        )
        return columns, streams[topics.codes][order]


def _small(streams: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each stream whether it is too small for frames of its own."""
    small: npt.NDArray[np.bool_] = np.bincount(streams) < FRAME_ROWS // 2
    return small


def _order(small: npt.NDArray[np.bool_], streams: npt.NDArray[np.int64], texts: list[str]) -> Indices:
    """Return the indexes of topics in order of stream and text, those of small streams last.

    The order of UTF-8 bytes is that of Python's strings.
    """
    import pyarrow.compute as pc  # a slow import

    table = pa.table({"small": small, "stream": streams, "topic": texts})
    order: Indices = (
        pc.sort_indices(table, [(name, "ascending") for name in table.column_names]).to_numpy().astype(np.intp)
    )
    return order


def _fits(rows: int, size: int) -> bool:
    return rows <= SEGMENT_ROWS and size <= SEGMENT_BYTES


def _joined(columns: Sequence[Constant[str] | Coded]) -> Coded:
    """Join columns of texts into one, with a list that has each text once."""
    numbers: dict[str, int] = {}
    codes = [_numbered(column, numbers) for column in columns]
    return Coded(np.concatenate(codes), Texts.of(list(numbers)))


def _numbered(column: Constant[str] | Coded, numbers: dict[str, int]) -> npt.NDArray[np.int64]:
    """Return a column's texts as numbers, and add numbers for new texts."""
    if isinstance(column, Constant):
        return np.full(len(column), numbers.setdefault(column.value, len(numbers)), dtype=np.int64)
    used = np.unique(column.codes)
    texts = column.texts.values[used].tolist()
    mine = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
    moved: npt.NDArray[np.int64] = mine[np.searchsorted(used, column.codes)]
    return moved


def _numbers(columns: Sequence[Column], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    return np.concatenate(
        [
            np.full(len(c), c.value, dtype=dtype) if isinstance(c, Constant) else np.asarray(c, dtype=dtype)
            for c in columns
        ]
    )


def _taken(columns: Sequence[list[T]], order: Indices) -> list[T]:
    joined = [value for column in columns for value in column]
    return list(map(joined.__getitem__, order.tolist()))


def _properties(columns: Sequence[Column], order: Indices) -> Column:
    if all(isinstance(column, Constant) and column.value is None for column in columns):
        return Constant(None, len(order))
    return _taken([to_list(column) for column in columns], order)


def _frames(
    columns: Columns[Coded], streams: npt.NDArray[np.int64], small: npt.NDArray[np.bool_]
) -> Iterator[tuple[Columns[Coded], FrameSpan]]:
    """Cut sorted rows into frames; return each with the streams, topics and positions that it spans."""
    ends = np.cumsum(columns.sizes)
    for begin, end in _groups(streams, small):
        for start, stop in _cuts(begin, end, ends):
            part = columns.window(start, stop)
            codes, texts = part.topics.codes, part.topics.texts.values
            yield (
                part,
                FrameSpan(
                    stop - start,
                    int(part.positions.min()),
                    int(part.positions.max()),
                    (int(streams[start]), texts[codes[0]]),
                    (int(streams[stop - 1]), texts[codes[-1]]),
                ),
            )


def _groups(streams: npt.NDArray[np.int64], small: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each stream's rows, and then of those of all small streams together."""
    rows = len(streams)
    large = rows - int(np.count_nonzero(small[streams]))
    borders = [0, *(np.flatnonzero(np.diff(streams[:large])) + 1).tolist(), large, rows]
    for start, stop in pairwise(borders):
        if start < stop:
            yield start, stop


def _cuts(start: int, end: int, ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each frame of a group of rows: of equal size, as far as their bytes allow."""
    frames = -(-(end - start) // FRAME_ROWS)
    rows = -(-(end - start) // frames)
    while start < end:
        before = int(ends[start - 1]) if start else 0
        full = int(np.searchsorted(ends, before + FRAME_BYTES)) + 1
        stop = min(start + rows, full, end)
        yield start, stop
        start = stop
