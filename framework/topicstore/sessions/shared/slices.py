"""Slices of a group's messages: the assignment of topics to slices, and the places of slices.

The slice of a topic is the xxh64 hash of its UTF-8 bytes, modulo 64; this function is part of the stored format.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.columns import to_list
from topicstore.pubsub.read_cache import ReadBatch
from topicstore.sessions.portions import Traits

from .records import PackedPlaces

__all__ = ["ABOVE_ALL", "SLICES", "Places", "Slices", "pack_places", "raise_places", "slice_of", "slices_of_locked"]

ABOVE_ALL = np.uint64((1 << 64) - 1)
"""A number above every position."""
SLICES = 64
"""Number of slices in each shard."""

Places = npt.NDArray[np.uint64]
"""By shard and slice, the position up to which all messages were read."""
Slices = npt.NDArray[np.bool_]
"""A selection of the slices of a shard or, with one more dimension, of all shards."""


def slice_of(topic: str) -> int:
    """Return the slice of a topic."""
    return xxhash.xxh64_intdigest(topic.encode()) % SLICES


def slices_of_locked(whole: ReadBatch) -> npt.NDArray[np.uint8]:
    """Return the slice of each row, computed once for all readers of the read batch."""
    traits = Traits.of(whole)
    if traits.slices is None:
        topics = to_list(whole.batch.topics)
        slices = {topic: slice_of(topic) for topic in set(topics)}
        traits.slices = np.fromiter(map(slices.__getitem__, topics), np.uint8, len(topics))
    return traits.slices


# --- places ---


def pack_places(places: Places, which: Slices) -> PackedPlaces:
    """Return the places of some slices in stored form."""
    return tuple(_pack(row, some) for row, some in zip(places, which, strict=True))


def _pack(places: npt.NDArray[np.uint64], some: Slices) -> tuple[tuple[int, int], ...]:
    return tuple((_bits((places == place) & some), int(place)) for place in np.unique(places[some]))


def raise_places(places: Places, packed: PackedPlaces) -> None:
    """Set each place to the stored one if that is higher."""
    for row, pairs in zip(places, packed, strict=True):
        for bits, place in pairs:
            some = _slices(bits)
            row[some] = np.maximum(row[some], np.uint64(place))


def _bits(some: Slices) -> int:
    return int.from_bytes(np.packbits(some, bitorder="little").tobytes(), "little")


def _slices(bits: int) -> Slices:
    return np.unpackbits(np.frombuffer(bits.to_bytes(SLICES // 8, "little"), np.uint8), bitorder="little").astype(bool)
