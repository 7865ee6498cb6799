"""The result of ``topicstore_replay``: the streams that a replay reads, their order, and the bounds of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from .columns import Column, Constant, to_integers
from .cursors import Cursor

__all__ = ["By", "GenerationPlan", "Order", "ReplayPlan", "ShardPlan", "TimeRange"]

Order = Literal["time", "any"]
"""``"time"`` merges everything by position, then by shard; ``"any"`` keeps each publisher's order in each topic."""
By = Literal["position", "timestamp"]
"""The times that a replay compares with its bounds: those of positions, or the messages' own timestamps."""


@attrs.frozen
class TimeRange:
    """Timestamps from ``start``, inclusive, to ``until``, exclusive, in microseconds since the epoch."""

    start: int = 0
    until: int | None = None
    """The end, exclusive; None if there is no end."""

    def overlaps(self, least: int, greatest: int) -> bool:
        """Return whether the range has a timestamp from ``least`` to ``greatest``, inclusive."""
        return greatest >= self.start and (self.until is None or least < self.until)

    def overlaps_any(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Return whether the range has a timestamp in one of the spans, whose ends are inclusive."""
        return any(self.overlaps(*span) for span in spans)

    def rows(self, timestamps: Column) -> npt.NDArray[np.intp] | None:
        """Return the indices of the rows whose timestamps are in the range, in order; None if all rows are."""
        if isinstance(timestamps, Constant):
            value = timestamps.value
            return None if self.overlaps(value, value) else np.empty(0, np.intp)
        times = to_integers(timestamps)
        among = times >= self.start if self.until is None else (times >= self.start) & (times < self.until)
        return None if among.all() else np.flatnonzero(among)


@attrs.frozen
class GenerationPlan:
    """The part of a replay that reads one generation of one shard."""

    cursors: list[Cursor]
    epoch: int
    """The number of positions within which its streams are not in order (`topicstore.contract.layout.Slab.epoch`)."""
    bound: int = (1 << 64) - 1
    """The highest position of this part to return, if that is below the shard's."""
    first: int = 0
    """The lowest position of this part, before which the cursors have no messages to return."""


@attrs.frozen(kw_only=True)
class ShardPlan:
    """One shard's part of a replay."""

    shard: int
    bound: int
    """The highest position to return."""
    generations: list[GenerationPlan]
    """The parts in reading order; each is read to its end before the next. A generation may have several parts."""


@attrs.frozen(kw_only=True)
class ReplayPlan:
    """The plan of a replay, which is fixed when the replay is requested."""

    shards: list[ShardPlan]
    order: Order
    batch_size: int
    """The number of messages to fetch at once."""
    timestamps: TimeRange | None
    """The range in which a message's own timestamp must lie for it to be returned; None returns all."""
