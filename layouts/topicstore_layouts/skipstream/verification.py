"""Compares the messages of a slab with its index, in bounded memory.

Messages are in order of streams and positions, index entries in order of hashes, so a pass over the messages can't look
up their entries in turn. Instead, every entry that a message should have is added to one of 65,536 sums, chosen by the
entry, and every stored entry is subtracted from its sum. If a sum isn't zero in the end, its entries, a tiny part of
all entries, are read again and compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import attrs
import numpy as np
import numpy.typing as npt
from topicstore.contract.engine import KEYS, Reader
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage
from topicstore.contract.positions import Positions

from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.message_rows import read_rows

from .entries import Entries
from .keys import Numbers, entry_keys, message_keys

__all__ = ["Verification"]

_SUM_BITS = 16
_MOST_COMPARED = 64
"""The most sums whose entries are compared one by one."""

Entry = tuple[int, int]
"""An index entry: hash and position."""


@attrs.frozen
class _Read:
    """A chunk of messages, intact and damaged ones."""

    good: dict[int, tuple[int, str]]
    """The stream and topic of each intact message, by position."""
    damages: dict[int, str]
    """The fault of each damaged message, by position."""


class Verification:
    """A single verification of a slab up to position ``bound``, in one snapshot."""

    def __init__(
        self, view: Reader, shard: int, generation: int, trie: LearnedTopics, entries: Entries, bound: int
    ) -> None:
        self._view = view
        self._messages = message_keys(generation)
        self._index = entry_keys(generation)
        self._slab = shard << 32 | generation
        self._place = f"shard {shard}, generation {generation}"
        self._trie = trie
        self._entries = entries
        self._bound = np.uint64(bound)
        self._sums = np.zeros(1 << _SUM_BITS, dtype=np.uint64)
        self._filled: dict[bytes, Damage] = {}
        """The damage of each entry whose value isn't empty, by key."""

    def run(self) -> Iterator[Damage | int]:
        """Yield each damage, and after each chunk of messages the number of intact ones."""
        for read in self._read_all():
            for position, reason in read.damages.items():
                yield Damage(place=self._place_of(position), reason=reason)
            yield len(read.good)
            np.add.at(self._sums, *_summed(*self._expected(read)))
        for hashes, positions in self._stored():
            np.subtract.at(self._sums, *_summed(hashes, positions))
        yield from self._filled.values()
        if self._sums.any():
            yield from self._compare()

    def _place_of(self, position: int) -> str:
        return f"{self._place}, message at position {position}"

    # --- messages ---

    def _read_all(self) -> Iterator[_Read]:
        for chunk in self._view.scan(KEYS, *self._messages.all()):
            keys = [key for key, _ in chunk]
            positions = self._messages.positions(keys)
            rows = np.flatnonzero(positions <= self._bound)
            values = [chunk[row][1] for row in rows.tolist()]
            yield self._read(self._messages.numbers(keys)[rows].tolist(), positions[rows], values)

    def _read(self, streams: Sequence[int], positions: Positions, values: Sequence[bytes]) -> _Read:
        read = _Read({}, {})
        for stream, position, topic in zip(streams, positions.tolist(), self._topics(positions, values), strict=True):
            if not isinstance(topic, str):
                read.damages[position] = topic.reason
            elif self._trie.find(topic) != stream:
                read.damages[position] = f"its topic {topic[:80]!r} does not lead to stream {stream}, where it lies"
            else:
                read.good[position] = stream, topic
        return read

    def _topics(self, positions: Positions, values: Sequence[bytes]) -> list[str | CorruptionError | NewerFormatError]:
        """Return the topic of each message, or the error that decoding it raises."""
        try:
            return [row.topic for row in read_rows(values, positions, self._slab)]
        except (CorruptionError, NewerFormatError) as bad:
            if len(values) == 1:
                return [bad]
        # Values are read one by one, because reading them together reports only the first damage.
        return [self._topics(positions[n : n + 1], [value])[0] for n, value in enumerate(values)]

    # --- entries ---

    def _expected(self, read: _Read) -> tuple[Numbers, Positions]:
        """Return the entries that messages should have."""
        known = {place: self._entries.of(*place) for place in set(read.good.values())}
        lists = [known[place] for place in read.good.values()]
        hashes = np.array(list(chain.from_iterable(lists)), dtype=np.uint64)
        positions = np.array(list(read.good), dtype=np.uint64)
        return hashes, np.repeat(positions, list(map(len, lists)))

    def _stored(self) -> Iterator[tuple[Numbers, Positions]]:
        """Yield the stored entries."""
        for chunk in self._view.scan(KEYS, *self._index.all()):
            keys = [key for key, _ in chunk]
            hashes, positions = self._index.numbers(keys), self._index.positions(keys)
            for row in [row for row, (_, value) in enumerate(chunk) if value]:
                place = f"{self._place}, index entry {hashes[row]:016x} at position {positions[row]}"
                self._filled[keys[row]] = Damage(place=place, reason=f"it holds {len(chunk[row][1])} bytes")
            rows = positions <= self._bound
            yield hashes[rows], positions[rows]

    def _compare(self) -> Iterator[Damage]:
        """Read the entries of up to 64 nonzero sums again; yield the missing ones and those without a message."""
        suspects = np.flatnonzero(self._sums)
        compared = suspects[:_MOST_COMPARED]
        expected: set[Entry] = set()
        damaged: set[int] = set()
        for read in self._read_all():
            damaged.update(read.damages)
            expected.update(_among(compared, *self._expected(read)))
        found = {entry for stored in self._stored() for entry in _among(compared, *stored)}
        for hash_, position in sorted(expected - found):
            yield Damage(place=self._place_of(position), reason=f"its index entry {hash_:016x} is missing")
        for hash_, position in sorted(found - expected):
            # The entries of a damaged message are unknown, so they can't be reported as superfluous.
            if position not in damaged:
                place = f"{self._place}, index entry {hash_:016x} at position {position}"
                yield Damage(place=place, reason="it leads to no message")
        if len(suspects) > len(compared):
            yield Damage(place=f"{self._place}, index", reason="more entries are missing or lead to no message")


def _summed(hashes: Numbers, positions: Positions) -> tuple[npt.NDArray[np.intp], Numbers]:
    """Return the index of the sum that each entry belongs to, and the number that the entry adds."""
    # The finalizer of splitmix64, in which each input bit changes about half of the output bits (G. L. Steele,
    # D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", 2014).
    mixed = hashes + positions * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(64 - _SUM_BITS)).astype(np.intp), mixed


def _among(sums: npt.NDArray[np.intp], hashes: Numbers, positions: Positions) -> Iterator[Entry]:
    """Return the entries that belong to these sums."""
    rows = np.isin(_summed(hashes, positions)[0], sums)
    return zip(hashes[rows].tolist(), positions[rows].tolist(), strict=True)
