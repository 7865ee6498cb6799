"""`History`: the number of a shard's messages of all topics up to any position, computed from zones without reading.

The number of messages up to a position is the position's rank. The ranks at the ends of zones, 65,536 messages apart,
are known. Between them, messages are assumed to be evenly distributed over time. `Spread` distributes messages evenly
between two ranks, if nothing else is known about them.
"""

from __future__ import annotations

from typing import Self

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.positions import COUNTER_BITS, Positions, first_position
from topicstore.shard.shard import Shard
from topicstore.shard.zones import SIZE

__all__ = ["History", "Spread"]

Numbers = npt.NDArray[np.float64]


@attrs.frozen(eq=False)
class History:
    """The ranks of some positions of a shard, in ascending order.

    The rank of a position is the number of the shard's messages at or before it.
    """

    positions: Positions
    ranks: Numbers

    @classmethod
    def of(cls, shard: Shard, mark: int) -> Self:
        """Return the history of a shard up to ``mark``, its watermark. Reads no messages."""
        if (elsewhere := shard.elsewhere) is not None:
            found = elsewhere.ranks(mark)
            return cls(np.array(found.positions, np.uint64), np.array(found.ranks, np.float64))
        positions, ranks, before = list[int](), list[int](), 0
        for record in shard.generations.listed():
            ends = shard.reader.zone_ends(record.number)  # the last zone of a sealed generation isn't full
            last = mark if record.last_position is None else record.last_position
            # A shard's first generation begins at the lowest position, long before its first message.
            begin = max(record.first_position - 1, min([first_position(record.created), *ends, last]))
            positions += (begin, *ends, last)
            ranks += (before + min(SIZE * number, record.messages) for number in range(len(ends) + 1))
            before += record.messages
            ranks.append(before)
        return cls(np.maximum.accumulate(np.array(positions, np.uint64)), np.array(ranks, np.float64))

    def after(self, position: int) -> int:
        """Return a lower bound of the number of messages after a position."""
        known = int(np.searchsorted(self.positions, np.uint64(position)))
        return int(self.ranks[-1] - self.ranks[known]) if known < len(self.ranks) else 0

    def ranks_at(self, positions: Positions) -> Numbers:
        """Return the ranks of any positions, interpolated between the known ones."""
        return self.ranks_of_times(_times(positions))

    def ranks_of_times(self, times: Numbers) -> Numbers:
        """Return the ranks of the last positions before these times, in microseconds since the epoch."""
        return np.interp(times, _times(self.positions), self.ranks)

    def before(self, position: int, messages: float) -> int:
        """Return a position such that about ``messages`` messages lie between it and ``position``.

        Returns 0 if fewer messages lie before ``position``.
        """
        base = int(self.positions[0])
        offsets = (self.positions - self.positions[0]).astype(np.float64)  # floats have enough digits for differences
        rank = float(np.interp(position - base, offsets, self.ranks)) - messages
        return base + int(np.interp(rank, self.ranks, offsets)) if rank > 0 else 0


def _times(positions: Positions) -> Numbers:
    return (positions >> np.uint64(COUNTER_BITS)).astype(np.float64)


@attrs.frozen(eq=False)
class Spread:
    """Rows, each with a number of messages evenly distributed between two ranks, prepared for many queries."""

    _first: Numbers
    _last: Numbers
    _begun: Numbers
    _ended: Numbers

    @classmethod
    def of(cls, first: Numbers, last: Numbers, messages: Numbers) -> Self:
        """Return the spread of rows, given each row's rank of the first and last message and its number of messages."""
        last = np.maximum(last, first + 1e-6)
        weights = messages / (last - first)
        columns = np.stack((weights, weights * first, messages))
        return cls(np.sort(first), np.sort(last), _sums(first, columns[:2]), _sums(last, columns))

    def before(self, at: Numbers) -> Numbers:
        """Return the number of messages before each of these ranks."""
        begun = self._begun[:, np.searchsorted(self._first, at, side="right")]
        ended = self._ended[:, np.searchsorted(self._last, at, side="right")]
        found: Numbers = at * (begun[0] - ended[0]) - (begun[1] - ended[1]) + ended[2]
        return found


def _sums(keys: Numbers, columns: Numbers) -> Numbers:
    """Return the prefix sums of the columns, sorted by ``keys``, beginning with 0."""
    ordered = columns[:, np.argsort(keys)]
    return np.concatenate((np.zeros((len(columns), 1)), np.cumsum(ordered, axis=1)), axis=1)
