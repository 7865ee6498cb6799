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

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.columns import Coded, Constant, Texts
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.layout import CompactStep

from .compression import Compressor
from .format import MIXED, Block
from .frames import FrameRows, encode_frame
from .heads import merged_heads
from .packing import own_times
from .reading import Reading
from .segments import FrameSpan, Segment, make_segment
from .sorted_rows import Codes, SortedRows, arrays_of_blocks, sort_rows

__all__ = ["Compaction"]

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
        """Yield the steps that merge the blocks up to a position; without ``whole``, only merges worth their cost."""
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
        frames = [f for s in segments for f in self._segments.frames(engine, s, np.flatnonzero(s.rows).tolist())]
        freed = sum(map(self._segments.stored_bytes, segments)) + sum(block.size for block in blocks)
        base = segments[0].base if segments else blocks[0].base
        before = self._segments.end(engine, segments[0].end if segments else None)
        end = blocks[-1].last if blocks else segments[-1].end
        self._segments.reach = max(self._segments.reach, end)
        for segment in segments:
            self._segments.remove(segment, write)
        if blocks:
            write.delete_range(DATA, self._blocks.key(blocks[0].last), self._blocks.key(end + 1))
        rows = self._sorted([*frames, *blocks])
        blocks.clear()
        streams = rows.streams[rows.topics]
        values, spans = [], []
        small = _small(streams)
        for number, (part, span) in enumerate(_frames(rows, streams, small)):
            stream = MIXED if small[span.first[0]] else span.first[0]
            seed = self._segments.frame_seed(end, number)
            values.append(encode_frame(part, stream, base, seed, self._compress))
            spans.append(span)
        own = sum(not small[span.first[0]] for span in spans)
        size = self._segments.put(make_segment(base, end, rows, spans, own), values, write)
        messages = len(rows.positions)
        self._segments.put_total(self._segments.total() - sum(s.messages for s in segments) + messages, write)
        heads = merged_heads(rows, before, end)
        return CompactStep(write=write, messages=messages, freed=freed - size, heads=heads)

    def _sorted(self, blocks: Sequence[Block]) -> SortedRows:
        """Return the rows of all blocks by stream, topic, position, those of small streams last."""
        part = arrays_of_blocks(blocks, self._reading.topics, self._reading.clients)
        return sort_rows([part], self._reading.find_all, _order)


def _small(streams: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return for each stream whether it is too small for frames of its own."""
    small: npt.NDArray[np.bool_] = np.bincount(streams) < FRAME_ROWS // 2
    return small


def _order(codes: Codes, streams: Codes, texts: pa.Array) -> Codes:
    """Return the indexes of topics in order of stream and text, those of small streams last.

    The order of UTF-8 bytes is that of Python's strings.
    """
    import pyarrow.compute as pc  # imported here, because the import is slow

    table = pa.table({"small": _small(streams[codes])[streams], "stream": streams, "topic": texts})
    order: Codes = (
        pc.sort_indices(table, [(name, "ascending") for name in table.column_names]).to_numpy().astype(np.int64)
    )
    return order


def _fits(rows: int, size: int) -> bool:
    return rows <= SEGMENT_ROWS and size <= SEGMENT_BYTES


def _frames(rows: SortedRows, streams: Codes, small: npt.NDArray[np.bool_]) -> Iterator[tuple[FrameRows, FrameSpan]]:
    """Cut sorted rows into frames; return each with the streams, topics and positions that it spans."""
    topics, clients = Texts.of(rows.topic_texts), Texts.of(rows.client_texts)
    for begin, end in _groups(streams, small):
        for start, stop in _cuts(begin, end, rows.offsets[1:]):
            part = _window(rows, start, stop, topics, clients)
            yield (
                part,
                FrameSpan(
                    stop - start,
                    int(part.positions.min()),
                    int(part.positions.max()),
                    (int(streams[start]), topics.values[rows.topics[start]]),
                    (int(streams[stop - 1]), topics.values[rows.topics[stop - 1]]),
                ),
            )


def _window(rows: SortedRows, start: int, stop: int, topics: Texts, clients: Texts) -> FrameRows:
    """Return the rows from ``start`` to before ``stop``."""
    positions, offsets = rows.positions[start:stop], rows.offsets[start : stop + 1]
    return FrameRows(
        positions,
        Coded(rows.topics[start:stop], topics),
        Coded(rows.clients[start:stop], clients),
        rows.qos[start:stop],
        rows.retain[start:stop],
        own_times(positions) if rows.timestamps is None else rows.timestamps[start:stop],
        Constant(None, stop - start) if rows.properties is None else rows.properties[start:stop],
        np.diff(offsets),
        rows.data[int(offsets[0]) : int(offsets[-1])],
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
