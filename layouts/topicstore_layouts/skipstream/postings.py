"""Lists of positions from the index, and their intersection.

The lists are read in chunks, side by side. If one list has no entry before a position, the other lists seek
to that position. Where all lists have entries, the candidates come from the sparsest list. A denser list is
read only if that is cheaper than fetching the messages that it would rule out.

Source of the method: the leapfrog join (T. L. Veldhuizen, "Leapfrog Triejoin: A Simple, Worst-Case Optimal
Join Algorithm", 2014, https://arxiv.org/abs/1210.0481), applied to chunks instead of keys, because a seek
costs as much as reading dozens of entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from topicstore.contract.engine import KEYS, Reader
from topicstore.contract.layout import ReadCounters
from topicstore.contract.positions import Positions

from .keys import Keys

__all__ = ["Candidates", "Postings", "intersect"]

_WORTH = 3
"""The number of index entries that can be read in the time of fetching one message by its key."""
_NEAR = 64
"""The most entries that are read instead of being leaped over."""
_RULED_OUT_FIRST, _LEAST_RULED_OUT = 3 / 4, 1 / 16
_NONE: Positions = np.empty(0, dtype=np.uint64)


@attrs.frozen
class Candidates:
    """A superset of the positions from ``first`` to ``last`` that are in all posting lists."""

    positions: Positions
    first: int
    last: int


class Postings:
    """The posting list of one hash up to position ``bound``, read forward; only the current chunks are in memory."""

    def __init__(self, reader: Reader, keys: Keys, hash_: int, bound: int, counters: ReadCounters) -> None:
        self._reader = reader
        self._keys = keys
        self._hash = hash_
        self._bound = bound
        self._counters = counters
        self._chunks: Iterator[list[tuple[bytes, bytes]]] | None = None
        self.positions = _NONE
        """The positions in memory: all entries of the list from the first of these up to `last`."""
        self.rules_out = _RULED_OUT_FIRST
        """The share of other lists' candidates that this list rules out: an average that weighs recent chunks most."""
        self.last = -1
        """The position up to which the list was read."""

    def seek(self, position: int) -> bool:
        """Drop entries before a position, and load the next entry; return False if there is none."""
        near = len(self.positions) and self.expected(position) - len(self.positions) <= _NEAR
        self._drop(position)
        while not len(self.positions) and self.last < self._bound:
            if not near:
                self._chunks = self._reader.scan(KEYS, *self._keys.span(self._hash, position, self._bound))
                self._counters.seeks += 1
            self._read()
            self._drop(position)
            near = False
        return bool(len(self.positions))

    def read(self, last: int, most: int) -> bool:
        """Load all entries up to a position; stop and return False if there are more than ``most``."""
        while self.last < last and len(self.positions) <= most:
            self._read()
        return self.last >= last

    def expected(self, last: int) -> float:
        """Return an estimate of the number of entries from the first loaded one to a position."""
        first = int(self.positions[0])
        return len(self.positions) * max((last - first + 1) / (self.last - first + 1), 1.0)

    def _drop(self, position: int) -> None:
        if len(self.positions):
            self.positions = self.positions[np.searchsorted(self.positions, np.uint64(position)) :]

    def _read(self) -> None:
        chunk = None if self._chunks is None else next(self._chunks, None)
        if chunk is None:
            self.last = self._bound
            return
        more = self._keys.positions([key for key, _ in chunk])
        self._counters.visited += len(chunk)
        self.positions = np.concatenate([self.positions, more]) if len(self.positions) else more
        self.last = int(more[-1])


def intersect(lists: Sequence[Postings], first: int, bound: int, counters: ReadCounters) -> Iterator[Candidates]:
    """Yield the positions in all posting lists from ``first`` to ``bound``, for consecutive ranges of positions.

    Some yielded positions may be missing in a list: the caller must check the messages' topics.
    """
    at = first
    while at <= bound:
        if not all(each.seek(at) for each in lists):
            return
        leap = max(int(each.positions[0]) for each in lists)
        if any(each.last < leap for each in lists):
            yield Candidates(_NONE, at, leap - 1)  # no candidates: the caller can check its deadline here
            at = leap
            continue
        driver, *others = sorted(lists, key=lambda each: each.last, reverse=True)
        last, found = driver.last, driver.positions[np.searchsorted(driver.positions, np.uint64(leap)) :]
        for other in others:
            found = _ruled_out(found, other, last)
        counters.skipped += len(driver.positions) - len(found)
        yield Candidates(found, leap, last)
        at = last + 1


def _ruled_out(found: Positions, other: Postings, last: int) -> Positions:
    """Return the candidates up to ``last`` that are also in another list, or all if reading it costs too much."""
    if not len(found):
        return found
    worth = int(_WORTH * other.rules_out * len(found))
    if other.last < last and other.expected(last) > worth:
        return found
    if not other.read(last, worth):
        other.rules_out = max(other.rules_out / 2, _LEAST_RULED_OUT)
        return found
    both = _both(found, other.positions)
    other.rules_out = max((other.rules_out + 1 - len(both) / len(found)) / 2, _LEAST_RULED_OUT)
    return both


def _both(some: Positions, others: Positions) -> Positions:
    """Return the positions that are in both arrays, which are sorted and without duplicates."""
    if len(some) > len(others):
        some, others = others, some
    if not len(some):
        return some
    places = np.minimum(np.searchsorted(others, some), len(others) - 1)
    both: Positions = some[others[places] == some]
    return both
