"""An index in memory of the blocks of batches by their topics, by which a question for few topics skips most blocks.

Questions build the index: one that passes through blocks of which the index has no topics adds them. Writers don't take
part, and nothing of it is stored. The index consists of pages. A page knows of a range of keys which blocks there are
and which topics each has; a question reads all blocks of the ranges between the pages. What a page knows remains true:
writers only add blocks after all others, deletes only take topics from blocks, and merges only remove blocks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
from topicstore.contract.columns import Coded, Column, Constant
from topicstore.contract.engine import DATA, Reader
from topicstore.contract.errors import CorruptionError

from .batch_blocks import BatchBlocks, Pairs
from .format import Block

__all__ = ["Lookup", "Passing", "Sought", "TopicIndex", "text_code"]

MOST_BYTES = 32 << 20
"""The maximum size of a slab's index, enough for the blocks of 5 million messages of which no two in a block have the
same topic. Blocks that don't fit are read by every question until older ones were merged."""
PAGE_TOPICS = 1 << 16
"""The number of topics, counted once a block, from which a page is complete. Numbers of its blocks have 16 bits."""
LEAST_BLOCKS = 4
"""The least number of blocks that a question adds: a reader that follows the writer reads fewer, once each."""
_PAGE_BYTES = 1_000
"""The approximate bytes of memory that a page takes besides its arrays."""
_READ_BLOCKS, _READ_BYTES = 64, 1 << 20
"""The number of blocks and the approximate bytes that are read together."""
_FIRST_BLOCKS = 4
"""The number of blocks that are read first, as their size isn't known."""

_Codes = npt.NDArray[np.uint32]
_Keys = npt.NDArray[np.uint64]
_Range = tuple[int, int | None, "_Page | None"]
"""The first key of a range, the key after its last, None without an end, and the page that knows its blocks."""
_Entry = tuple[int, int, Column]
"""The key of a block, the first position of its batch, and its topics."""


def text_code(topic: str) -> int:
    """Return the number by which the index has a topic that a block has as text. Topics may share it."""
    return hash(topic) & 0xFFFFFFFF


@attrs.frozen
class Sought:
    """The topics of a question."""

    codes: _Codes
    """The numbers of topics in the slab's dictionary, and `text_code` of those that are known as text."""
    texts: bool
    """Whether other topics, which have no number, may match too."""


@attrs.frozen(eq=False)
class _Page:
    """The blocks whose keys lie in a range: all that there are, and their topics."""

    first: int
    """The lowest key of the range."""
    last: int
    """The highest key of the range."""
    ends: _Keys
    """The keys of the blocks, in order."""
    bases: _Keys
    """The first position of each block's batch."""
    codes: _Codes
    """The topics of all blocks, in order."""
    numbers: npt.NDArray[np.uint16]
    """The number of the block that has each of these topics."""
    texts: npt.NDArray[np.uint16]
    """The numbers of the blocks that have topics as texts."""

    @classmethod
    def of(cls, first: int, last: int, blocks: Sequence[_Entry]) -> _Page:
        """Return a page of blocks in order: the key, the base and the topics of each."""
        codes = [_codes(topics) for _, _, topics in blocks]
        pairs = np.concatenate(codes).astype(np.uint64) << np.uint64(16)
        pairs |= np.repeat(np.arange(len(blocks), dtype=np.uint64), [len(each) for each in codes])
        texts = [number for number, (_, _, topics) in enumerate(blocks) if _is_text(topics)]
        ends, bases = (np.array([block[at] for block in blocks], np.uint64) for at in (0, 1))
        return cls._sorted(first, last, (ends, bases), pairs, np.array(texts, np.uint16))

    @classmethod
    def _sorted(
        cls, first: int, last: int, keys: tuple[_Keys, _Keys], pairs: _Keys, texts: npt.NDArray[np.uint16]
    ) -> _Page:
        pairs.sort()
        if len(pairs) > 1:
            pairs = pairs[np.concatenate(([True], pairs[1:] != pairs[:-1]))]
        return cls(
            first, last, *keys, (pairs >> np.uint64(16)).astype(np.uint32), pairs.astype(np.uint16), texts
        )  # the lowest 16 bits of a pair are the number of its block

    def joined(self, other: _Page) -> _Page:
        """Return a page of both ranges, of which the other follows this one."""
        codes = np.concatenate((self.codes, other.codes)).astype(np.uint64)
        shift = len(self.ends)
        numbers = np.concatenate((self.numbers, other.numbers + np.uint16(shift)))
        keys = np.concatenate((self.ends, other.ends)), np.concatenate((self.bases, other.bases))
        texts = np.concatenate((self.texts, other.texts + np.uint16(shift)))
        return self._sorted(self.first, other.last, keys, codes << np.uint64(16) | numbers.astype(np.uint64), texts)

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the page takes."""
        arrays = self.ends, self.bases, self.codes, self.numbers, self.texts
        return _PAGE_BYTES + sum(array.nbytes for array in arrays)

    def find(self, sought: Sought, first: int, bound: int) -> list[int]:
        """Return the keys, in order, of the blocks that may have sought topics at positions in a range."""
        starts, stops = (np.searchsorted(self.codes, sought.codes, side).tolist() for side in ("left", "right"))
        found = {
            number
            for start, stop in zip(starts, stops, strict=True)
            if start < stop
            for number in self.numbers[start:stop].tolist()
        }
        if sought.texts and len(self.texts):
            found.update(self.texts.tolist())
        if not found:
            return []
        numbers = np.array(sorted(found))
        ends, bases = self.ends[numbers], self.bases[numbers]
        keys: list[int] = ends[(ends >= np.uint64(first)) & (bases <= np.uint64(bound))].tolist()
        return keys


@attrs.frozen(eq=False)
class Lookup:
    """What the index has for one question: its pages, and the topics that are looked up in them."""

    pages: Sequence[_Page]
    sought: Sought


class TopicIndex:
    """The index of one slab's blocks. Thread-safe."""

    def __init__(self, blocks: BatchBlocks, merged: Callable[[], int]) -> None:
        self._blocks = blocks
        self._merged = merged
        """Returns a position up to which blocks were merged."""
        self.pages: tuple[_Page, ...] = ()
        """The pages, in order of their ranges, which don't overlap. Replaced as a whole."""
        self._lock = threading.Lock()
        """Guards the replacing of `pages`."""

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the index takes."""
        return sum(page.memory for page in self.pages)

    def lookup(self, position: int, sought: Callable[[], Sought | None]) -> Lookup | None:
        """Return the lookup of a question for blocks from a position on.

        Returns None if the index knows none of them, or if the question's topics are too many for it to be of use.
        """
        pages = self.pages
        if not pages or pages[-1].last < position:
            return None
        topics = sought()  # after the pages were taken: they might have blocks with topics that had no number before
        return None if topics is None else Lookup(pages, topics)

    def scan(self, reader: Reader, lookup: Lookup, first: int, bound: int, few: int) -> Iterator[Pairs]:
        """Yield the pairs of blocks that may have sought topics at positions ``first`` to ``bound``, in order.

        ``reader`` is a snapshot, opened after the look-up. About ``few`` blocks are read first, because the caller may
        need no more.
        """
        for start, stop, page in _ranges(lookup.pages, first, None):
            if page is None:
                yield from self._blocks.pairs(reader, start, stop)
            else:
                yield from self._read(reader, page.find(lookup.sought, first, bound), few)
                if int(page.bases[-1]) > bound:
                    return

    def scan_back(self, reader: Reader, lookup: Lookup, first: int, before: int, few: int) -> Iterator[Pairs]:
        """Yield the pairs of blocks with keys from ``first`` to below ``before``, in descending order; see `scan`."""
        for start, stop, page in reversed(_ranges(lookup.pages, first, before)):
            if page is None:
                yield from self._blocks.pairs(reader, start, stop, reverse=True)
            else:
                keys = page.find(lookup.sought, start, before)
                yield from self._read(reader, keys[: bisect_left(keys, before)][::-1], few)

    def _read(self, reader: Reader, keys: Sequence[int], few: int) -> Iterator[Pairs]:
        """Yield the pairs of these blocks, without those that are there no more."""
        start, count = 0, max(1, min(few, _FIRST_BLOCKS))
        while start < len(keys):
            some = [self._blocks.key(key) for key in keys[start : start + count]]
            start += count
            size = 0
            for pairs in _pairs(reader, some):
                size += sum([len(value) for _, value in pairs])
                yield pairs
            fitting = _READ_BYTES * len(some) // max(size, 1)
            count = max(1, min(4 * count, fitting, _READ_BLOCKS))

    def add(self, first: int, last: int, blocks: Sequence[_Entry]) -> None:
        """Add blocks, which are all those with keys from ``first`` to ``last``; nothing if there is no room.

        Each has its key, its base and its topics. Raises `CorruptionError` if the topics can't be right.
        """
        page = _Page.of(first, last, blocks)
        with self._lock:
            merged = self._merged()
            pages = [other for other in self.pages if other.last > merged]
            at = bisect_left(pages, first, key=lambda other: other.first)
            beside = pages[max(at - 1, 0) : at + 1]
            if any(other.first <= last and first <= other.last for other in beside):
                return  # another question has added some of them
            if page.memory + sum(other.memory for other in pages) > MOST_BYTES:
                self.pages = tuple(pages)
                return
            pages.insert(at, page)
            while at and _joinable(pages[at - 1], pages[at]):
                pages[at - 1 : at + 1] = [pages[at - 1].joined(pages[at])]
                at -= 1
            while at + 1 < len(pages) and _joinable(pages[at + 1], pages[at]):
                pages[at : at + 2] = [pages[at].joined(pages[at + 1])]
            self.pages = tuple(pages)


class Passing:
    """The blocks that a question passes through, which it adds to the index where the index doesn't know them.

    They come in the order of their keys, ascending from the key ``edge`` on or, with ``back``, descending from it, and
    none is left out but those that ``pages`` know. ``pages`` were taken before the reader of the blocks was opened.
    ``sought`` returns the question's topics, or None if they are too many for the index to be of use; it is called when
    there are enough blocks to add.
    """

    def __init__(
        self,
        index: TopicIndex,
        pages: Sequence[_Page],
        sought: Callable[[], Sought | None],
        edge: int,
        *,
        back: bool = False,
    ) -> None:
        self._index = index
        self._pages = pages
        self._sought = sought
        self._edge = edge
        """The first key of which no page of this question knows whether there is a block."""
        self._back = back
        self._before = 0
        """The number of pages before the last block, by which a question notices that it has passed a page."""
        self._useful: bool | None = None
        """Whether the question's topics are few enough; None as long as that is unknown."""
        self._waiting: list[Block] = []
        """Blocks whose topics are not decoded yet: few, because blocks have payloads."""
        self._run: list[_Entry] = []
        self._rows = 0

    def add(self, blocks: Sequence[Block]) -> None:
        """Add the blocks of a batch."""
        if self._useful is False:
            return
        for block in blocks:
            if self._back and block.last > self._edge:
                continue
            before = bisect_left(self._pages, block.last, key=_last_of)
            known = before < len(self._pages) and self._pages[before].first <= block.last
            if known or before != self._before:
                self.end()
            self._before = before
            if not known:
                self._waiting.append(block)
        if self._useful or len(self._waiting) >= LEAST_BLOCKS:
            self._take()

    def end(self) -> None:
        """Put the blocks into the index, if they are enough."""
        if self._useful:
            self._take()
            self._put()
        self._waiting = []

    def _take(self) -> None:
        """Decode the topics of the waiting blocks, unless the question has too many topics."""
        if self._useful is None:
            self._useful = self._sought() is not None
        waiting, self._waiting = self._waiting, []
        if not self._useful:
            return
        for block in waiting:
            try:
                topics = block.topics()
            except CorruptionError:  # of a block that the question skips; if it needs the block, it raises the error
                self._put()
                self._edge = block.last - 1 if self._back else block.last + 1
                continue
            self._run.append((block.last, block.base, topics))
            self._rows += block.rows
            if self._rows >= PAGE_TOPICS or len(self._run) >= PAGE_TOPICS // 2:
                self._put()

    def _put(self) -> None:
        """Put the blocks of the run into the index, if they are enough."""
        worth = len(self._run) >= LEAST_BLOCKS or self._rows >= PAGE_TOPICS
        run, self._run, self._rows = self._run, [], 0
        if not run:
            return
        if self._back:
            run.reverse()
        first, last = run[0][0], run[-1][0]
        if self._back:
            above = bisect_left(self._pages, last, key=_last_of)
            if above < len(self._pages):  # otherwise the writer may still add blocks before the edge
                last = min(self._edge, self._pages[above].first - 1)
            self._edge = first - 1
        else:
            below = bisect_left(self._pages, first, key=_last_of)
            first = max(self._edge, self._pages[below - 1].last + 1 if below else 0)
            self._edge = last + 1
        if worth:
            self._index.add(first, last, run)


def _last_of(page: _Page) -> int:
    return page.last


def _ranges(pages: Sequence[_Page], first: int, before: int | None) -> list[_Range]:
    """Cut the keys from ``first`` to before another one, None for the last key, into those of pages and those between.

    The last range may have no end, which is None.
    """
    ranges: list[_Range] = []
    at = first
    for page in pages[bisect_left(pages, first, key=_last_of) :]:
        if before is not None and page.first >= before:
            break
        if at < page.first:
            ranges.append((at, page.first, None))
            at = page.first
        stop = page.last + 1 if before is None else min(page.last + 1, before)
        ranges.append((at, stop, page))
        at = stop
    if before is None or at < before:
        ranges.append((at, before, None))
    return ranges


def _joinable(one: _Page, other: _Page) -> bool:
    """Return whether neighbours, in either order, are to become one page.

    Only pages of about the same size do, so that topics are sorted anew a few times at most.
    """
    adjacent = one.last + 1 == other.first or other.last + 1 == one.first
    less, more = sorted((len(one.codes), len(other.codes)))
    return adjacent and less + more <= PAGE_TOPICS and 2 * less >= more


def _codes(topics: Column) -> _Codes:
    """Return the topics of a block as the index has them, maybe some of them repeatedly."""
    if isinstance(topics, Coded):
        return np.array([text_code(topic) for topic in topics.texts.values.tolist()], np.uint32)
    if isinstance(topics, Constant):
        return np.array([text_code(topics.value) if isinstance(topics.value, str) else topics.value], np.uint32)
    return np.asarray(topics).astype(np.uint32)


def _is_text(topics: Column) -> bool:
    return isinstance(topics, Coded) or (isinstance(topics, Constant) and isinstance(topics.value, str))


def _pairs(reader: Reader, keys: Sequence[tuple[int, int, int]]) -> Iterator[Pairs]:
    """Yield the pairs of these keys; those before a damaged one before the error."""
    try:
        values = reader.get_many(DATA, keys)
    except CorruptionError:
        if len(keys) == 1:
            raise
        for key in keys:
            yield from _pairs(reader, [key])
        return
    yield [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
