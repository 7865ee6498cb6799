"""Compares the messages of a slab with its index, in bounded memory.

Messages lie in order of streams and positions, index entries in order of hashes, so that neither
can be looked up for each of the other in passing. So every entry that a message should have is
added to a sum, and every one that there is taken from it: one of 65,536 sums, chosen by the entry.
Where a sum isn't nothing in the end, the entries of that sum, a tiny part of all, are read once
more and compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
from topicstore.engine import DATA, INDEX, Reader
from topicstore.errors import CorruptionError, NewerFormatError
from topicstore.layout import Damage
from topicstore.positions import Positions

from topicstore_layouts.learned import LearnedTopics
from topicstore_layouts.rows import Row, read_rows

from .entries import Entries, Hashes

__all__ = ["Audit"]

_SUM_BITS = 16
_MOST_COMPARED = 64
"""Sums whose entries are compared one by one."""

Pairs = list[tuple[tuple[int, int, int], bytes]]
Place = tuple[int, int]
"""Stream and position of a message."""
Entry = tuple[int, int]
"""Hash and position."""


class Audit:
    """One verification of a slab, up to ``bound``, over a view that doesn't change."""

    def __init__(
        self, view: Reader, shard: int, generation: int, trie: LearnedTopics, entries: Entries, bound: int
    ) -> None:
        self._view = view
        self._generation = generation
        self._slab = shard << 32 | generation
        self._place = f"shard {shard}, generation {generation}"
        self._trie = trie
        self._entries = entries
        self._bound = bound
        self._sums = np.zeros(1 << _SUM_BITS, dtype=np.uint64)

    def run(self) -> Iterator[Damage | int]:
        """Yield each damage, and the number of good messages as it goes."""
        for pairs in self._messages():
            good, damages = self._read(pairs)
            yield from damages
            yield len(good)
            np.add.at(self._sums, *_summed(*self._expected(good)))
        for hashes, positions in self._stored():
            np.subtract.at(self._sums, *_summed(hashes, positions))
        if self._sums.any():
            yield from self._compare()

    def _messages(self) -> Iterator[Pairs]:
        for chunk in self._view.scan(DATA, (self._generation, 0, 0), (self._generation + 1, 0, 0)):
            yield [pair for pair in chunk if pair[0][2] <= self._bound]

    def _stored(self) -> Iterator[tuple[Hashes, Positions]]:
        """Yield the entries that there are."""
        for chunk in self._view.scan(INDEX, (self._generation, 0, 0), (self._generation + 1, 0, 0)):
            entries = np.array([key[1:] for key, _ in chunk], dtype=np.uint64)
            hashes, positions = entries[entries[:, 1] <= np.uint64(self._bound)].T
            yield hashes, positions

    # --- messages ---

    def _read(self, pairs: Pairs) -> tuple[dict[Place, str], list[Damage]]:
        """Return the topics of the good ones of some messages, and what is wrong with the others."""
        good: dict[Place, str] = {}
        damages: list[Damage] = []
        for (_, stream, position), row in self._decoded(pairs):
            if isinstance(row, Damage):
                damages.append(row)
            elif self._trie.find(row.topic) != stream:
                reason = f"its topic {row.topic[:80]!r} does not lead to stream {stream}, where it lies"
                damages.append(Damage(place=self._place_of(position), reason=reason))
            else:
                good[stream, position] = row.topic
        return good, damages

    def _decoded(self, pairs: Pairs) -> Iterator[tuple[tuple[int, int, int], Row | Damage]]:
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        positions = np.array([key[2] for key in keys], dtype=np.uint64)
        try:
            yield from zip(keys, read_rows(values, positions, self._slab), strict=True)
        except (CorruptionError, NewerFormatError):  # the latter from a damaged version byte
            yield from zip(keys, map(self._one, values, positions), strict=True)

    def _one(self, value: bytes, position: np.uint64) -> Row | Damage:
        try:
            return read_rows([value], np.array([position]), self._slab)[0]
        except (CorruptionError, NewerFormatError) as bad:
            reason = bad.reason if isinstance(bad, CorruptionError) else str(bad)
            return Damage(place=self._place_of(int(position)), reason=reason)

    def _place_of(self, position: int) -> str:
        return f"{self._place}, message at position {position}"

    # --- entries ---

    def _expected(self, topics: dict[Place, str]) -> tuple[Hashes, Positions]:
        """Return the entries that messages should have."""
        known: dict[tuple[int, str], list[int]] = {(stream, topic): [] for (stream, _), topic in topics.items()}
        for stream, topic in known:
            known[stream, topic] = self._entries.of(stream, topic)
        lists = [known[stream, topic] for (stream, _), topic in topics.items()]
        hashes = np.array(list(chain.from_iterable(lists)), dtype=np.uint64)
        positions = np.array([position for _, position in topics], dtype=np.uint64)
        return hashes, np.repeat(positions, list(map(len, lists)))

    def _compare(self) -> Iterator[Damage]:
        """Compare the entries of some of the sums that aren't nothing."""
        suspects = np.flatnonzero(self._sums)
        compared = suspects[:_MOST_COMPARED]
        expected: set[Entry] = set()
        damaged: set[int] = set()
        for pairs in self._messages():
            good, _ = self._read(pairs)
            damaged.update(key[2] for key, _ in pairs if key[1:] not in good)
            expected.update(_among(compared, *self._expected(good)))
        found = {entry for stored in self._stored() for entry in _among(compared, *stored)}
        for hash_, position in sorted(expected - found):
            yield Damage(place=self._place_of(position), reason=f"its index entry {hash_:016x} is missing")
        for hash_, position in sorted(found - expected):
            if position not in damaged:  # whose entries are not known
                place = f"{self._place}, index entry {hash_:016x} at position {position}"
                yield Damage(place=place, reason="it leads to no message")
        if len(suspects) > len(compared):
            yield Damage(place=f"{self._place}, index", reason="there are more such entries")


def _summed(hashes: Hashes, positions: Positions) -> tuple[npt.NDArray[np.intp], Hashes]:
    """Return for each entry which sum it belongs to, and what it adds to it."""
    # The finish of splitmix64: every bit of an entry moves about half of the bits of the result.
    mixed = hashes + positions * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(64 - _SUM_BITS)).astype(np.intp), mixed


def _among(sums: npt.NDArray[np.intp], hashes: Hashes, positions: Positions) -> Iterator[Entry]:
    """Return the entries that belong to these sums."""
    rows = np.isin(_summed(hashes, positions)[0], sums)
    return zip(hashes[rows].tolist(), positions[rows].tolist(), strict=True)
