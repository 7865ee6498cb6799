"""Keys made of bit fields, and the next key that a filter accepts.

A vector of numbers, one per dimension, becomes one key: a sequence of **sources**, each a run of bits of
one dimension, from the most significant to the least, followed by zero bits up to whole bytes. The order
of keys is the same as numbers and as bytes.

Source of the method: the bitmask key mapper of EMQX's durable storage
(https://github.com/emqx/emqx, ``apps/emqx_durable_storage/src/emqx_ds_bitmask_keymapper.erl``), for the
key format of EIP 0023
(https://github.com/emqx/eip/blob/main/implemented/0023-rocksdb-message-persistence.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["KeyFilter", "KeyMapper", "Range", "Source"]

Vector = npt.NDArray[np.uint64]
Range = tuple[int, int]
"""Lowest and highest value, both included."""

_WORD = 64


@attrs.frozen
class Source:
    """A run of ``size`` bits, 1 to 64, of one dimension, from bit ``offset`` on; bit 0 is the lowest."""

    dimension: int
    offset: int
    size: int

    @property
    def full(self) -> int:
        """The highest value of this many bits."""
        return (1 << self.size) - 1

    def of(self, value: int) -> int:
        """Return this source's bits of a value of its dimension."""
        return value >> self.offset & self.full


class KeyMapper:
    """A mapping from vectors of numbers to keys, and back.

    A dimension's sources are in order of significance. Bits that no source holds are lost.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.dimensions = 1 + max(source.dimension for source in sources)
        bits = sum(source.size for source in sources)
        self.width = -(-bits // 8)
        """The number of bytes of a key."""
        self.bits = 8 * self.width
        shift = self.bits
        shifts = []
        for source in self.sources:
            shift -= source.size
            shifts.append(shift)
        self.shifts = tuple(shifts)
        """The index in a key of each source's lowest bit."""

    def encode(self, vector: Sequence[int]) -> int:
        """Return the key that holds the bits of a vector's numbers, in the order of the sources."""
        return sum(
            source.of(vector[source.dimension]) << shift
            for source, shift in zip(self.sources, self.shifts, strict=True)
        )

    def decode(self, key: int) -> list[int]:
        """Return the vector of a key; bits that no source holds are zero."""
        vector = [0] * self.dimensions
        for source, shift in zip(self.sources, self.shifts, strict=True):
            vector[source.dimension] |= (key >> shift & source.full) << source.offset
        return vector

    def pack(self, vectors: Sequence[Vector]) -> npt.NDArray[np.uint8]:
        """Return the keys of many vectors as rows of bytes; ``vectors`` has one array per dimension."""
        rows = len(vectors[0])
        words = np.zeros((-(-self.bits // _WORD) + 1, rows), dtype=np.uint64)
        for source, shift in zip(self.sources, self.shifts, strict=True):
            values = vectors[source.dimension] >> np.uint64(source.offset) & np.uint64(source.full)
            word, first = divmod(self.bits - shift - source.size, _WORD)
            # The number of the word's bits after the value; if negative, that many bits of the value are in the next
            # word.
            room = _WORD - first - source.size
            if room >= 0:
                words[word] |= values << np.uint64(room)
            else:
                words[word] |= values >> np.uint64(-room)
                words[word + 1] |= values << np.uint64(_WORD + room)
        return words.T.astype(">u8", order="C").view(np.uint8)[:, : self.width]

    def unpack(self, keys: npt.NDArray[np.uint8], dimension: int) -> Vector:
        """Return one dimension of many keys, given as rows of bytes."""
        values = np.zeros(len(keys), dtype=np.uint64)
        for source, shift in zip(self.sources, self.shifts, strict=True):
            if source.dimension == dimension:
                bits = self._bits(keys, self.bits - shift - source.size, source.size)
                values |= (bits & np.uint64(source.full)) << np.uint64(source.offset)
        return values

    def _bits(self, keys: npt.NDArray[np.uint8], start: int, size: int) -> Vector:
        """Return some bits of many keys, counted from the highest, with other bits above them."""
        first = min(start // 8, max(self.width - 8, 0))
        # The number of the word's bits after the value; if negative, that many bits of the value are in the next word.
        room = _WORD - (start - 8 * first) - size
        word = _word(keys, first)
        if room >= 0:
            return word >> np.uint64(room)
        return word << np.uint64(-room) | _word(keys, first + 8) >> np.uint64(_WORD + room)

    def filter(self, ranges: Sequence[Range]) -> KeyFilter:
        """Return a filter that accepts at least the keys of the vectors within ``ranges``, one per dimension.

        The filter accepts no other keys if each range lies within an aligned block of values, or consists of whole
        blocks. For every source that a range restricts, all values of the range then agree in the sources above it.
        """
        spans: list[Range] = []
        agreed = [True] * self.dimensions
        for source in self.sources:
            lowest, highest = (source.of(bound) for bound in ranges[source.dimension])
            spans.append((lowest, highest) if agreed[source.dimension] else (0, source.full))
            agreed[source.dimension] = agreed[source.dimension] and lowest == highest
        return KeyFilter(self, spans)


@attrs.frozen
class _Field:
    """The values of one source that a filter accepts."""

    shift: int
    full: int
    lowest: int
    highest: int
    floor: int
    """The lowest bits that may follow the field."""


class KeyFilter:
    """A lowest and a highest value for each source of a mapper.

    Fields with a single accepted value become an equality mask, so that most keys are decided by one
    comparison. The zero bits at a key's end are such a field.
    """

    def __init__(self, mapper: KeyMapper, spans: Sequence[Range]) -> None:
        self._bits = mapper.bits
        self._mask = self._equal = self._floor = 0
        self._ranges: list[tuple[int, int, int, int]] = []
        fields: list[_Field] = []
        padding = mapper.shifts[-1]
        if padding:
            fields.append(_Field(0, (1 << padding) - 1, 0, 0, 0))
        parts = list(zip(mapper.sources, mapper.shifts, spans, strict=True))
        for source, shift, (lowest, highest) in reversed(parts):
            fields.append(_Field(shift, source.full, lowest, highest, self._floor))
            self._floor |= lowest << shift
            if lowest == highest:
                self._mask |= source.full << shift
                self._equal |= lowest << shift
            elif (lowest, highest) != (0, source.full):
                self._ranges.append((shift, source.full, lowest, highest))
        self._fields = fields[::-1]
        self.free = not self._mask and not self._ranges
        """Whether every key is accepted."""

    def select(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Return the indexes of the accepted keys; keys may have additional bytes in front."""
        if self.free:
            return range(len(keys))
        mask, equal, number = self._mask, self._equal, int.from_bytes
        found = [index for index, key in enumerate(keys) if number(key, "big") & mask == equal]
        for shift, full, lowest, highest in self._ranges:
            found = [at for at in found if lowest <= number(keys[at], "big") >> shift & full <= highest]
        return found

    def ratchet(self, key: int) -> int | None:
        """Return the lowest accepted key at or above ``key``; None if there is none."""
        if key >> self._bits:
            return None
        raised = None  # the lowest accepted key that is higher than ``key`` in one of the fields seen so far
        for field in self._fields:
            value = key >> field.shift & field.full
            if value < field.lowest:
                return (key >> field.shift) - value + field.lowest << field.shift | field.floor
            if value > field.highest:
                return raised
            if value < field.highest:
                raised = (key >> field.shift) + 1 << field.shift | field.floor
        return key


def _word(keys: npt.NDArray[np.uint8], first: int) -> Vector:
    """Return eight bytes of many keys as numbers, with zeros past the end of a key."""
    part = keys[:, first : first + 8]
    if part.shape[1] < 8:
        part = np.pad(part, ((0, 0), (0, 8 - part.shape[1])))
    return np.ascontiguousarray(part).view(">u8").ravel().astype(np.uint64)
