"""The heads of stored messages: topics, client ids, positions and sizes, for which no payload is decompressed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from topicstore import TopicFilter
from topicstore.contract.columns import Coded, Column, Constant, Texts
from topicstore.contract.engine import Reader
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import Heads

from topicstore_layouts.shared.name_table import NameTable

from .format import Block
from .gathered_rows import picked
from .packing import Array
from .reading import ALL, Reading

if TYPE_CHECKING:
    from .sorted_rows import SortedRows

__all__ = ["heads_of", "merged_heads"]

_ROWS = 131_072
"""The number of rows of blocks, matching or not, after which a range ends. A segment has at most as many."""
_BYTES = 32 << 20
"""The number of stored bytes of blocks after which a range ends."""
_BLOCKS = 8_192
"""The number of blocks after which a range ends, however small they are."""


def merged_heads(rows: SortedRows, before: int, last: int) -> Heads:
    """Return the heads of all messages at positions above ``before``, up to ``last``."""
    return Heads(
        before=before,
        last=last,
        topics=Coded(rows.topics, Texts.of(rows.topic_texts)),
        client_ids=Coded(rows.clients, Texts.of(rows.client_texts)),
        positions=rows.positions,
        sizes=np.diff(rows.offsets),
    )


def heads_of(reading: Reading, topic_filter: TopicFilter, first: int, last: int) -> Iterator[Heads]:
    """Yield the heads of matching messages at positions ``first`` to ``last``, of one segment or many blocks at a time.

    Each range is read in a snapshot of its own, so that merges and deletes can run in between.
    """
    while first <= last:
        found = _Found(reading, topic_filter, first, last)
        with reading.engine.snapshot() as view:
            heads = found.in_segment(view) or found.in_blocks(view)
        yield heads
        first = heads.last + 1


class _Found:
    """The columns of the matching rows of one range."""

    def __init__(self, reading: Reading, topic_filter: TopicFilter, first: int, last: int) -> None:
        self._reading = reading
        self._filter = topic_filter
        self._first = first
        self._last = last
        self._topics: list[Column] = []
        self._client_ids: list[Column] = []
        self._positions: list[Column] = []
        self._sizes: list[Column] = []

    def in_segment(self, view: Reader) -> Heads | None:
        """Return the heads of the next segment; None if no segment has positions of the range."""
        segments = self._reading.segments
        segment = next(segments.between(view, self._first, self._last), None)
        if segment is None:
            return None
        numbers = self._reading.select(segment, ALL, self._filter, self._first, self._last)
        frames = segments.frames(view, segment, numbers)
        for number, frame in zip(numbers, frames, strict=True):
            self._add(frame, segments.place(segment.end, number))
        return self._heads(segment.end)

    def in_blocks(self, view: Reader) -> Heads:
        """Return the heads of the next blocks."""
        rows = size = number = 0
        for together in self._reading.blocks.batches(view, self._first, self._last):
            for block in together:
                self._add(block, self._reading.blocks.place(block.last))
                rows, size, number = rows + block.rows, size + block.size, number + 1
            if rows >= _ROWS or size >= _BYTES or number >= _BLOCKS:
                return self._heads(together[-1].last)
        return self._heads(self._last)

    def _add(self, block: Block, place: str) -> None:
        try:
            rows = self._reading.match(block, ALL, self._filter, self._first, self._last)
            if not isinstance(rows, bool):
                self._topics.append(picked(block.topics(), rows))
                self._client_ids.append(picked(block.client_ids(), rows))
                self._positions.append(picked(block.positions(), rows))
                self._sizes.append(picked(block.sizes(), rows))
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, place) from bad

    def _heads(self, last: int) -> Heads:
        return Heads(
            before=self._first - 1,
            last=min(last, self._last),
            topics=_names(self._reading.topics, self._topics),
            client_ids=_names(self._reading.clients, self._client_ids),
            positions=_numbers(self._positions, np.uint64),
            sizes=_numbers(self._sizes, np.int64),
        )


def _names(table: NameTable, columns: list[Column]) -> Constant[str] | Coded:
    """Join columns of names, which may be numbers of a dictionary or texts."""
    if not columns:
        return Constant("", 0)
    if all(isinstance(c, np.ndarray) or (isinstance(c, Constant) and isinstance(c.value, int)) for c in columns):
        return table.names(_numbers(columns, np.int64))
    numbers: dict[str, int] = {}

    def numbered(texts: list[str]) -> Array:
        return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))

    codes = []
    for column in columns:
        texts = Reading.texts(table, column)
        if isinstance(texts, Constant):
            codes.append(np.full(len(texts), numbered([texts.value])[0]))
        else:
            used, rows = np.unique(texts.codes, return_inverse=True)
            codes.append(numbered(texts.texts.values[used].tolist())[rows])
    return Coded(np.concatenate(codes), Texts.of(list(numbers)))


def _numbers(columns: list[Column], dtype: npt.DTypeLike) -> Array:
    """Join columns of numbers."""
    parts = [np.full(len(c), c.value, dtype) if isinstance(c, Constant) else np.asarray(c, dtype) for c in columns]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
