"""The search for the newest matching messages: backwards from a position, block by block and segment by segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from topicstore import TopicFilter
from topicstore.contract.engine import INDEX, Reader
from topicstore.contract.errors import CorruptionError
from topicstore.contract.positions import Positions

from .batch_blocks import Pairs
from .format import Block
from .reading import Reading
from .segments import Segment
from .topic_index import Lookup, Passing

__all__ = ["newest_span"]

_LOOKED_AT = 65_536
"""The number of rows of blocks after which a search ends, with or without matches, so that a call ends soon."""
_KEPT = 8
"""Up to this many blocks with matches are cached for the read that follows."""
_FEW_FRAMES = 16
"""Up to this many frames of those of a segment are decoded, because few of their rows may match."""
_WHOLE = 4_096
"""For a reader of this many rows a segment is decoded whole, because they lie in nearly all frames."""


def newest_span(
    reading: Reading, stream: int, topic_filter: TopicFilter, first: int, last: int, rows: int
) -> tuple[int, int]:
    """Return a span of positions with the newest matching messages; see `Slab.newest`."""
    deletes = reading.deletes  # read before the view is opened, so that the view includes all counted deletes
    sought = partial(reading.sought, topic_filter)
    # Before the view is opened, so that the view has all blocks of the pages.
    lookup = reading.index.lookup(first, sought)
    with reading.engine.snapshot() as view:
        reading.counters.seeks += 1
        passing = Passing(reading.index, () if lookup is None else lookup.pages, sought, last - 1, back=True)
        found: list[tuple[Block, Positions]] = []
        begin, count, looked_at, skipped = last + 1, 0, 0, False
        narrow = sought() is not None
        for blocks in _batches(reading, view, lookup, passing, first, last, rows):
            matching = [(b, at) for b in blocks if len(at := _matching(reading, b, stream, topic_filter, first, last))]
            if found and not matching and not narrow:
                break
            found += matching
            begin = max(blocks[0].base, first)
            count += sum(len(positions) for _, positions in matching)
            looked_at += sum(block.rows for block in blocks)
            # A read of the span would decode blocks without matches again, unless the index lets it skip them.
            if count >= rows or looked_at >= _LOOKED_AT or (skipped and found and not narrow):
                break
            skipped = not matching
        else:
            if not found:
                return _in_segments(reading, view, deletes, stream, topic_filter, first, begin - 1, rows)
    if not found:
        return begin, begin
    if len(found) <= _KEPT:
        reading.blocks.cache.keep([block for block, _ in found])
    positions = np.sort(np.concatenate([positions for _, positions in found]))
    return int(positions[-rows]) if count >= rows else begin, int(positions[-1])


def _batches(
    reading: Reading, view: Reader, lookup: Lookup | None, passing: Passing, first: int, last: int, rows: int
) -> Iterator[list[Block]]:
    """Yield the blocks that may have matches from ``first`` to ``last``, newest first, in one list for each batch.

    Blocks that the index of blocks by topic lacks are added to it.
    """
    blocks, index = reading.blocks, reading.index
    newest: Iterable[Pairs] | None = None
    earlier: Iterable[Pairs] = blocks.pairs(view, first, last, reverse=True)
    if lookup is not None:
        newest = index.scan(view, lookup, last, last, 1)
        earlier = index.scan_back(view, lookup, first, last, rows)
    together = next(blocks.batches(view, last, last, newest), [])[::-1]
    try:
        for chunk in earlier:
            for key, value in chunk:
                block = blocks.cache.get(key[2], value) or blocks.decode(key[2], value)
                if together and block.base != together[0].base:
                    passing.add(together)
                    yield together
                    together = []
                together.append(block)
        if together:
            passing.add(together)
            yield together
    finally:
        passing.end()


def _matching(
    reading: Reading, block: Block, stream: int, topic_filter: TopicFilter, first: int, last: int
) -> Positions:
    """Return the positions of the matching rows of a block."""
    try:
        rows = reading.match(block, stream, topic_filter, first, last)
        if isinstance(rows, bool):
            return np.empty(0, np.uint64)
        return block.positions() if rows is None else block.positions()[rows]
    except CorruptionError as bad:
        raise CorruptionError(bad.reason, reading.blocks.place(block.last)) from bad


def _in_segments(
    reading: Reading,
    view: Reader,
    deletes: int,
    stream: int,
    topic_filter: TopicFilter,
    first: int,
    last: int,
    rows: int,
) -> tuple[int, int]:
    for segment in _segments(reading, view, last):
        if segment.end < first:
            break
        numbers = reading.select(segment, stream, topic_filter, first, last)
        if not len(numbers):
            continue
        if rows < _WHOLE and (len(numbers) > _FEW_FRAMES or len(numbers) == len(segment.rows)):
            begin, end = _begin(segment, numbers, last, rows), min(int(segment.highest[numbers].max()), last)
            return max(begin, first), end
        positions = reading.find_in_segment(view, deletes, segment, stream, topic_filter, first, last)
        if len(positions):
            begin = int(positions[-rows]) if len(positions) >= rows else max(segment.base, first)
            return begin, int(positions[-1])
    return first, first - 1


def _segments(reading: Reading, view: Reader, last: int) -> Iterator[Segment]:
    """Yield the segments that may have positions up to ``last``, newest first."""
    segments = reading.segments
    for chunk in view.scan(INDEX, segments.index_key(last), segments.behind(), limit=1):
        segment = segments.open(chunk[0][0][1], chunk[0][1])
        if segment.base <= last:
            yield segment
    for chunk in view.scan(INDEX, segments.index_key(0), segments.index_key(last), reverse=True):
        for key, value in chunk:
            yield segments.open(key[1], value)


def _begin(segment: Segment, numbers: Sequence[int], last: int, rows: int) -> int:
    """Return a position from which frames of a segment have about ``rows`` rows up to ``last``, in few frames."""
    highest, lowest = segment.highest[numbers], segment.lowest[numbers]
    # Each frame has a row at its highest position. So the last ``rows`` frames, in order of highest positions, have at
    # least that many rows.
    ends = np.sort(highest[highest <= np.uint64(last)])
    top = min(last, int(highest.max()))
    begin = int(ends[-rows]) if len(ends) >= rows and int(ends[-1]) == top else segment.base
    # The rows of a frame are assumed to be evenly distributed between its lowest and its highest position.
    counts = segment.rows[numbers] / ((highest - lowest).astype(np.float64) + 1)
    low, high = (top - np.minimum(edge, np.uint64(top)).astype(np.float64) for edge in (lowest, highest))
    for width in np.geomspace(rows, max(top - segment.base + 1, rows + 1), 24).tolist():
        if (counts * np.maximum(np.minimum(low, width) - high, 0)).sum() >= rows:
            return max(begin, top - int(width))
    return begin
