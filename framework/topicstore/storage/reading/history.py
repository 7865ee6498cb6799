"""`History`: how many messages of any topic had been stored by a position, known from zones without reading.

The number of messages up to a position is its rank. Between two positions of which it is known, 65,536 messages from
each other, messages are taken to be spread evenly over time. `Spread` places messages of which no more is known than
between which ranks they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The ranks of some positions of a shard, in order."""

    positions: Positions
    ranks: Numbers

    @classmethod
    def of(cls, shard: Shard, mark: int) -> Self:
        """Return what is known of a shard up to its watermark. Reads nothing."""
        positions, ranks, before = list[int](), list[int](), 0
        for record in shard.generations.listed():
            ends = shard.reader.zone_ends(record.number)  # the last zone of a sealed generation isn't full
            last = mark if record.last_position is None else record.last_position
            # The first generation of a shard begins with the lowest position, long before its first message.
            begin = max(record.first_position - 1, min([first_position(record.created), *ends, last]))
            positions += (begin, *ends, last)
            ranks += (before + min(SIZE * number, record.messages) for number in range(len(ends) + 1))
            before += record.messages
            ranks.append(before)
        return cls(np.maximum.accumulate(np.array(positions, np.uint64)), np.array(ranks, np.float64))

    def after(self, position: int) -> int:
        """Return how many messages are known to follow a position."""
        known = int(np.searchsorted(self.positions, np.uint64(position)))
        return int(self.ranks[-1] - self.ranks[known]) if known < len(self.ranks) else 0

    def ranks_at(self, positions: Positions) -> Numbers:
        """Return the ranks of positions."""
        return self.ranks_of_times(_times(positions))

    def ranks_of_times(self, times: Numbers) -> Numbers:
        """Return the ranks of the last positions before these times, in microseconds since the epoch."""
        return np.interp(times, _times(self.positions), self.ranks)

    @staticmethod
    def time_before(histories: Sequence[History], time: int, messages: float) -> int:
        """Return the time by which all shards had about so many messages fewer than by another time.

        It isn't before that one if nothing is known of what came then.
        """
        times = np.unique(np.concatenate([_times(one.positions) for one in histories]))
        ranks = np.sum([one.ranks_of_times(times) for one in histories], axis=0)
        rank = np.interp(float(time), times, ranks) - messages
        return int(np.interp(rank, ranks, times))


def _times(positions: Positions) -> Numbers:
    return (positions >> np.uint64(COUNTER_BITS)).astype(np.float64)


@attrs.frozen(eq=False)
class Spread:
    """Rows, each of a number of messages between two ranks. Made once, it answers for any number of ranks."""

    _first: Numbers
    _last: Numbers
    _begun: Numbers
    _ended: Numbers

    @classmethod
    def of(cls, first: Numbers, last: Numbers, messages: Numbers) -> Self:
        """Return the spread of messages of which each row's first and last have these ranks."""
        last = np.maximum(last, first + 1e-6)
        weights = messages / (last - first)
        columns = np.stack((weights, weights * first, messages))
        return cls(np.sort(first), np.sort(last), _sums(first, columns[:2]), _sums(last, columns))

    def before(self, at: Numbers) -> Numbers:
        """Return how many messages come before each of these ranks."""
        begun = self._begun[:, np.searchsorted(self._first, at, side="right")]
        ended = self._ended[:, np.searchsorted(self._last, at, side="right")]
        found: Numbers = at * (begun[0] - ended[0]) - (begun[1] - ended[1]) + ended[2]
        return found


def _sums(keys: Numbers, columns: Numbers) -> Numbers:
    """Return the sums of the first columns, none to all, in the order of their keys."""
    ordered = columns[:, np.argsort(keys)]
    return np.concatenate((np.zeros((len(columns), 1)), np.cumsum(ordered, axis=1)), axis=1)
