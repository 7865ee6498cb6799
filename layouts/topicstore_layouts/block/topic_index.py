"""An in-memory index of the topics of blocks that are not merged, by which a query for few topics skips most blocks.

Queries build the index: a query that reads blocks which aren't in the index adds them. Writers don't change the index,
and it isn't stored. The index consists of pages. A page covers a range of keys, and has all blocks of this range and
the topics of each. A query reads all blocks of the ranges between pages. Pages stay valid, because a page may list
blocks and topics that no longer exist, but never lacks an existing one: writers add blocks only after all others,
deletes only remove topics from blocks, and merges only remove blocks.
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
same topic. Every query reads the blocks that don't fit, until older blocks have been merged."""
PAGE_TOPICS = 1 << 16
"""The number of topics at which a page is full, counting a topic once for each block. Block numbers have 16 bits."""
LEAST_BLOCKS = 4
"""The least number of blocks that a query adds. A reader that follows the writer reads fewer, and reads each once."""
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
    """Return the index's number for a topic that a block stores as text. Several topics may have the same number."""
    return hash(topic) & 0xFFFFFFFF


@attrs.frozen
class Sought:
    """The topics that a query looks for."""

    codes: _Codes
    """The topics' numbers in the slab's dictionary, and the `text_code` of each known topic that has no number."""
    texts: bool
    """Whether topics that are not in the dictionary may match too."""


@attrs.frozen(eq=False)
class _Page:
    """All blocks whose keys lie in a range, and their topics."""

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
    """For each entry of ``codes``, the number of its block: the index in ``ends``."""
    texts: npt.NDArray[np.uint16]
    """The numbers of the blocks that store some topics as text."""

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
        )  # the lowest 16 bits of a pair are the block's number in the page

    def joined(self, other: _Page) -> _Page:
        """Return a page of this page's range and of the adjacent higher range of another page."""
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
    """The pages that one query uses, and the topics that it looks up in them."""

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
        """Return the `Lookup` of a query that reads blocks from a position on.

        Returns None if the index has none of these blocks, or if the query has too many topics to gain from the index.
        """
        pages = self.pages
        if not pages or pages[-1].last < position:
            return None
        # Called after `pages` was read, so that it also returns topics whose numbers are new in these pages.
        topics = sought()
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
        """Yield the keys and values of the given blocks that still exist."""
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
        """Add a page with all blocks whose keys lie between ``first`` and ``last``, inclusive.

        Does nothing if the index has no room for the page. Raises `CorruptionError` if the topics are not valid.
        """
        page = _Page.of(first, last, blocks)
        with self._lock:
            merged = self._merged()
            pages = [other for other in self.pages if other.last > merged]
            at = bisect_left(pages, first, key=lambda other: other.first)
            beside = pages[max(at - 1, 0) : at + 1]
            if any(other.first <= last and first <= other.last for other in beside):
                return  # another query has added some of these blocks
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
    """Collects the blocks that a query reads, and adds to the index those that it doesn't have.

    The query must pass all blocks that it reads, in ascending order of keys from ``edge`` on, or with ``back`` in
    descending order; it may omit only blocks of ``pages``. The pages must have been read before the reader of the
    blocks was opened. ``sought`` returns the query's topics, or None if they are too many to gain from the index; it is
    called when there are enough blocks to add.
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
        """The first key, in the query's order, that the next page to be added may cover."""
        self._back = back
        self._before = 0
        """The number of pages before the last block, by which the query notices that it has passed a page."""
        self._useful: bool | None = None
        """Whether the query's topics are few enough; None as long as that is unknown."""
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
        """Add the collected blocks to the index, if they are enough."""
        if self._useful:
            self._take()
            self._put()
        self._waiting = []

    def _take(self) -> None:
        """Decode the topics of the waiting blocks, unless the query has too many topics."""
        if self._useful is None:
            self._useful = self._sought() is not None
        waiting, self._waiting = self._waiting, []
        if not self._useful:
            return
        for block in waiting:
            try:
                topics = block.topics()
            except CorruptionError:  # a query that needs the block raises the error when it reads the block
                self._put()
                self._edge = block.last - 1 if self._back else block.last + 1
                continue
            self._run.append((block.last, block.base, topics))
            self._rows += block.rows
            if self._rows >= PAGE_TOPICS or len(self._run) >= PAGE_TOPICS // 2:
                self._put()

    def _put(self) -> None:
        """Add the decoded blocks to the index, if they are enough."""
        worth = len(self._run) >= LEAST_BLOCKS or self._rows >= PAGE_TOPICS
        run, self._run, self._rows = self._run, [], 0
        if not run:
            return
        if self._back:
            run.reverse()
        first, last = run[0][0], run[-1][0]
        if self._back:
            above = bisect_left(self._pages, last, key=_last_of)
            if above < len(self._pages):  # at the end of the index, the writer may still add blocks below the edge
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
    """Split the keys from ``first`` to below ``before`` into the ranges of pages and the ranges between pages.

    If ``before`` is None, the last range has no end.
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
    """Return whether two pages, in either order, are adjacent and are to be merged into one page.

    Only pages of similar size are merged, so that each topic is sorted only a few times.
    """
    adjacent = one.last + 1 == other.first or other.last + 1 == one.first
    less, more = sorted((len(one.codes), len(other.codes)))
    return adjacent and less + more <= PAGE_TOPICS and 2 * less >= more


def _codes(topics: Column) -> _Codes:
    """Return the index's numbers for a block's topics, possibly with duplicates."""
    if isinstance(topics, Coded):
        return np.array([text_code(topic) for topic in topics.texts.values.tolist()], np.uint32)
    if isinstance(topics, Constant):
        return np.array([text_code(topics.value) if isinstance(topics.value, str) else topics.value], np.uint32)
    return np.asarray(topics).astype(np.uint32)


def _is_text(topics: Column) -> bool:
    return isinstance(topics, Coded) or (isinstance(topics, Constant) and isinstance(topics.value, str))


def _pairs(reader: Reader, keys: Sequence[tuple[int, int, int]]) -> Iterator[Pairs]:
    """Yield the existing pairs of these keys, in order; at a damaged one, raise the error after the pairs before it."""
    try:
        values = reader.get_many(DATA, keys)
    except CorruptionError:
        if len(keys) == 1:
            raise
        for key in keys:
            yield from _pairs(reader, [key])
        return
    yield [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
